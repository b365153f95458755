"""Is sharing worth it under load?  An open loop, and less room on each engine than is popular.

    PYTHONPATH=examples .venv/bin/python benchmarks/bench_load.py \\
        --arms plain-rr,plain-affinity,kvshm-rr,kvshm-least --rates 4,8,16 [--repetitions 5]

An arm is KIND-ROUTER.  Kinds (load_arms.py): engines without and with kvshm, with LMCache's server,
with both (the longer prefix is loaded), and with vLLM's own offloading; those with LMCache need
``--lmcache FOLDER``, filled by ``pip install --no-deps --target FOLDER lmcache
opentelemetry-exporter-prometheus``.  The router is this client: round robin, affinity (a prefix, or
a user, always goes to the same engine) or the least load, so no proxy is in the way.
load_traffic.py describes what is sent; every arm gets the same.  Arms that have memory beside the
KV caches get ``--extra-gb`` of it: one store for all engines, or each engine a part (offloading).

In each repetition every kind is started anew, in an order that changes, and its routers follow each
other in an order that changes, each with prompts that its engines have not seen, after a part of
the same traffic that does not count; then the rates, from the lowest one on.  A line of JSON is
printed for each run, whether it failed or not, and one at the end: for each rate the medians of
each arm, and of the ratios to the arm ``--against``, repetition by repetition, with the 95 %
interval of that median (compare.py); and for each arm the requests a second that had their first
token within ``--target-ms``: the most at any rate, and the highest rate up to which 90 % had it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from compare import ratio
from load_arms import KINDS, Setting, started, why
from load_client import Run, converse, drive
from load_traffic import ROUTERS, Clients, Traffic
from local_node import Engine, PromptTokens
from measurement import percentiles, report
from tiny_model import write_model

WARM_UP_SECONDS = 15.0
WARM_UP_RATE = 4.0
"""At most: an arm that cannot keep up must not begin with a queue."""
BLOCK_TOKENS = 128
LEAST_REQUESTS = 20
"""Of a run."""
SUSTAINED_PERCENT = 90

Result = dict[str, Any]
"""What is printed of a run."""


# -- one run


def summary(run: Run, tokens: Sequence[PromptTokens], target_ms: float) -> Result:
    """Return what is printed of a run.  ``tokens``: of each engine, where they came from."""
    times = [1000 * answer.ttft_s for answer in run.answers]
    failed = sum(answer.failed for answer in run.answers)
    within = sum(ms <= target_ms for ms in times)
    gaps = [1000 * gap for answer in run.answers for gap in answer.gaps_s]
    if min(len(times), len(gaps)) < 2:
        return {"error": f"{failed} of {len(times)} requests have failed"}
    p90 = statistics.quantiles(times, n=100, method="inclusive")[89]
    where = {
        "computed": sum(each.computed for each in tokens),
        "local": sum(each.local_hit for each in tokens),
        "imported": sum(each.imported for each in tokens),
    }
    whole = sum(where.values()) or 1
    return {
        "sent": len(times),
        "failed": failed,
        "requests_per_second": round((len(times) - failed) / run.seconds, 3),
        "within_target_per_second": round(within / run.seconds, 3),
        "within_target_percent": round(100 * within / len(times), 1),
        "ttft_ms": {**percentiles(times), "p90": round(p90, 3)},
        "inter_token_ms": percentiles(gaps),
        "percent_of_tokens": {name: round(100 * n / whole, 1) for name, n in where.items()},
    }


def send(engines: Sequence[Engine], router: str, clients: Clients, run: Traffic, seed: int) -> Run:
    """Send a run's requests, and return what became of them."""
    route = ROUTERS[router]()
    if run.users:
        conversations = clients.conversations(seed, run)
        return asyncio.run(converse(engines, conversations, route, run.answer_tokens, run.seconds))
    return asyncio.run(drive(engines, clients.requests(seed, run), route, run.answer_tokens))


def run_arm(
    engines: Sequence[Engine], router: str, runs: Sequence[Traffic], contents: int, target_ms: float
) -> Iterator[Result]:
    """Warm the engines up with a part of the traffic, and yield what is measured at each rate."""
    clients = Clients(runs[0], contents)
    begins = replace(runs[0], rate=min(runs[0].rate, WARM_UP_RATE), seconds=WARM_UP_SECONDS)
    send(engines, router, clients, begins, seed=0)
    for number, run in enumerate(runs, 1):
        before = [engine.prompt_tokens() for engine in engines]
        answered = send(engines, router, clients, run, seed=number)
        after = [engine.prompt_tokens() for engine in engines]
        used = [b - a for a, b in zip(before, after, strict=True)]
        yield summary(answered, used, target_ms)


