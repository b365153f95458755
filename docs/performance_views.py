"""What docs/performance.md shows of the results of a benchmark: a table, plots, and values for its
prose.  Pure: the lines of a file in benchmarks/results in, a View out.  A new benchmark needs a
function here, an entry in docs/performance.toml, and one in benchmarks/suite.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from performance_arms import first_token, load, restart
from performance_plots import Dots, Row
from performance_view import PERCENTILES, Lines, View, number, spreads

# -- lookups


def lookup(lines: Lines) -> View:
    """All of each size's distributions; the rows are those that the benchmark names."""
    of = {
        f"{line['keys']:,}: {name.replace('_', ' ')}": one
        for line in lines
        for name, one in line.items()
        if isinstance(one, Mapping) and "p50" in one
    }
    return spreads(of, "µs", "A lookup among other engines")


CACHES = {"kvshm": "kvshm", "dict": "a dict", "mooncake": "Mooncake", "lmcache": "LMCache"}
ASKED = {"hit": "all found", "miss": "the first one missing"}


def peer_lookups(lines: Lines) -> View:
    """A row for each length and kind of question, with all caches beside each other."""
    head = ("µs, p50 (p99)", *CACHES.values())
    rows, plots = [], {}
    for kind, asked in ASKED.items():
        dots = []
        for line in lines:
            of = line[kind]
            cells = [f"{number(of[c]['p50'])} ({number(of[c]['p99'])})" for c in CACHES]
            rows.append((f"{line['keys']:,} blocks, {asked}", *cells))
            dots += [
                Row(f"{line['keys']:,}: {called}", {p: of[c][p] for p in PERCENTILES}, c == "kvshm")
                for c, called in CACHES.items()
            ]
        plots[kind] = Dots(f"A lookup of blocks, {asked}", "µs", dots)
    return View(head, rows, plots)


def groups(lines: Lines) -> View:
    head = ("", "blocks", "all groups, µs", "one lookup for each, µs", "ratio")
    rows = []
    dots = []
    for line in lines:
        both = [line[name] for name in ("all groups", "each alone")]
        cells = [f"{number(one['p50'])} ({number(one['p99'])})" for one in both]
        rows.append((line["model"], f"{line['blocks']:,}", *cells, number(line["ratio"]["p50"])))
        dots.append(Row(line["model"], {p: line["all groups"][p] for p in PERCENTILES}))
    plot = Dots("A lookup over several KV cache groups", "µs", dots)
    return View(head, rows, {"": plot})


# -- what is added to an engine

STEPS = {
    "prefill": "prefill of 8,000 tokens",
    "decode": "256 decodes",
    "decode_with_drafts": "256 decodes, three drafts",
}


def scheduler(lines: Lines) -> View:
    line = lines[-1]
    head = ("per step, p50 (p99)", "plain vLLM, ms", "in the hooks, ms", "of it", "first, ms")
    rows, dots = [], []
    for name, called in STEPS.items():
        one = line[name]
        parts = [one[part] for part in ("plain_ms", "hooks_ms", "output_ms")]
        plain, hooks, output = (f"{number(part['p50'])} ({number(part['p99'])})" for part in parts)
        rows.append((called, plain, hooks, f"{one['hooks_percent']} %", output))
        dots += [
            Row(f"{called}: plain", {p: parts[0][p] for p in PERCENTILES}, ours=False),
            Row(f"{called}: hooks", {p: parts[1][p] for p in PERCENTILES}),
        ]
    return View(head, rows, {"": Dots("vLLM's scheduler, per step", "ms", dots)})


SHARES_OF_A_STEP = {
    "hooks_percent": "of the step",
    "hooks_percent_without_copies": "without copies",
    "computing_percent": "of the step, on a core",
    "hooks_percent_of_worker": "of the worker's part",
}


def hooks(lines: Lines) -> View:
    of = {called: lines[-1][name] for name, called in SHARES_OF_A_STEP.items()}
    return spreads(of, "%", "Share of a step in kvshm's hooks")


