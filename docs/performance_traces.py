"""What docs/performance.md shows of a trace that was replayed (benchmarks/bench_traces.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from performance_plots import Curves, Dots, Row
from performance_view import Line, Lines, View, number

ROUTINGS = {"rr": "round robin", "sticky": "by session", "prefix": "by prefix"}
MODES = {"alone": "no sharing", "kvshm": "kvshm", "ideal": "one cache"}
BLOCK_TOKENS = 512
"""Of such a trace."""
COSTLIEST = 5
"""Parts that a plot shows."""
GROWS_WITH = {"engines": "engines", "blocks": "blocks of all engines"}
TRACES = {"drawn": "A drawn trace", "conversation_trace.jsonl": "Mooncake's trace of conversations"}


def traces(lines: Lines) -> View:
    """A row for each number of engines and routing; what is found, and how costs grow."""
    rows, dots = [], []
    runs = {(li["engines"], li["routing"], li["mode"]): li for li in lines if "mode" in li}
    cuts = dict.fromkeys((engines, routing) for engines, routing, _ in runs)
    reached = {cut: runs[*cut, "kvshm"]["hit"] / runs[*cut, "ideal"]["hit"] for cut in cuts}
    for engines, routing in cuts:
        of = {mode: runs[engines, routing, mode] for mode in MODES}
        found = {mode: 100 * one["hit"] for mode, one in of.items()}
        label = f"{engines} engine{'s' * (engines > 1)}, {ROUTINGS[routing]}"
        dots.append(Row(label, {MODES[mode]: hit for mode, hit in found.items()}))
        rows.append((
            label,
            *(f"{hit:.1f} %" for hit in found.values()),
            f"{100 * reached[engines, routing]:.1f} %",
            *(first_token(one) for one in of.values()),
            number(of["kvshm"]["imported_bytes"] / 1e9),
        ))  # fmt: skip
    times = [f"first token, {mode}, s" for mode in MODES.values()]
    head = ("", *MODES.values(), "kvshm, of one cache", *times, "imported, GB")
    grown = {line["by"]: line["costs"] for line in lines if "costs" in line}
    plots = {by: costs(of, by) for by, of in grown.items() if len(of["apply"]["points"]) > 1}
    one = next(iter(runs.values()))
    values = {
        "about": one,
        "trace": TRACES.get(one["trace"], one["trace"]),
        "least": min(reached.values()),
        "core": of_a_core(runs),
        "block_tokens": BLOCK_TOKENS,
        "unlimited": f"{100 * one['unlimited_hit']:.0f} %",
        "grown": "; ".join(exponents(of, by) for by, of in grown.items()),
    }
    return View(head, rows, {"": Dots("Prompt tokens found", "%", dots), **plots}, values)


def first_token(one: Line) -> str:
    times = one["first_token_s"]
    return f"{number(times['p50'])} ({number(times['p99'])})"


def of_a_core(runs: Mapping[tuple[int, str, str], Line]) -> dict[str, Any]:
    """What all parts take for a request, of all engines together, where there are most of them."""
    with_costs = [one for one in runs.values() if "core" in one and one["routing"] == "rr"]
    most = max(with_costs or (one for one in runs.values() if "core" in one), key=_engines)
    spent = sum(part["us_per_request"] for part in most["core"].values())
    return {"engines": most["engines"], "us": spent}


def _engines(one: Line) -> int:
    engines: int = one["engines"]
    return engines


def costs(of: Mapping[str, Mapping[str, Any]], by: str) -> Curves:
    """Time on a core for a request of the costliest parts, with their exponents."""
    parts = [part for part, cost in of.items() if cost["exponent"] and "bytes" not in part]
    parts.sort(key=lambda part: -of[part]["points"][-1][1])
    series = {
        f"{part} ({of[part]['exponent']:.1f})": [(x, y) for x, y in of[part]["points"] if y > 0]
        for part in parts[:COSTLIEST]
    }
    title = f"Costs as {GROWS_WITH[by]} grow (exponent)"
    return Curves(title, GROWS_WITH[by], "µs of a request, all engines", series, log=True)


def exponents(of: Mapping[str, Mapping[str, Any]], by: str) -> str:
    """In words."""
    each = [f"{part} {c['exponent']:.2f}" for part, c in of.items() if c["exponent"] is not None]
    return f"with {GROWS_WITH[by]} {', '.join(each)}"
