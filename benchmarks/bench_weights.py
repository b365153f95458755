"""What it costs to digest the weights, to look at samples of them, and to watch calls of the ranks.

    python benchmarks/bench_weights.py

No vLLM: models are tensors of the sizes of a tiny and of a small model.  ``share`` is the time of
the witness's thread at the default of KVSHM_WEIGHTS_CHECK_SECONDS, ``step`` another thread that
computes as a serving rank does (a product of matrices, and Python in between), with and without
the witness, in turns.  ``start`` is how fast one core digests a rank's weights, as each rank does
before it shares, beside reading the same memory and nothing else, and what that makes of models of
so many GB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import random
from types import SimpleNamespace
from typing import Any

import torch
from measurement import percentiles, report

from kvshm.config import Config
from kvshm.hooks.samples import Samples
from kvshm.hooks.vllm.rank_calls import watch_calls
from kvshm.hooks.weights import digest_tensors, model_places, model_tensors
from kvshm.hooks.witness import WeightWitness

MODELS = {"tiny": (38, 256), "small": (704, 1024)}
"""Number of matrices of so many rows and columns; each has a vector beside it."""
LOOKS = 300
STEPS = 3000
CALLS = 200_000
START_MATRICES, START_WIDTH, START_ROUNDS = 64, 4096, 8
"""2 GB: more than any cache holds."""
PROJECTED_GB = 1, 8, 70


def model_of(matrices: int, width: int) -> torch.nn.Module:
    model = torch.nn.Module()
    for i in range(matrices // 2):
        for name, shape in ((f"weight{i}", (width, width)), (f"norm{i}", (width,))):
            tensor = torch.randn(shape).bfloat16()
            model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return model


def timed(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of one call."""
    begun = clock()
    call()
    return (clock() - begun) * 1e3


def looks(model: torch.nn.Module) -> dict[str, Any]:
    """Of one look at all tensors, and at one part of them."""
    samples = Samples(model_places(model), random)
    cpu = [timed(samples.look_at_all, time.thread_time) for _ in range(LOOKS)]
    parts = [timed(samples.look) for _ in range(LOOKS)]
    seconds = Config().weights_check_seconds
    share = sorted(cpu)[len(cpu) // 2] / (seconds * 1e3)
    return {
        "tensors": len(list(model_tensors(model))),
        "all": percentiles(cpu),
        "part": percentiles(parts),
        "share_percent": round(100 * share, 4),
        "samples": round(timed(lambda: Samples(model_places(model), random)), 2),
        "digest": round(timed(lambda: digest_tensors(model_tensors(model))), 1),
    }


def start() -> dict[str, Any]:
    """GB/s of one core, in turns; and seconds that a model of one rank takes."""
    model = model_of(START_MATRICES, START_WIDTH)
    tensors = [tensor for _, tensor in model_tensors(model)]
    gigabytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e9

    def read() -> None:
        for tensor in tensors:
            tensor.view(torch.int64).sum()

    ways = {"digest": lambda: digest_tensors(model_tensors(model)), "read": read}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(START_ROUNDS):
        for way, call in ways.items():
            rates[way].append(gigabytes / timed(call) * 1e3)
    rate = percentiles(rates["digest"])["p50"]
    return {
        **{f"{way}_gb_per_s": percentiles(found) for way, found in rates.items()},
        "digest_over_read": round(rate / percentiles(rates["read"])["p50"], 2),
        "projected_s": {str(size): round(size / rate, 2) for size in PROJECTED_GB},
    }


def steps(model: torch.nn.Module) -> dict[str, Any]:
    """Steps of another thread: without the witness, and with it looking at a tensor as often as
    the default says."""
    a, b = torch.randn(256, 256), torch.randn(256, 256)

    def step() -> None:
        (a @ b).sum().item()
        sum(i for i in range(2000))

    found: dict[str, list[float]] = {"without": [], "with": []}
    witness = WeightWitness(Config().weights_check_seconds, print)
    for _ in range(4):
        found["without"] += [timed(step) for _ in range(STEPS)]
        witness.prepare(model_places(model))
        witness.watch({})
        found["with"] += [timed(step) for _ in range(STEPS)]
        witness.stop()
    witness.close()
    return {name: percentiles(times) for name, times in found.items()}


def calls() -> dict[str, float]:
    """Nanoseconds that a call of the ranks takes more because it is watched."""

    def rpc(method: str, args: tuple[object, ...] = (), **more: object) -> None:
        """Sends nothing."""

    def nanoseconds(executor: Any) -> float:
        call = executor.collective_rpc
        begun = time.perf_counter_ns()
        for _ in range(CALLS):
            call("execute_model", args=(), non_block=True)
        return (time.perf_counter_ns() - begun) / CALLS

    plain, watched = (SimpleNamespace(collective_rpc=rpc) for _ in range(2))
    watch_calls(watched, print, print)
    pairs = [(nanoseconds(plain), nanoseconds(watched)) for _ in range(5)]
    return {"more_ns": round(sorted(after - before for before, after in pairs)[2], 1)}


def main() -> None:
    torch.set_num_threads(1)
    for name, size in MODELS.items():
        model = model_of(*size)
        report("weights", unit="ms", model=name, **looks(model), step=steps(model))
    report("calls", **calls())
    report("start", **start())


if __name__ == "__main__":
    main()
