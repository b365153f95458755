"""Views of what engines of several kinds are compared in: load, restarts, first tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from performance_plots import Curves, Dots, Row
from performance_view import Line, Lines, View, number, spreads

# -- under load

ROUTERS = {"rr": "round robin", "affinity": "prefix affinity", "least": "least load"}
KINDS = {
    "plain": "no sharing",
    "kvshm": "kvshm",
    "kvshm+keeper": "kvshm and a keeper",
    "kvshm+keeper+drain": "kvshm, keeper, drain",
    "lmcache": "LMCache",
    "kvshm+lmcache": "kvshm and LMCache",
    "offload": "vLLM's offloading",
    "offload+copies": "vLLM's offloading, CPU copies",
}
TTFT = {p: f"ttft_{p}_ms" for p in ("p50", "p90", "p99")}
MEASURED = {
    "requests_per_second": "requests/s",
    **{name: f"{p}, ms" for p, name in TTFT.items()},
    "inter_token_p99_ms": "between tokens, p99, ms",
}
SHARE = "percent_of_tokens"
BLOCK_TOKENS = 128
"""In the KV cache of an engine on a CPU."""
KEEPS_UP = 0.97
"""Of the requests that come: an arm that answers fewer in a second is past saturation."""


def arm_called(arm: str) -> str:
    """The arm as the page names it: what shares, and how requests are routed."""
    kind, _, router = arm.rpartition("-")
    if not kind:
        return KINDS.get(arm, arm)
    return f"{KINDS.get(kind, kind)}, {ROUTERS.get(router, router)}"


def over(measured: Line) -> str:
    """A median, and its ratio with the 95 % interval."""
    if (ratio := measured["over"]) is None:
        return number(measured["median"])
    interval = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    return f"{number(measured['median'])}; {interval}"


def shares(runs: Lines, arm: str) -> dict[str, float]:
    """Medians over an arm's runs of the percentages of tokens, by where they came from."""
    of = [run[SHARE] for run in runs if run["arm"] == arm and SHARE in run]
    return {name: statistics.median(one[name] for one in of) for name in of[0]} if of else {}


def load(lines: Lines) -> View:
    """The arms at the highest rate that all of them keep up with, and all rates: behind it times
    say how long a run was."""
    line = lines[-1]
    rates: Mapping[str, Mapping[str, Line]] = line["rates"]
    kept = takewhile(lambda rate: all_keep_up(rates[rate], offered(lines, float(rate))), rates)
    rate = [next(iter(rates)), *kept][-1]
    arms = rates[rate]
    runs = [run for run in lines[:-1] if run["rate"] == float(rate)]
    view = of_arms(runs, arms, "Time to the first token under load")
    plots = dict(view.plots)
    if len(rates) > 1:
        plots["rates"] = growing(rates)
    values = {
        "arms": arms,
        "behind": behind(arms),
        "against": arm_called(line["against"]),
        "room": room(line),
        "rate": float(rate),
        "goodput": goodput(line),
    }
    return replace(view, plots=plots, values=values)


def offered(lines: Lines, rate: float) -> float:
    """How many requests really came in a second, where so many come on the average."""
    sent = [run["sent"] for run in lines[:-1] if run["rate"] == rate and "sent" in run]
    seconds: float = lines[-1]["traffic"]["seconds"]
    return statistics.median(sent) / seconds if sent else rate


def all_keep_up(arms: Mapping[str, Line], offered: float) -> bool:
    answered = [arm["requests_per_second"]["median"] for arm in arms.values() if TTFT["p50"] in arm]
    return min(answered, default=0) >= KEEPS_UP * offered


def growing(rates: Mapping[str, Mapping[str, Line]]) -> Curves:
    """Times to the first token from idle past saturation."""
    series: dict[str, list[tuple[float, float]]] = {}
    for rate, arms in rates.items():
        for arm, measured in arms.items():
            if TTFT["p90"] in measured:
                point = (float(rate), measured[TTFT["p90"]]["median"])
                series.setdefault(arm_called(arm), []).append(point)
    return Curves("As load grows", "requests/s", "p90 to the first token, ms", series, log=True)


def goodput(line: Line) -> str:
    """What each arm serves within the target, in words behind a sentence; "" if nobody asked."""
    if not line.get("goodput"):
        return ""
    each = (
        f"{arm_called(arm)} {number(of['best'])}"
        + ("" if of["sustained"] is None else f" (up to {of['sustained']:g} nearly all)")
        for arm, of in line["goodput"].items()
        if any(TTFT["p50"] in arms.get(arm, {}) for arms in line["rates"].values())
    )
    target = f"{line['target_ms']:g} ms"
    return f"; the most requests/s whose first token came within {target}: {', '.join(each)}"