# -- all runs


class Row(NamedTuple):
    """A run and what came of it."""

    repetition: int
    arm: str
    rate: float
    result: Result
    """``{"error": ...}`` if it came to nothing."""


def repetition(
    number: int, arms: Sequence[str], setting: Setting, runs: Sequence[Traffic], target_ms: float
) -> Iterator[Row]:
    """Yield a row for each arm and rate, also for those that fail."""
    kinds: dict[str, list[str]] = {}
    for arm in arms:
        kind, _, router = arm.rpartition("-")
        kinds.setdefault(kind, []).append(router)
    order = random.Random(number)
    for kind in order.sample(list(kinds), len(kinds)):
        routers = order.sample(kinds[kind], len(kinds[kind]))
        missing = [(f"{kind}-{router}", run.rate) for router in routers for run in runs]
        try:
            with started(KINDS[kind], setting) as (_, engines, _store):
                for place, router in enumerate(routers):
                    contents = 1000 * number + place
                    for result in run_arm(engines, router, runs, contents, target_ms):
                        yield Row(number, *missing.pop(0), result)
        except (RuntimeError, OSError) as error:
            for arm, rate in missing:
                yield Row(number, arm, rate, {"error": why(error)})


MEASURED = {
    "requests_per_second": ("requests_per_second",),
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "ttft_p90_ms": ("ttft_ms", "p90"),
    "ttft_p99_ms": ("ttft_ms", "p99"),
    "inter_token_p50_ms": ("inter_token_ms", "p50"),
    "inter_token_p99_ms": ("inter_token_ms", "p99"),
}
"""What arms are compared by, and where a result has it."""


def compared(results: dict[str, list[Result]], against: str) -> dict[str, Any]:
    """Return each arm's medians over the repetitions, and its ratios to the arm ``against`` in
    those repetitions in which neither failed."""
    found: dict[str, Any] = {}
    for arm, each in results.items():
        found[arm] = (
            {"errors": errors} if (errors := [r["error"] for r in each if _failed(r)]) else {}
        )
        good = [result for result in each if not _failed(result)]
        pairs = [p for p in zip(each, results[against], strict=True) if not any(map(_failed, p))]
        for name in MEASURED if good else ():
            mine = [[_value(result, name)] for result, _ in pairs]
            others = [[_value(result, name)] for _, result in pairs]
            median = round(statistics.median(_value(result, name) for result in good), 3)
            found[arm][name] = {"median": median, "over": ratio(mine, others) if pairs else None}
    return found


def _failed(result: Result) -> bool:
    return "error" in result


def _value(result: Result, name: str) -> float:
    first, *then = MEASURED[name]
    value: float = result[first][then[0]] if then else result[first]
    return value


def goodput(rows: Sequence[Row], arm: str) -> dict[str, float | None]:
    """Return how many requests a second of an arm had their first token within the target: the
    most at any rate, and the highest rate up to which SUSTAINED_PERCENT of all had it, or None."""
    rates = sorted({row.rate for row in rows})

    def median(rate: float, name: str) -> float:
        at_rate = [row.result for row in rows if (row.arm, row.rate) == (arm, rate)]
        values: list[float] = [result.get(name, 0.0) for result in at_rate]
        return statistics.median(values)

    def holds(rate: float) -> bool:
        return median(rate, "within_target_percent") >= SUSTAINED_PERCENT

    best = max(median(rate, "within_target_per_second") for rate in rates)
    return {"best": best, "sustained": max(takewhile(holds, rates), default=None)}


def _arms(text: str) -> list[str]:
    arms = text.split(",")
    for arm in arms:
        kind, _, router = arm.rpartition("-")
        if kind not in KINDS or router not in ROUTERS:
            raise argparse.ArgumentTypeError(
                f"{arm}: no arm; kinds: {', '.join(KINDS)}; routers: {', '.join(ROUTERS)}"
            )
    return arms


