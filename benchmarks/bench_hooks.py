"""Time spent inside kvshm's hooks, as a share of the time of each scheduler step.

    PYTHONPATH=examples python benchmarks/bench_hooks.py [--requests 64] [--clients 8]

Engine B runs with a stopwatch around every method of the connector (timed_connector.py)
while several clients ask it at once; half of the prompts begin with a prefix that engine A
has, so B computes, imports, decodes, publishes and reuses blocks.  A step lasts, as the engine
sees it, from its dispatch to its output: what vLLM's scheduler does before and after is not in it,
so the share is, if anything, too large.  ``..._of_worker`` is the share of a part of it, from where
the worker binds the step's metadata to where it clears them, which leaves out its preparation,
sampling and the way there and back.  The model is tiny; a real one's steps are longer.  What the
stopwatch shows of a call of nothing is taken off for each call (``stopwatch_percent``).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from local_node import Engine, EngineSpec
from measurement import percentiles, report
from sharing_node import BLOCK_SIZE, SharingNode, observe
from tiny_model import write_model

Step = tuple[int, int, int, int, int]
Steps = Mapping[str, Step]
"""Number of the step -> nanoseconds of the step, of them in kvshm; of those computing, copying;
how often the stopwatch was used."""
VOCABULARY = 1500
PREFIX_TOKENS, TAIL_TOKENS, DECODED_TOKENS = 512, 200, 64
NUM_BLOCKS = 192
"""Few enough for blocks to be reused."""


def timed_spec(model: Path, directory: Path) -> EngineSpec:
    """Describe the engine under the stopwatch, activated by the official setting."""
    transfer = {"kv_connector": "TimedConnector", "kv_connector_module_path": "timed_connector",
                "kv_role": "kv_both"}  # fmt: skip
    settings = {
        "KVSHM_ENABLE": "",
        "BENCH_HOOKS_DIRECTORY": str(directory),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    # Without time to shut down, vLLM kills its processes before they could write anything.
    arguments = ("--kv-transfer-config", json.dumps(transfer), "--shutdown-timeout", "30")
    return EngineSpec("timed", model, 1, NUM_BLOCKS, arguments, settings)


def load(node: SharingNode, a: Engine, b: Engine, requests: int, clients: int) -> int:
    """Ask engine B; returns how many blocks it imported."""
    drawn = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [drawn.randrange(VOCABULARY) for _ in range(count)]

    prompts = [tokens(PREFIX_TOKENS + TAIL_TOKENS) for _ in range(requests)]
    for prompt in prompts[::2]:
        with node.sharing(a, PREFIX_TOKENS // BLOCK_SIZE):
            a.complete(prompt[: PREFIX_TOKENS + 1], max_tokens=2)
    with observe(node, b) as seen, ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda prompt: b.complete(prompt, max_tokens=DECODED_TOKENS), prompts))
    return seen.imported_blocks


def shares(scheduler: Steps, worker: Steps, empty: tuple[float, float]) -> dict[str, list[float]]:
    """Return, per step, the share of its time spent in kvshm's hooks, in percent.  ``hooks``
    counts what a clock on the wall says, ``computing`` leaves out what other processes took.
    ``empty``: nanoseconds that either side's stopwatch shows of a call of nothing."""
    both = [(scheduler[s], worker[s]) for s in worker if s in scheduler and scheduler[s][0]]

    def percent(of: Callable[[Step, Step], float]) -> list[float]:
        return [100 * of(one, two) / one[0] for one, two in both]

    def stopwatch(one: Step, two: Step) -> float:
        return one[4] * empty[0] + two[4] * empty[1]

    def hooks(one: Step, two: Step) -> float:
        return one[1] + two[1] - stopwatch(one, two)

    return {
        "step_ms": [one[0] / 1e6 for one, _ in both],
        "worker_ms": [two[0] / 1e6 for _, two in both],
        "scheduler_percent": percent(lambda one, _: one[1] - one[4] * empty[0]),
        "worker_percent": percent(lambda _, two: two[1] - two[4] * empty[1]),
        "stopwatch_percent": percent(stopwatch),
        "hooks_percent": percent(hooks),
        "hooks_percent_without_copies": percent(lambda one, two: hooks(one, two) - two[3]),
        "hooks_percent_of_worker": [100 * hooks(one, two) / two[0] for one, two in both],
        "computing_percent": percent(lambda one, two: one[2] + two[2]),
    }


def costliest(methods: Mapping[str, tuple[int, int, int]]) -> dict[str, str]:
    """Return the five hooks that took most of the time: calls, mean and longest."""
    top = sorted(methods.items(), key=lambda item: -item[1][1])[:5]
    return {
        name: f"{calls} calls, mean {total / calls / 1000:.1f} us, longest {longest / 1000:.0f} us"
        for name, (calls, total, longest) in top
    }


def main() -> None:
    """Command line: print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    with SharingNode() as node:
        model = write_model(node.run_dir / "model")
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("a", model, core=0, num_blocks=1024), timed_spec(model, node.run_dir)
        )
        node.wait_joined(a, b)
        imported = load(node, a, b, args.requests, args.clients)
        b.stop()
        sides = ("scheduler", "worker")
        found = [json.loads((node.run_dir / f"{side}.json").read_text()) for side in sides]
    scheduler, worker = (side["steps"] for side in found)
    empty = (median(found[0]["empty"]), median(found[1]["empty"]))
    of_steps = shares(scheduler, worker, empty)
    measured = {name: percentiles(values) for name, values in of_steps.items()}
    methods = {side: costliest(each["methods"]) for side, each in zip(sides, found, strict=True)}
    report("hooks", imported_blocks=imported, **measured, costliest=methods)


if __name__ == "__main__":
    main()
