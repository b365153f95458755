"""What docs/performance.md shows of the results of a benchmark: a table, plots, and values for its
prose.  Pure: the lines of a file in benchmarks/results in, a View out.  A new benchmark needs a
function here, an entry in docs/performance.toml, and one in benchmarks/suite.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from performance_arms import first_token, load, restart
from performance_plots import Curves, Dots, Row
from performance_traces import traces
from performance_view import PERCENTILES, Line, Lines, View, number, spreads

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
BESIDE_PEER = {"prefill": f"{STEPS['prefill']}, beside a peer that has all blocks"}


def scheduler(lines: Lines) -> View:
    line = lines[-1]
    head = ("per step, p50 (p99)", "plain vLLM, ms", "in the hooks, ms", "of it", "first, ms")
    steps = [(called, line[name]) for name, called in STEPS.items()]
    steps += [(called, line["beside_peer"][name]) for name, called in BESIDE_PEER.items()]
    rows, dots = [], []
    for called, one in steps:
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


WAYS = {
    "computed": "computed: nothing to import",
    "local_hit": "hit in the own cache",
    "decode": "a token decoded",
    "exporting": "a request while the peer imports",
}
OVER_PLAIN = {"this_over_plain": "with a peer", "alone_over_plain": "without"}


def engines(lines: Lines) -> View:
    """Whole engines with kvshm over such without, by what they gain nothing from."""
    line = lines[-1]
    head = (
        "p50 (p99)",
        "without kvshm, ms",
        "with kvshm and a peer, ms",
        "ratio",
        "no peer, ratio",
    )
    rows, dots, highest_lows = [], [], []
    for way, called in WAYS.items():
        times = [line[f"{arm}_ms"][way] for arm in ("plain", "this")]
        ratios = {who: line[name][way] for name, who in OVER_PLAIN.items()}
        rows.append((
            called,
            *(f"{number(one['p50'])} ({number(one['p99'])})" for one in times),
            *(f"{r['median']} [{r['low']}, {r['high']}]" for r in ratios.values()),
        ))  # fmt: skip
        highest_lows += [ratio["low"] for ratio in ratios.values()]
        dots += [
            Row(f"{called}, {who}", {"low": r["low"], "median": r["median"], "high": r["high"]})
            for who, r in ratios.items()
        ]
    plot = Dots("Over engines without kvshm", "ratio", dots, from_zero=False)
    return View(head, rows, {"": plot}, {"highest_low": max(highest_lows)})


# -- what engines tell each other, and copy

SENT = {
    "rare": "ten a second",
    "rare_awaited": "ten a second, awaited",
    "busy": "a hundred a second",
}
KNOWN = {"all": "known", "first": "known to the first", "last": "known to the last"}


def events(lines: Lines) -> View:
    by_row = {line["row"]: line for line in lines}
    of = {
        f"{how}: {called}": by_row["visible"][kind][who]
        for kind, how in SENT.items()
        for who, called in KNOWN.items()
    }
    view = spreads(of, "µs", "Until other engines know of a block")
    return View(view.head, view.rows, view.plots, by_row)


def events_overload(lines: Lines) -> View:
    """The trials on the way to the capacity, and what happens at twice of it."""
    line = lines[-1]
    head = (
        "offered, records/s",
        "sent, records/s",
        "lost",
        "coordinator, cores",
        "equal after, ms",
    )
    rows = []
    for one in (*line["trials"], line):
        sent = (one["sent"] + one["dropped"]) / one["seconds"]
        lost, equal = (f"{one[what]:,}" for what in ("lost", "equal_after_ms"))
        rows.append((f"{one['offered']:,}", number(sent), lost, number(one["cores"]), equal))
    return View(head, rows)


def client(lines: Lines) -> View:
    parts = {
        "client_percent": "the thread that hears, and with it the GIL",
        "lost_percent": "with libzmq's thread",
        "lost_percent_quiet": "the same without traffic",
    }
    of = {called: lines[-1][name] for name, called in parts.items()}
    ours = [called for called in of if "without" not in called]
    return spreads(of, "%", "What a busy scheduler loses", ours)


def client_crowd(lines: Lines) -> View:
    of = {"applied to the replica": lines[-1]["records_heard_per_second"]}
    return spreads(of, "records/s", "Records that a busy engine hears")


ALONE = "nothing is applied"
GROWING = {
    "alone": ALONE,
    "applying": "records are applied, between two growths",
    "growing": "the index grows",
}


def growth(lines: Lines) -> View:
    of = {called: lines[-1]["stall_ms"][when] for when, called in GROWING.items()}
    view = spreads(of, "ms", "")
    dots = [
        Row(called, {"p50": one["p50"], "p99": one["p99"], "longest": one["max"]}, called != ALONE)
        for called, one in of.items()
    ]
    plot = Dots("A round of the scheduler's calls", "ms", dots)
    values = {"longest_growth": max(lines[-1]["grown_ms"])}
    return View(view.head, view.rows, {"": plot}, values)


WATCHED = {
    "none": "no console",
    "no page": "a console, no page",
    "a page": "one page",
    "8 pages": "eight pages",
}


def console(lines: Lines) -> View:
    """Shares of a core by arm, and the console's memory."""
    of = lines[-1]["percent"]
    head = ("of a core, p50 (most)", "kvshm serve", "an engine", "the coordinator", "memory, MB")
    rows = []
    for arm, called in WATCHED.items():
        cells = [
            f"{number(one['p50'])} % ({number(one['max'])})" if (one := of[arm].get(part)) else ""
            for part in ("console", "engine", "coordinator")
        ]
        memory = of[arm].get("rss_mb")
        rows.append((called, *cells, number(memory["max"]) if memory else ""))
    taken = {called: of[arm]["console"] for arm, called in WATCHED.items() if "console" in of[arm]}
    dots = [Row(called, {"p50": one["p50"], "most": one["max"]}) for called, one in taken.items()]
    return View(head, rows, {"": Dots("kvshm serve", "% of a core", dots)})


