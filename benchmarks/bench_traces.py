"""What sharing finds, brings and costs when a real trace is replayed through 1 to 16 engines.

    PYTHONPATH=. .venv/bin/python benchmarks/bench_traces.py [--trace FILE] [--requests 1200]
    PYTHONPATH=. .venv/bin/python benchmarks/bench_traces.py --trace FILE --check

One node, cut into so many engines: all of them together always have ``--blocks`` blocks of 512
tokens and compute ``--tokens-per-second``.  The trace's requests come at its own times, by a clock
of its own, so that a run takes less time than the trace (trace_replay.py has the model, and
trace_caches.py and trace_node.py what is real: vLLM's pools; kvshm's tables, replicas, coordinator
and messages).  Without ``--trace`` one of the same form is drawn.  Modes:

    alone   engines that do not share
    kvshm   engines that share, as the product is set by default
    order   engines that share, in vLLM's order of eviction, where events are known at once
    ideal   one cache of the same size together, from which copies take no time

Prints a line of JSON for each number of engines, routing and mode: shares of all prompt tokens,
seconds to the first token, bytes, and what kvshm's parts took of a core, of all engines together;
then one for each routing that sets the modes side by side; and last, with ``--splits``, how kvshm's
costs grow with engines and blocks, as the exponent of a line through the logarithms.  ``--check``
has trace_check.py simulate all modes but kvshm too, and fails unless every request found as much
and had its first token at the same nanosecond.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import trace_check
from measurement import percentiles, report
from trace_replay import ROUTERS, Clock, Played, Replay, Service
from trace_requests import TRACE_BLOCK_TOKENS, Hashes, Request, draw, read, unlimited_hits

MODES = ("alone", "kvshm", "order", "ideal")
CHECKED = ("alone", "order", "ideal")
MOST_ENGINES = 28
"""As many as there are lease bits."""


@dataclass(frozen=True)
class Node:
    """The node that is cut into engines."""

    blocks: int
    """Of 512 tokens, of all engines together."""
    tokens_per_second: float
    """Computed by all engines together."""
    bytes_per_token: int
    copied_gb_per_second: float
    """By one engine."""
    prompt_ms: float
    """Of each prompt, besides its tokens."""
    decode_ms: float
    """A token of an answer."""

    def service(self, engines: int, block_tokens: int) -> Service:
        block_bytes = self.bytes_per_token * block_tokens
        return Service(
            round(engines * 1e9 / self.tokens_per_second),
            round(block_bytes / self.copied_gb_per_second),
            round(self.prompt_ms * 1e6),
            round(self.decode_ms * 1e6),
        )


@dataclass(frozen=True)
class Run:
    """One replay."""

    engines: int
    routing: str
    mode: str
    split: int = 1
    """Blocks of an engine for each of the trace's."""


def replay(run: Run, node: Node, requests: Sequence[Request]) -> tuple[Played, dict[str, Any]]:
    """Returns what became of the requests, and what kvshm took for it."""
    from trace_caches import Apart, Shared, Sharing  # takes seconds, and vLLM

    hashes, clock = Hashes(run.split), Clock()
    service = node.service(run.engines, hashes.block_tokens)
    blocks = node.blocks * run.split // run.engines
    shares = run.mode in ("kvshm", "order")
    block_bytes, first = node.bytes_per_token * hashes.block_tokens, run.mode == "kvshm"
    sharing = Sharing(duplicates_first=first, at_once=not first, block_bytes=block_bytes)
    caches = (
        Shared(run.engines, blocks, hashes, service, clock, sharing)
        if shares
        else Apart(run.engines, blocks, hashes, together=run.mode == "ideal")
    )
    route = ROUTERS[run.routing]
    gc.collect()
    gc.disable()  # with vLLM among it a collection takes a second of no part's time
    try:
        played = Replay(caches, run.engines, service, route, clock, hashes.block_tokens).run(
            requests
        )
        costs = costs_of(caches, len(requests)) if isinstance(caches, Shared) else {}
    finally:
        gc.enable()
        if isinstance(caches, Shared):
            caches.close()
    return played, costs


def costs_of(caches: Any, requests: int) -> dict[str, Any]:
    """What kvshm's parts took of a core, and its messages."""
    parts = {
        name: {
            "calls": cost.calls,
            "us_per_request": round(cost.total_ns / 1e3 / requests, 2),
            "longest_ms": round(cost.longest_ns / 1e6, 2),
        }
        for name, cost in caches.costs.of.items()
    }
    return {"core": parts, "events": asdict(caches.node.traffic), "entries": max(caches.entries())}