def _numbers(text: str) -> list[float]:
    numbers = [float(each) for each in text.split(",")]
    if sorted(set(numbers)) != numbers:
        raise argparse.ArgumentTypeError(f"{text}: not from the lowest to the highest")
    return numbers


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = "plain-rr,plain-affinity,kvshm-rr,kvshm-least"
    add = parser.add_argument
    add("--arms", type=_arms, default=_arms(usual), help=f"KIND-ROUTER,... ({usual})")
    add("--against", default="plain-affinity", help="the arm of which ratios are printed")
    add("--repetitions", type=int, default=3)
    add("--rates", type=_numbers, default=[7.0], help="requests a second, the lowest one first")
    add("--target-ms", type=float, default=500.0, help="to the first token, for goodput")
    add("--seconds", type=float, default=45.0, help="of each run, without its warm-up")
    add("--prefixes", type=int, default=24)
    add("--prefix-tokens", type=int, default=2048)
    add("--tail-tokens", type=int, default=60)
    add("--answer-tokens", type=int, default=8)
    add("--zipf", type=float, default=1.0, help="exponent of the prefixes' popularity")
    add("--shift", type=float, default=0.0, help="seconds after which the popularity moves on")
    add("--agents", type=int, default=0, help="agents that go on and fork, instead of prefixes")
    add("--users", type=int, default=0, help="users that talk and think, instead of prefixes")
    add("--engines", type=int, default=2)
    add("--blocks", type=int, default=260, help="of 128 tokens, in each engine's KV cache")
    add("--extra-gb", type=float, default=1.0, help="beside the KV caches, for arms that have some")
    add("--lmcache", type=Path, help="folder in which LMCache is installed")
    options = parser.parse_args()
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse now what would fail after minutes."""
    if options.against not in options.arms:
        parser.error(f"--against {options.against}: not one of the arms")
    positive = ("repetitions", "seconds", "prefixes", "prefix_tokens", "tail_tokens", "target_ms")
    checked = [(name, getattr(options, name)) for name in positive]
    checked += [
        (n, getattr(options, n)) for n in ("answer_tokens", "engines", "blocks", "extra_gb")
    ]
    for name, value in [*checked, *(("rates", rate) for rate in options.rates)]:
        if not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value}: not above 0")
    for name in ("zipf", "shift", "agents", "users"):
        if not 0 <= getattr(options, name) < math.inf:
            parser.error(f"--{name} {getattr(options, name)}: not 0 or above")
    if options.agents and options.users:
        parser.error("--agents and --users: only one of them")
    if options.answer_tokens < 2:
        parser.error("--answer-tokens 1: no time between two tokens")
    if options.rates[0] * options.seconds < LEAST_REQUESTS:
        parser.error(f"--rates times --seconds: below {LEAST_REQUESTS}, too few for percentiles")
    _check_room(parser, options)


def _check_room(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    stores = [arm for arm in options.arms if KINDS[arm.rpartition("-")[0]].stores]
    if stores and options.extra_gb % 1:
        parser.error(f"--extra-gb {options.extra_gb:g}: LMCache's server takes whole numbers only")
    if stores and not (options.lmcache and (options.lmcache / "lmcache").is_dir()):
        parser.error(f"{stores[0]} needs --lmcache FOLDER, into which LMCache was installed")
    longest, room = _longest(options), options.blocks * BLOCK_TOKENS
    if longest > room:
        parser.error(f"--blocks {options.blocks}: {room} tokens, a prompt has up to {longest}")


def _traffic(options: argparse.Namespace, rate: float) -> Traffic:
    return Traffic(
        rate,
        options.seconds,
        options.prefixes,
        options.prefix_tokens,
        options.tail_tokens,
        options.zipf,
        options.shift,
        options.agents,
        options.users,
        options.answer_tokens,
    )


def _longest(options: argparse.Namespace) -> int:
    """Tokens of the longest prompt with its answer."""
    answer: int = options.answer_tokens
    return _traffic(options, options.rates[0]).longest_prompt + answer


def main() -> None:
    """Command line: print a line of JSON for each run, and one for all."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runs = [_traffic(options, rate) for rate in options.rates]
    rows: list[Row] = []
    with TemporaryDirectory(prefix="load-") as directory:
        model = write_model(Path(directory) / "model")
        sizes = options.engines, options.blocks, options.extra_gb
        setting = Setting(model, *sizes, options.lmcache, _longest(options))
        for number in range(options.repetitions):
            for row in repetition(number, options.arms, setting, runs, options.target_ms):
                rows.append(row)
                line = {"benchmark": "load_run", **row._asdict(), **row.result}
                del line["result"]
                print(json.dumps(line), flush=True)
    report(
        "load",
        traffic={name: value for name, value in asdict(runs[0]).items() if name != "rate"},
        engines=options.engines,
        blocks=options.blocks,
        extra_gb=options.extra_gb,
        repetitions=options.repetitions,
        against=options.against,
        rates={str(rate): compared(at(rows, rate), options.against) for rate in options.rates},
        target_ms=options.target_ms,
        goodput={arm: goodput(rows, arm) for arm in options.arms},
    )


def at(rows: Sequence[Row], rate: float) -> dict[str, list[Result]]:
    """Return the results at a rate by arm, repetition by repetition."""
    found: dict[str, list[Result]] = {}
    for row in (row for row in rows if row.rate == rate):
        found.setdefault(row.arm, []).append(row.result)
    return found


if __name__ == "__main__":
    main()