COPIES = {"memcpy": "memcpy", "kvshm": "kvshm", "index": "index", "index_copy": "index_copy"}
LEAST_FRAGMENT = 64 << 10
"""From which on the target counts."""
PEERS_CALLED = {"mooncake": "Mooncake's client", "lmcache": "LMCache"}


def copy(lines: Lines) -> View:
    """GB/s of each way, and its share of memcpy's; other caches' rows have one way only."""
    ours = [line for line in lines if "share" in line]
    ways = [way for way in COPIES if way in ours[0]["gb_per_second"]]
    head = ("GB/s, p50 (of memcpy)", *ways, "kvshm, memory's first touch")
    rows = [
        (
            f"{line['row']}, {line['threads']} thread{'s' * (line['threads'] > 1)}",
            *(copied(line, way) for way in ways),
            number(min(one["first"] for one in line["first_touch_gb_per_second"])),
        )
        for line in ours
    ]
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for way, speed in line.get("gb_per_second", {}).items():
            # Of groups and states no size says how they lie; two threads are in the table.
            if line.get("threads", 1) == 1 and line["row"] not in ("groups", "states"):
                point = (line["fragment"] / 1024, speed["p50"])
                series.setdefault(PEERS_CALLED.get(way, way), []).append(point)
    for line in lines:
        if "share" not in line:
            label = f"{PEERS_CALLED[line['row']]}, {line['fragment'] // 1024} KiB"
            rows.append(other_cache(label, line, len(head)))
    counted = [line["share"]["kvshm"]["p50"] for line in ours if line["fragment"] >= LEAST_FRAGMENT]
    curves = Curves("Copies from another process", "KiB of a fragment", "GB/s", series, log=True)
    return View(head, rows, {"": curves}, {"least": min(counted)})


def copied(line: Line, way: str) -> str:
    speed = number(line["gb_per_second"][way]["p50"])
    return f"{speed} ({100 * line['share'][way]['p50']:.0f} %)" if way in line["share"] else speed


def other_cache(label: str, line: Line, cells: int) -> tuple[str, ...]:
    if "failed" in line:
        return (f"{label}: failed: {line['failed']}", *[""] * (cells - 1))
    speed = number(line["gb_per_second"][line["row"]]["p50"])
    return (f"{label}: {speed}", *[""] * (cells - 1))


# -- what is added to an engine, once and in turns


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
    values = {line.get("model", line["benchmark"]): line for line in lines}
    projected = [
        f"{seconds:g} s for {size} GB" for size, seconds in values["start"]["projected_s"].items()
    ]
    view = spreads(of, "ms", "The witness of the weights", [k for k in of if "without" not in k])
    return View(view.head, view.rows, view.plots, {**values, "projected": ", ".join(projected)})


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


STARTS = {
    "python": "Python alone",
    "imported": "`import kvshm`",
    "unused": "the plugin in a process of vLLM, not turned on",
    "version": "`kvshm --version`",
    "coordinator": "the same of the coordinator",
}


def start(lines: Lines) -> View:
    found = lines[-1]["milliseconds"]
    of = {called: found[arm] for arm, called in STARTS.items()}
    return spreads(of, "ms", "A process's whole life", [*of][1:])


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
    """Milliseconds by row and by what was awaited."""
    of = {
        f"{line['row']}: {name}": one
        for line in lines
        for name, one in line.items()
        if isinstance(one, Mapping) and "p50" in one and name != "jitter_ms"
    }
    view = spreads(of, "ms", "After a fault, or a start")
    return View(view.head, view.rows, view.plots, {line["row"]: line for line in lines})


VIEWS: dict[str, Callable[[Lines], View]] = {
    "load": load,
    "load-engines": load,
    "load-memory": load,
    "load-users": load,
    "load-agents": load,
    "restart": restart,
    "import": first_token,
    "import-peers": first_token,
    "first-tokens": first_token,
    "lookup": lookup,
    "peer-lookups": peer_lookups,
    "groups": groups,
    "scheduler": scheduler,
    "hooks": hooks,
    "engines": engines,
    "events": events,
    "events-overload": events_overload,
    "client": client,
    "client-crowd": client_crowd,
    "growth": growth,
    "console": console,
    "copy": copy,
    "copy-peers": copy,
    "traces": traces,
    "traces-whole": traces,
    "idle": idle,
    "weights": weights,
    "admission": admission,
    "start": start,
    "transformers": transformers,
    "eviction": eviction,
    "faults": faults,
    "join": faults,
}
"""By the name of the benchmark in benchmarks/suite.py."""