def client(lines: Lines) -> View:
    of = {
        "with traffic": lines[-1]["lost_percent"],
        "without": lines[-1]["lost_percent_quiet"],
    }
    return spreads(of, "%", "What a busy scheduler loses", ["with traffic"])


def client_crowd(lines: Lines) -> View:
    of = {"applied to the replica": lines[-1]["records_heard_per_second"]}
    return spreads(of, "records/s", "Records that a busy engine hears")


def idle(lines: Lines) -> View:
    parts = {"ready_ms": "in the slot table", "in_replica_ms": "in the other's replica"}
    of = {
        f"{way}, {called}": lines[-1][way][part]
        for way in ("plain", "speculative")
        for part, called in parts.items()
    }
    return spreads(of, "ms", "After the client's last token")


def weights(lines: Lines) -> View:
    of = {}
    for line in lines:
        if "tensors" in line:
            at = f"{line['tensors']} tensors"
            of[f"a look at all {at}"] = line["all"]
            of[f"a step without the witness; {at}"] = line["step"]["without"]
            of[f"a step with the witness; {at}"] = line["step"]["with"]
    values = {line["model"]: line for line in lines if "model" in line}
    view = spreads(of, "ms", "The witness of the weights", [k for k in of if "without" not in k])
    return View(view.head, view.rows, view.plots, {**values, "calls": lines[-1]})


ADMISSIONS = {
    "tested": "a tested version",
    "elsewhere": "changed in what does not count",
    "reformatted": "laid out anew",
    "changed": "each function changed",
}


def admission(lines: Lines) -> View:
    found = lines[-1]["milliseconds"]
    of = {called: found[arm] for arm, called in ADMISSIONS.items()}
    return spreads(of, "ms", "Does kvshm know this vLLM?")


def transformers(lines: Lines) -> View:
    head = ("p50 (p99)", "plain, ms", "with kvshm, ms", "ratio")
    rows, dots = [], []
    for line in lines:
        for part in ("prefill", "again", "decode"):
            label = f"{part}, {line['requests']} x {line['tokens']:,} tokens"
            one = line[part]
            cells = [one[name] for name in ("plain_ms", "with_kvshm_ms", "ratio")]
            rows.append((label, *(f"{number(c['p50'])} ({number(c['p99'])})" for c in cells)))
            dots.append(Row(label, {p: one["ratio"][p] for p in PERCENTILES}))
    return View(head, rows, {"": Dots("Over plain transformers", "ratio", dots)})


# -- simulated, and after faults

ORDERS = {
    "plain": "no sharing",
    "vllm": "sharing, vLLM's order",
    "duplicates": "sharing, duplicates first",
    "ideal": "one cache of the same size",
}


def eviction(lines: Lines) -> View:
    head = ("blocks of each engine", *ORDERS.values(), "duplicates first, of one cache")
    rows, dots = [], []
    for line in lines:
        found = {order: 100 * line[order]["found"] for order in ORDERS}
        of_ideal = f"{100 * line['duplicates_of_ideal']:.1f} %"
        rows.append((str(line["blocks"]), *(f"{one:.1f} %" for one in found.values()), of_ideal))
        dots += [
            Row(f"{line['blocks']}: {ORDERS[order]}", {"found": one}, order == "duplicates")
            for order, one in found.items()
        ]
    return View(head, rows, {"": Dots("Prompt tokens found in a cache", "%", dots)})


def faults(lines: Lines) -> View:
    of = {
        f"{line['row']}: {name}": one
        for line in lines
        for name, one in line.items()
        if isinstance(one, Mapping) and "p50" in one and name != "jitter_ms"
    }
    return spreads(of, "ms", "After a fault")


VIEWS: dict[str, Callable[[Lines], View]] = {
    "load": load,
    "restart": restart,
    "import": first_token,
    "lookup": lookup,
    "peer-lookups": peer_lookups,
    "groups": groups,
    "scheduler": scheduler,
    "hooks": hooks,
    "client": client,
    "client-crowd": client_crowd,
    "idle": idle,
    "weights": weights,
    "admission": admission,
    "transformers": transformers,
    "eviction": eviction,
    "faults": faults,
}
"""By the name of the benchmark in benchmarks/suite.py."""
