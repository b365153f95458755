"""Is sharing worth it under load?  An open loop, and less room on each engine than is popular.

    PYTHONPATH=examples .venv/bin/python benchmarks/bench_load.py \\
        --arms plain-rr,plain-affinity,kvshm-rr,kvshm-least [--repetitions 5] [--plot load.svg]

An arm is KIND-ROUTER.  Kinds: engines without and with kvshm, with LMCache's server, and with both
(the longer prefix is loaded); those with LMCache need ``--lmcache FOLDER``, filled by ``pip install
--no-deps --target FOLDER lmcache opentelemetry-exporter-prometheus``.  The router is this client:
round robin, affinity (a prefix always goes to the same engine) or the least load, so no proxy is in
the way.  load_traffic.py describes what is sent; every arm gets the same.  Arms that have memory
beside the KV caches get ``--extra-gb`` of it.

In each repetition every kind is started anew, in an order that changes, and its routers follow each
other in an order that changes, each with prompts that its engines have not seen, after a part of
the same traffic that does not count.  Printed is a line of JSON for each run, and at the
end one with the medians of all, and of the ratios to the arm ``--against``, repetition by
repetition, with the 95 % interval of that median (compare.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import aiohttp
from compare import ratio
from load_arms import KINDS, Setting, started
from load_traffic import ROUTERS, Clients, Request, Router, Traffic
from local_node import Engine, PromptTokens
from measurement import report
from tiny_model import write_model

WARM_UP_SECONDS = 15.0
WARM_UP_RATE = 4.0
"""At most: an arm that cannot keep up must not begin with a queue."""
ANSWER_TOKENS = 8
BLOCK_TOKENS = 128
PATIENCE_SECONDS = 180.0
PERCENTILES = (50, 90, 99)
LEAST_REQUESTS = 20
"""Of a run."""


class Answer(NamedTuple):
    ttft_s: float
    """PATIENCE_SECONDS if it has failed."""
    failed: bool


class Run(NamedTuple):
    answers: list[Answer]
    seconds: float


# -- one run


async def drive(engines: Sequence[Engine], requests: Iterator[Request], router: Router) -> Run:
    """Send each request when it is due, whatever has become of the others."""
    busy, answers = [0] * len(engines), list[Answer]()
    limits = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as session:

        async def ask(number: int, prompt: list[int]) -> None:
            ttft = None
            with suppress(aiohttp.ClientError, TimeoutError):
                ttft = await first_token(session, engines[number], prompt)
            busy[number] -= 1
            answers.append(Answer(ttft or PATIENCE_SECONDS, ttft is None))

        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
                number = router(request.prefix, busy)
                busy[number] += 1
                tasks.create_task(ask(number, request.prompt))
        return Run(answers, time.monotonic() - began)


async def first_token(
    session: aiohttp.ClientSession, engine: Engine, prompt: list[int]
) -> float | None:
    """Return the seconds until the first token, once the last one has come."""
    body = {
        "model": str(engine.spec.model),
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    first, began = None, time.monotonic()
    url = f"http://127.0.0.1:{engine.port}/v1/completions"
    async with session.post(url, json=body) as answer:
        async for line in answer.content:
            if first is None and line.startswith(b"data:") and b'"text"' in line:
                first = time.monotonic() - began
        return first if answer.status == 200 else None


def summary(run: Run, tokens: Sequence[PromptTokens]) -> dict[str, Any]:
    """Return what is printed of a run.  ``tokens``: of each engine, where they came from."""
    times = [answer.ttft_s for answer in run.answers]
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    failed = sum(answer.failed for answer in run.answers)
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
        **{f"ttft_p{p}_ms": round(1000 * cuts[p - 1], 1) for p in PERCENTILES},
        "percent_of_tokens": {name: round(100 * n / whole, 1) for name, n in where.items()},
    }


def run_arm(
    engines: Sequence[Engine], router: str, traffic: Traffic, contents: int, seed: int
) -> dict[str, Any]:
    """Warm the engines up with a part of the traffic, and measure."""
    clients = Clients(traffic, contents)
    begins = replace(traffic, rate=min(traffic.rate, WARM_UP_RATE), seconds=WARM_UP_SECONDS)
    asyncio.run(drive(engines, clients.requests(seed + 1, begins), ROUTERS[router]()))
    before = [engine.prompt_tokens() for engine in engines]
    run = asyncio.run(drive(engines, clients.requests(seed), ROUTERS[router]()))
    after = [engine.prompt_tokens() for engine in engines]
    return summary(run, [b - a for a, b in zip(before, after, strict=True)])


# -- all runs


def repetition(
    number: int, arms: Sequence[str], setting: Setting, traffic: Traffic
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each arm with its result."""
    kinds: dict[str, list[str]] = {}
    for arm in arms:
        kind, _, router = arm.rpartition("-")
        kinds.setdefault(kind, []).append(router)
    order = random.Random(number)
    for kind in order.sample(list(kinds), len(kinds)):
        with started(KINDS[kind], setting) as (_, engines):
            routers = kinds[kind]
            for place, router in enumerate(order.sample(routers, len(routers))):
                contents = 1000 * number + place
                result = run_arm(engines, router, traffic, contents, seed=number)
                yield f"{kind}-{router}", result


MEASURED = ("requests_per_second", *(f"ttft_p{p}_ms" for p in PERCENTILES))