def restart(lines: Lines) -> View:
    line, runs = lines[-1], lines[:-1]
    view = of_arms(runs, line["arms"], "While four engines are restarted")
    failed = sum(run.get("failed", 0) for run in runs)
    return replace(view, values={"against": arm_called(line["against"]), "failed": failed})


def of_arms(runs: Lines, arms: Mapping[str, Line], title: str) -> View:
    """Of all arms: what was measured, and where the tokens came from."""
    measured = {k: v for k, v in MEASURED.items() if any(k in arm for arm in arms.values())}
    rows, dots = [], []
    for arm, of in arms.items():
        share = shares(runs, arm)
        percent = [f"{share[k]:.1f} %" if k in share else "" for k in ("computed", "imported")]
        cells = [over(of[name]) if name in of else "" for name in measured]
        failed = [f"failed: {error}" for error in dict.fromkeys(of.get("errors", ()))]
        rows.append((": ".join([arm_called(arm), *failed]), *cells, *percent))
        if TTFT["p50"] in of:
            points = {p: of[name]["median"] for p, name in TTFT.items()}
            dots.append(Row(arm_called(arm), points, arm.startswith("kvshm")))
    head = ("", *measured.values(), "computed", "imported")
    some = any("errors" in of for of in arms.values())
    return View(head, rows, {"": Dots(title, "ms to the first token", dots)}, failed=some)


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
        times = {arm: of[name]["median"] for arm, of in arms.items() if name in of}
        best = min((ms for arm, ms in times.items() if arm.startswith("kvshm")), default=math.inf)
        found += [
            f"{arm_called(arm)} at {p} ({number(ms)} ms to {number(best)})"
            for arm, ms in times.items()
            if not arm.startswith("kvshm") and ms < best
        ]
    return "; ".join(found) or "nothing"


# -- first tokens

WAYS = {"computed": "computed", "imported": "imported", "local_hit": "hit in the own cache"}


def first_token(lines: Lines) -> View:
    """Each arm's ways at the longest prefix, and how computing and importing grow with it."""
    line = lines[-1]
    arms = {arm: of for arm, of in line["arms"].items() if "imported_ms" in of}
    tokens = line["imported_tokens"] + line["tail_tokens"]
    of = {
        f"{KINDS.get(arm, arm)}: {called}": spreads_of[f"{way}_ms"]
        for arm, spreads_of in arms.items()
        for way, called in WAYS.items()
    }
    ours = [f"{KINDS.get(arm, arm)}: imported" for arm in arms if arm.startswith("kvshm")]
    why = {**dict.fromkeys(line["arms"], "no round counts"), **line.get("failed", {})}
    failed = [f"{KINDS.get(arm, arm)}: failed: {why[arm]}" for arm in why if arm not in arms]
    if not arms:
        return View(("",), [(each,) for each in failed], failed=True)
    view = spreads(of, "ms", f"First token of {tokens:,} tokens", ours)
    rows = [*view.rows, *((each, *[""] * (len(view.head) - 1)) for each in failed)]
    plots = {**view.plots, "lengths": by_length(line, [*arms])}
    if (first := next(iter(line["arms"]))) not in arms:  # with which the others are compared
        return View(view.head, rows, plots, {"tokens": tokens}, failed=True)
    pays = line["pays_from_tokens"][first]
    values = {
        "tokens": tokens,
        "kvshm": arms[first],
        "ratio": arms[first]["imported_over_local_hit"],
        "tail": arms[first]["imported_over_local_hit_p99"],
        **({} if pays is None else {"pays_tokens": pays}),
        "pays": "no length" if pays is None else f"{pays:,} tokens",
        "beside": beside(line, first),
    }
    return View(view.head, rows, plots, values, failed=pays is None or bool(failed))


def beside(line: Line, first: str) -> str:
    """How long the first arm's imports take, of the others', in words."""
    ratios = {arm: line.get("imported", {}).get(f"{first}_over_{arm}") for arm in line["arms"]}
    return ", ".join(
        f"{of['median']:.2f} [{of['low']:.2f}, {of['high']:.2f}] of {KINDS.get(arm, arm)}"
        for arm, of in ratios.items()
        if of
    )


def by_length(line: Line, arms: Sequence[str]) -> Curves:
    """Computed by the first arm, and imported by each, over the length of the prefix."""
    series: dict[str, list[tuple[float, float]]] = {}
    for arm in arms:
        lengths = {**line["lengths"][arm], str(line["imported_tokens"]): line["arms"][arm]}
        points = [(float(n), of) for n, of in lengths.items() if "imported_ms" in of]
        if arm == arms[0]:
            series["computed"] = [(n, of["computed_ms"]["p50"]) for n, of in points]
        imported = [(n, of["imported_ms"]["p50"]) for n, of in points]
        series[f"{KINDS.get(arm, arm)}: imported"] = imported
    return Curves("From which length on", "tokens of the prefix", "ms, p50", series, log=True)
