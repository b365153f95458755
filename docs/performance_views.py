"""What docs/performance.md shows of the results of a benchmark: a table, plots, and values for its
prose.  Pure: the lines of a file in benchmarks/results in, a View out.  A new benchmark needs a
function here, an entry in docs/performance.toml, and one in benchmarks/suite.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from performance_plots import Dots, Plot, Row

Line = Mapping[str, Any]
Lines = Sequence[Line]
Spread = Mapping[str, float]
"""As benchmarks/measurement.py tells many values."""
PERCENTILES = ("p50", "p99")


@dataclass(frozen=True)
class View:
    """Of one benchmark's results."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    plots: Mapping[str, Plot] = field(default_factory=dict)
    """By the name that the file has behind the section's."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """For the prose, beside ``lines`` and ``line``, the last one of them."""


def number(value: float) -> str:
    """Write a measured value with three digits that count, or all that are before the point."""
    return f"{value:,.0f}" if value == 0 or abs(value) >= 100 else f"{value:#.3g}"


def spreads(of: Mapping[str, Spread], unit: str, title: str, ours: Iterable[str] = ()) -> View:
    """Return a view of several distributions in one unit: a row each.  ``ours``: those with kvshm,
    all of them if it is empty."""
    head = ("", f"p50, {unit}", f"p99, {unit}", "least to greatest", "n")
    rows = [
        (
            label,
            number(one["p50"]),
            number(one["p99"]),
            f"{number(one['min'])} to {number(one['max'])}" if "min" in one else "",
            f"{one.get('n', 0):,}",
        )
        for label, one in of.items()
    ]
    chosen = {*ours} or {*of}
    dots = [Row(k, {p: one[p] for p in PERCENTILES}, k in chosen) for k, one in of.items()]
    return View(head, rows, {"": Dots(title, unit, dots)})


# -- under load

ROUTERS = {"rr": "round robin", "affinity": "prefix affinity", "least": "least load"}
KINDS = {
    "plain": "no sharing",
    "kvshm": "kvshm",
    "kvshm+keeper": "kvshm and a keeper",
    "kvshm+keeper+drain": "kvshm, keeper, drain",
    "lmcache": "LMCache",
    "kvshm+lmcache": "kvshm and LMCache",
}
TTFT = {p: f"ttft_{p}_ms" for p in ("p50", "p90", "p99")}
SHARE = "percent_of_tokens"
BLOCK_TOKENS = 128
"""In the KV cache of an engine on a CPU."""


def arm_called(arm: str) -> str:
    """The arm as the page names it: what shares, and how requests are routed."""
    kind, _, router = arm.rpartition("-")
    if not kind:
        return KINDS.get(arm, arm)
    return f"{KINDS.get(kind, kind)}, {ROUTERS.get(router, router)}"


def over(measured: Line) -> str:
    """A median, and its ratio with the 95 % interval."""
    ratio = measured["over"]
    interval = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return f"{number(measured['median'])}; {interval}"


def shares(lines: Lines, arm: str) -> dict[str, float]:
    """Medians over an arm's runs of the percentages of tokens, by where they came from."""
    runs = [line[SHARE] for line in lines if line.get("arm") == arm and SHARE in line]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]} if runs else {}


def load(lines: Lines) -> View:
    return of_arms(lines, "Time to the first token under load")


def restart(lines: Lines) -> View:
    return of_arms(lines, "While four engines are restarted")


def of_arms(lines: Lines, title: str) -> View:
    """Of all arms: requests a second, times to the first token, and where the tokens came from."""
    line = lines[-1]
    arms: Mapping[str, Line] = line["arms"]
    rows = []
    for arm, measured in arms.items():
        share = shares(lines, arm)
        percent = [f"{share[k]:.1f} %" if k in share else "" for k in ("computed", "imported")]
        times = [over(measured[name]) for name in TTFT.values()]
        rows.append((arm_called(arm), over(measured["requests_per_second"]), *times, *percent))
    dots = [
        Row(
            arm_called(arm),
            {p: measured[name]["median"] for p, name in TTFT.items()},
            arm.startswith("kvshm"),
        )
        for arm, measured in arms.items()
    ]
    head = ("", "requests/s", *(f"{p}, ms" for p in TTFT), "computed", "imported")
    plot = Dots(title, "ms to the first token", dots)
    values = {
        "behind": behind(arms),
        "against": arm_called(line["against"]),
        "room": room(line),
        "failed": sum(run.get("failed", 0) for run in lines if "arm" in run),
        "share": {arm: shares(lines, arm) for arm in arms},
    }
    return View(head, rows, {"": plot}, values)


def room(line: Line) -> int:
    """How many prefixes an engine's KV cache has room for, each with a request's own tokens."""
    traffic = line.get("traffic", {"prefix_tokens": 1, "tail_tokens": 0})
    tokens: int = traffic["prefix_tokens"] + traffic["tail_tokens"]
    num_blocks: int = line["blocks"]
    return num_blocks // -(-tokens // BLOCK_TOKENS)


def behind(arms: Mapping[str, Line]) -> str:
    """Where another arm is faster than each with kvshm, in words."""
    found = []
    for p, name in TTFT.items():
        best = min(m[name]["median"] for arm, m in arms.items() if arm.startswith("kvshm"))
        found += [
            f"{arm_called(arm)} at {p} ({number(m[name]['median'])} ms to {number(best)})"
            for arm, m in arms.items()
            if not arm.startswith("kvshm") and m[name]["median"] < best
        ]
    return "; ".join(found) or "nothing"


# -- first tokens, lookups


def first_token(lines: Lines) -> View:
    line = lines[-1]
    ways = {"computed": "computed", "imported": "imported", "local_hit": "hit in the own cache"}
    of = {called: line[f"{way}_ms"] for way, called in ways.items()}
    return spreads(of, "ms", f"First token of {line['tokens']:,} tokens", ["imported"])


def lookup(lines: Lines) -> View:
    """All of each size's distributions; the rows are those that the benchmark names."""
    of = {
        f"{name}; {line['engines']} x {line['blocks']:,}": one
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