def compared(results: dict[str, list[dict[str, Any]]], against: str) -> dict[str, Any]:
    """Return each arm's medians over the repetitions, and its ratios to the arm ``against``."""
    found: dict[str, Any] = {}
    for arm, each in results.items():
        for name in MEASURED:
            over = ratio([[one[name]] for one in each], [[one[name]] for one in results[against]])
            median = round(statistics.median(one[name] for one in each), 3)
            found.setdefault(arm, {})[name] = {"median": median, "over": over}
    return found


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw each repetition of each arm: requests a second, and times to first token."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MEASURED), figsize=(4 * len(MEASURED), 4))
    for axis, name in zip(axes, MEASURED, strict=True):
        for place, each in enumerate(results.values()):
            axis.plot([place] * len(each), [one[name] for one in each], "o", alpha=0.6)
        axis.set_title(name)
        axis.set_yscale("linear" if name.startswith("requests") else "log")
        axis.set_xticks(range(len(results)), results, rotation=60, ha="right")
    figure.tight_layout()
    figure.savefig(path)


def _arms(text: str) -> list[str]:
    arms = text.split(",")
    for arm in arms:
        kind, _, router = arm.rpartition("-")
        if kind not in KINDS or router not in ROUTERS:
            raise argparse.ArgumentTypeError(
                f"{arm}: no arm; kinds: {', '.join(KINDS)}; routers: {', '.join(ROUTERS)}"
            )
    return arms


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = "plain-rr,plain-affinity,kvshm-rr,kvshm-least"
    add = parser.add_argument
    add("--arms", type=_arms, default=_arms(usual), help=f"KIND-ROUTER,... ({usual})")
    add("--against", default="plain-affinity", help="the arm of which ratios are printed")
    add("--repetitions", type=int, default=3)
    add("--rate", type=float, default=7.0, help="requests a second")
    add("--seconds", type=float, default=45.0, help="of each run, without its warm-up")
    add("--prefixes", type=int, default=24)
    add("--prefix-tokens", type=int, default=2048)
    add("--tail-tokens", type=int, default=60)
    add("--zipf", type=float, default=1.0, help="exponent of the prefixes' popularity")
    add("--shift", type=float, default=0.0, help="seconds after which the popularity moves on")
    add("--agents", type=int, default=0, help="agents that go on and fork, instead of prefixes")
    add("--engines", type=int, default=2)
    add("--blocks", type=int, default=260, help="of 128 tokens, in each engine's KV cache")
    add("--extra-gb", type=float, default=1.0, help="beside the KV caches, for arms that have some")
    add("--lmcache", type=Path, help="folder in which LMCache is installed")
    add("--plot", type=Path, help="draw the results into this file (matplotlib)")
    options = parser.parse_args()
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse now what would fail after minutes."""
    if options.against not in options.arms:
        parser.error(f"--against {options.against}: not one of the arms")
    positive = ("repetitions", "rate", "seconds", "prefixes", "prefix_tokens", "tail_tokens")
    for name in (*positive, "engines", "blocks", "extra_gb"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: not above 0")
    for name in ("zipf", "shift", "agents"):
        if not 0 <= getattr(options, name) < math.inf:
            parser.error(f"--{name} {getattr(options, name)}: not 0 or above")
    if options.rate * options.seconds < LEAST_REQUESTS:
        parser.error(f"--rate times --seconds: below {LEAST_REQUESTS}, too few for percentiles")
    stores = [arm for arm in options.arms if KINDS[arm.rpartition("-")[0]].stores]
    if stores and not (options.lmcache and (options.lmcache / "lmcache").is_dir()):
        parser.error(f"{stores[0]} needs --lmcache FOLDER, into which LMCache was installed")
    longest, room = _traffic(options).longest_prompt + ANSWER_TOKENS, options.blocks * BLOCK_TOKENS
    if longest > room:
        parser.error(f"--blocks {options.blocks}: {room} tokens, a prompt has up to {longest}")
    if options.plot:
        _check_plot(parser, options.plot)


def _check_plot(parser: argparse.ArgumentParser, path: Path) -> None:
    if not os.access(path.parent, os.W_OK):
        parser.error(f"--plot {path}: no file can be written there")
    if find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        parser.error(f"--plot {path}: name a file that ends in one of {', '.join(sorted(kinds))}")


def _traffic(options: argparse.Namespace) -> Traffic:
    return Traffic(
        options.rate,
        options.seconds,
        options.prefixes,
        options.prefix_tokens,
        options.tail_tokens,
        options.zipf,
        options.shift,
        options.agents,
    )


def main() -> None:
    """Command line: print a line of JSON for each run, and one for all."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    traffic = _traffic(options)
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    with TemporaryDirectory(prefix="load-") as directory:
        model = write_model(Path(directory) / "model")
        longest = traffic.longest_prompt + ANSWER_TOKENS
        setting = Setting(
            model, options.engines, options.blocks, options.extra_gb, options.lmcache, longest
        )
        for number in range(options.repetitions):
            for arm, result in repetition(number, options.arms, setting, traffic):
                results[arm].append(result)
                print(json.dumps({"repetition": number, "arm": arm, **result}), flush=True)
    report(
        "load",
        traffic=asdict(traffic),
        blocks=options.blocks,
        repetitions=options.repetitions,
        against=options.against,
        arms=compared(results, options.against),
    )
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
