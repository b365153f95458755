"""What does a restart of all engines of a node, one after the other, cost their users?

    PYTHONPATH=examples .venv/bin/python benchmarks/bench_restart.py [--repetitions 3]

Arms: engines without kvshm (``plain``), with it, with a keeper beside them, and with a keeper and
``kvshm drain`` before each engine is stopped.  Requests go to the engine with the least load, at
a rate that three of four engines can serve.  Then each engine in turn gets no more requests, ends
those it has, is drained in the last arm, stopped and started again.  load_traffic.py
describes what is sent; the keeper has ``--extra-gb`` of memory, less than the prefixes need, since
one with room for everything has it before any drain.

Measured is from the first stop until the last engine is back.  In each repetition the arms follow
each other in an order that changes.  Prints a line of JSON for each run, and the medians and ratios
to ``--against`` at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench_load import compared, summary
from load_arms import KINDS, Setting, started
from load_client import Answer, Run, ask, drive, open_session
from load_traffic import Clients, Request, Traffic, least_load
from local_node import Engine, PromptTokens, clean_environment
from measurement import end_what_is_started, report
from sharing_node import SharingNode
from tiny_model import write_model

ARMS = {
    "plain": ("plain", False),
    "kvshm": ("kvshm", False),
    "kvshm+keeper": ("kvshm+keeper", False),
    "kvshm+keeper+drain": ("kvshm+keeper", True),
}
"""Each arm's kind of engines, and whether they are drained."""
WARM_UP_SECONDS = 40.0
LONGEST_SECONDS = 1800.0
DRAIN_SECONDS = 25
ANSWER_TOKENS = 8
TARGET_MS = 500.0
"""To the first token: how many had it sooner is printed of each run."""


class Restarted(NamedTuple):
    """Where the prompt tokens of an engine that was stopped came from, and its drain's result."""

    tokens: PromptTokens
    drained: dict[str, Any] | None


class Fleet:
    """The engines of a node, all or all but one of which get requests."""

    def __init__(self, node: SharingNode, engines: list[Engine], drains: bool) -> None:
        self._node, self.engines, self._drains = node, engines, drains
        self.busy = [0] * len(engines)
        self._up = set(range(len(engines)))
        self._route = least_load()
        self._before = [engine.prompt_tokens() for engine in engines]

    def choose(self) -> int:
        """The engine of the next request."""
        up = sorted(self._up)
        return up[self._route(0, [self.busy[number] for number in up])]

    async def restart(self, number: int) -> Restarted:
        """Restart an engine while the others serve."""
        self._up.remove(number)
        while self.busy[number]:
            await asyncio.sleep(0.05)
        engine = self.engines[number]
        drained = await asyncio.to_thread(self._drain, engine) if self._drains else None
        tokens = engine.prompt_tokens() - self._before[number]
        await asyncio.to_thread(engine.stop)
        self._node.engines.remove(engine)
        (again,) = await asyncio.to_thread(self._node.start_engines, engine.spec)
        self.engines[number], self._before[number] = again, again.prompt_tokens()
        self._up.add(number)
        return Restarted(tokens, drained)

    def tokens(self) -> list[PromptTokens]:
        """Where those of the running engines came from."""
        return [
            engine.prompt_tokens() - before
            for engine, before in zip(self.engines, self._before, strict=True)
        ]

    def _drain(self, engine: Engine) -> dict[str, Any]:
        command = [sys.executable, "-m", "kvshm.tools.cli", "drain", str(engine.process.pid)]
        done = subprocess.run(
            [*command, "--json", "--seconds", str(DRAIN_SECONDS)],
            env={**clean_environment(), **self._node.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        (found,) = json.loads(done.stdout)
        return {name: found[name] for name in ("end", "kept", "left", "seconds")}


async def serve(fleet: Fleet, requests: Iterator[Request]) -> tuple[Run, list[Restarted]]:
    """Send requests when they are due, until all engines have been restarted."""
    answers = list[Answer]()
    async with open_session() as session:

        async def send(number: int, prompt: list[int]) -> None:
            answers.append(await ask(session, fleet.engines[number], prompt, ANSWER_TOKENS))
            fleet.busy[number] -= 1

        async def restart_all() -> list[Restarted]:
            return [await fleet.restart(number) for number in range(len(fleet.engines))]

        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            restarts = tasks.create_task(restart_all())
            for request in requests:
                await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
                if restarts.done():
                    break
                number = fleet.choose()
                fleet.busy[number] += 1
                tasks.create_task(send(number, request.prompt))
        return Run(answers, time.monotonic() - began), restarts.result()


def run_arm(arm: str, setting: Setting, traffic: Traffic, seed: int) -> dict[str, Any]:
    """Start an arm's engines, fill their caches, and restart them under load."""
    kind, drains = ARMS[arm]
    clients = Clients(traffic, seed)
    with started(KINDS[kind], setting) as (node, engines, _):
        begins = clients.requests(seed + 1, replace(traffic, seconds=WARM_UP_SECONDS))
        asyncio.run(drive(engines, begins, least_load(), ANSWER_TOKENS))
        fleet = Fleet(node, list(engines), drains)
        run, restarted = asyncio.run(serve(fleet, clients.requests(seed)))
        found = summary(run, [*(e.tokens for e in restarted), *fleet.tokens()], TARGET_MS)
        found["seconds"] = round(run.seconds, 1)
        if drains:
            found["drained"] = [each.drained for each in restarted]
        return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}")
    add("--against", default="kvshm", help="the arm of which ratios are printed")
    add("--repetitions", type=int, default=3)
    add("--rate", type=float, default=3.0, help="requests a second")
    add("--prefixes", type=int, default=48)
    add("--prefix-tokens", type=int, default=2048)
    add("--zipf", type=float, default=1.0, help="exponent of the prefixes' popularity")
    add("--engines", type=int, default=4)
    add("--blocks", type=int, default=260, help="of 128 tokens, in each engine's KV cache")
    add("--extra-gb", type=float, default=0.15, help="of the keeper")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    if unknown := set(options.arms) - set(ARMS):
        parser.error(f"--arms {','.join(sorted(unknown))}: arms are {', '.join(ARMS)}")
    if options.against not in options.arms:
        parser.error(f"--against {options.against}: not one of the arms")
    return options


def main() -> None:
    """Command line: print a line of JSON for each run, and one for all."""
    end_what_is_started()
    options = _options()
    prefixes, tokens = options.prefixes, options.prefix_tokens
    traffic = Traffic(options.rate, LONGEST_SECONDS, prefixes, tokens, zipf=options.zipf)
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    with TemporaryDirectory(prefix="restart-") as directory:
        model = write_model(Path(directory) / "model")
        longest = traffic.longest_prompt + ANSWER_TOKENS
        sizes = options.engines, options.blocks, options.extra_gb
        setting = Setting(model, *sizes, lmcache=None, max_model_len=longest)
        for number in range(options.repetitions):
            for arm in random.Random(number).sample(options.arms, len(options.arms)):
                result = run_arm(arm, setting, traffic, seed=1000 * number)
                results[arm].append(result)
                print(json.dumps({"repetition": number, "arm": arm, **result}), flush=True)
    report(
        "restart",
        rate=options.rate,
        prefixes=options.prefixes,
        engines=options.engines,
        blocks=options.blocks,
        extra_gb=options.extra_gb,
        against=options.against,
        arms=compared(results, options.against),
    )


if __name__ == "__main__":
    main()