def summary(played: Played, block_tokens: int, bytes_per_token: int) -> dict[str, Any]:
    """Shares of all prompt tokens, and times to the first token in seconds."""
    tokens = sum(request.tokens for request in played.requests)
    local, imported, lost = (
        sum(getattr(found, name) for found in played.found) * block_tokens
        for name in ("local", "imported", "lost")
    )
    return {
        "requests": len(played.requests),
        "hit": round((local + imported) / tokens, 4),
        "imported": round(imported / tokens, 4),
        "lost": round(lost / tokens, 6),
        "imported_bytes": imported * bytes_per_token,
        "first_token_s": percentiles([ns / 1e9 for ns in played.first_token_ns])
        | {"p90": round(sorted(played.first_token_ns)[len(played.requests) * 9 // 10] / 1e9, 3)},
    }


def side_by_side(by_mode: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What each mode finds, and what of the ideal the others reach."""
    hits = {mode: found["hit"] for mode, found in by_mode.items()}
    ideal = hits.get("ideal")
    reached = {f"{mode}_of_ideal": round(hit / ideal, 4) for mode, hit in hits.items() if ideal}
    return {"hit": hits, **reached, "first_token_s": {
        mode: found["first_token_s"] for mode, found in by_mode.items()
    }}  # fmt: skip


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the line through the logarithms of these points, by least squares: 1 for what
    grows in proportion.  None for fewer than two places."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    return round(slope, 3)


# -- the check


def differences(run: Run, node: Node, requests: Sequence[Request], played: Played) -> list[str]:
    """Where the independent simulator finds something else."""
    hashes = Hashes(run.split)
    asks = [trace_check.Ask(r.at_ns, r.tokens, r.answer, hashes.of(r), r.session) for r in requests]
    service = node.service(run.engines, hashes.block_tokens)
    times = trace_check.Times(
        service.token_ns, service.block_ns, service.prompt_ns, service.decode_ns
    )
    blocks = node.blocks * run.split // run.engines
    simulation = trace_check.Simulation(asks, run.engines, blocks, hashes.block_tokens, times)
    expected = simulation.run(run.mode, run.routing)
    found: list[str] = []
    for request, has, first_token in zip(
        played.requests, played.found, played.first_token_ns, strict=True
    ):
        number = request.number
        wanted = expected.local[number], expected.imported[number], expected.first_token[number]
        if (has.local, has.imported, first_token) != wanted:
            got = has.local, has.imported, first_token
            found.append(f"request {number}: {got}, the simulator {wanted}")
    return found


# -- the command line


def runs_of(options: argparse.Namespace) -> Iterator[Run]:
    """Yield what is replayed, the runs with one number of engines and routing after each other."""
    for engines, routing, mode in product(options.engines, options.routing, options.modes):
        yield Run(engines, routing, mode)


def grown(options: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs that show how costs grow with blocks: the most engines, in turns."""
    for split in options.splits:
        yield Run(max(options.engines), "rr", "kvshm", split)


def whole(name: str, least: int, most: int) -> Any:
    def parse(text: str) -> int:
        if not (text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"{name} {text}: a whole number from {least} to {most}"
            )
        return int(text)

    return parse


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: not above 0")
    return value


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=whole("--requests", 2, 1 << 30), default=1200)
    engines = whole("--engines", 1, MOST_ENGINES)
    parser.add_argument("--engines", type=engines, nargs="+", default=[1, 4, 16])
    parser.add_argument("--routing", choices=ROUTERS, nargs="+", default=list(ROUTERS))
    parser.add_argument("--modes", choices=MODES, nargs="+", default=["alone", "kvshm", "ideal"])
    parser.add_argument("--blocks", type=whole("--blocks", 16, 1 << 20), default=8192)
    parser.add_argument("--rate", type=above_zero, default=3.4, help="of a drawn trace")
    parser.add_argument("--tokens-per-second", type=above_zero, default=60_000.0)
    parser.add_argument("--bytes-per-token", type=whole("bytes", 1, 1 << 30), default=131_072)
    parser.add_argument("--copied-gb-per-second", type=above_zero, default=50.0)
    parser.add_argument("--prompt-ms", type=above_zero, default=3.0)
    parser.add_argument("--decode-ms", type=above_zero, default=20.0)
    split = whole("--splits", 1, TRACE_BLOCK_TOKENS)
    parser.add_argument("--splits", type=split, nargs="*", default=[1, 4, 16])
    parser.add_argument("--split-requests", type=whole("requests", 2, 1 << 30), default=300)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    for split in options.splits:
        if TRACE_BLOCK_TOKENS % split:
            parser.error(f"--splits {split}: does not divide {TRACE_BLOCK_TOKENS}")
    if options.check:
        options.modes = [*CHECKED, *(mode for mode in options.modes if mode not in CHECKED)]
    return options


def requests_of(options: argparse.Namespace) -> list[Request]:
    """Raises ValueError or OSError for a file that is no trace, and ValueError for a request that
    no engine has room for."""
    if options.trace is None:
        requests = list(islice(draw(options.rate), options.requests))
    else:
        with options.trace.open() as lines:
            requests = list(islice(read(lines), options.requests))
    if len(requests) < 2:
        raise ValueError(f"{options.trace}: fewer than two requests")
    room = options.blocks // max(options.engines) * TRACE_BLOCK_TOKENS
    longest = max(request.tokens + request.answer for request in requests)
    if longest > room:
        raise ValueError(f"{longest} tokens of one request, {room} of an engine: more --blocks")
    return requests


def points(lines: Sequence[dict[str, Any]], by: str) -> dict[str, Any]:
    """How the costs of these lines grow with ``by``: exponents, and the points of a plot."""
    parts = sorted({part for line in lines for part in line["core"]})
    of = {
        part: [(line[by], line["core"][part]["us_per_request"]) for line in lines]
        for part in parts
        if all(part in line["core"] for line in lines)
    }
    of["events received, bytes"] = [(li[by], li["events"]["received_bytes"]) for li in lines]
    return {name: {"exponent": exponent(pts), "points": pts} for name, pts in of.items()}


def main() -> None:
    """Command line: print lines of JSON.  Ends with 1 if a check fails."""
    options = options_of(sys.argv[1:])
    try:
        requests = requests_of(options)
    except (OSError, ValueError) as exc:
        sys.exit(f"bench_traces.py: {exc}")
    node = Node(
        options.blocks, options.tokens_per_second, options.bytes_per_token,
        options.copied_gb_per_second, options.prompt_ms, options.decode_ms,
    )  # fmt: skip
    about = {"trace": options.trace.name if options.trace else "drawn", "node": asdict(node),
             "unlimited_hit": round(unlimited_hits(requests), 4)}  # fmt: skip
    lines: list[dict[str, Any]] = []
    hits: dict[tuple[int, str], dict[str, Any]] = {}
    wrong = 0
    for run in runs_of(options):
        played, costs = replay(run, node, requests)
        found = summary(played, TRACE_BLOCK_TOKENS // run.split, node.bytes_per_token)
        if options.check and run.mode in CHECKED:
            bad = differences(run, node, requests, played)
            wrong += len(bad)
            found |= {"checked": len(requests) - len(bad), "differences": bad[:3]}
        report("traces", **asdict(run), **found, **costs, **about)
        hits.setdefault((run.engines, run.routing), {})[run.mode] = found
        if run.mode == "kvshm":
            lines.append({**asdict(run), **costs})
    for (engines, routing), by_mode in hits.items():
        report("traces_modes", engines=engines, routing=routing, **side_by_side(by_mode))
    growth(options, node, requests, lines)
    if wrong:
        sys.exit(f"bench_traces.py: {wrong} requests differ from the simulator's")


def growth(
    options: argparse.Namespace,
    node: Node,
    requests: Sequence[Request],
    lines: Sequence[dict[str, Any]],
) -> None:
    """Report how costs grow with engines, by what was replayed, and with blocks."""
    if by_engines := [line for line in lines if line["routing"] == "rr" and line["engines"] > 1]:
        report("traces_growth", by="engines", costs=points(by_engines, "engines"))
    by_blocks = []
    for run in grown(options):
        _, costs = replay(run, node, requests[: options.split_requests])
        by_blocks.append({**asdict(run), "blocks": node.blocks * run.split, **costs})
    if by_blocks:
        report("traces_growth", by="blocks", costs=points(by_blocks, "blocks"),
               longest_apply_ms=[(li["blocks"], li["core"]["apply"]["longest_ms"])
                                 for li in by_blocks])  # fmt: skip


if __name__ == "__main__":
    main()
