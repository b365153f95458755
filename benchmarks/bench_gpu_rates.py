"""How fast blocks are copied beside models that decode, and what that does to the decoding.

    python benchmarks/bench_gpu_rates.py [--seconds 0.5]

One JSON line per number of programs of the copy kernel, size of fragments and state: nobody
decodes, the exporter does, the importer does, both do.  Each has GB/s of payload, that as a share
of one contiguous device-to-device copy in the same state, and by which factor steps of the decoding
got longer while blocks were copied without a pause (median and p99).  Goal, not asserted: idle at
least 85 % of a contiguous copy from fragments of 64 KiB on.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu_decoder import Beside, decoding_peer
from gpu_memory import no_gpu
from gpu_peer import Cache, GpuPeer, block_ids
from gpu_sizes import sized
from measurement import percentiles, report

from kvshm.interfaces import CopyState

FRAGMENTS = sized((16 << 10, 64 << 10, 256 << 10, 1 << 20), (16 << 10, 64 << 10))
PROGRAMS = (16, 64, 128)
BYTES = sized(1 << 28, 1 << 22)
LAYERS = 8
BURST = sized(16, 2)
"""Copies under way at once: the GPU need not wait until this thread has seen the last one end."""
GOAL = 0.85
GOAL_FROM = 64 << 10


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    seconds = arguments().seconds
    with decoding_peer() as exporter:
        beside = Beside(exporter)
        for programs, fragment in itertools.product(PROGRAMS, FRAGMENTS):
            cache = prepare(exporter, fragment, programs)
            for state in Beside.STATES:
                measure(beside, cache, programs, state, seconds)
            cache.detach()
            cache.close()
            exporter.call("close")
    return 0


def prepare(exporter: GpuPeer, fragment: int, programs: int) -> Cache:
    """A cache here, and one at the exporter that it has attached."""
    blocks = BYTES // LAYERS // fragment
    shape: dict[str, Any] = {"layers": LAYERS, "blocks": blocks, "block_bytes": fragment}
    exporter.call("make", seed=1, **shape)
    cache = Cache(0)
    cache.make(seed=2, programs=programs, **shape)
    cache.transport.late_writers = False  # as without a drafter: no copy waits for a step
    cache.attach(exporter.call("export", epoch=1))
    return cache


def measure(beside: Beside, cache: Cache, programs: int, state: str, seconds: float) -> None:
    """Both rates in one state, and the steps of the decoding with and without copies of blocks."""
    beside.begin(state)
    contiguous = rate(contiguous_copies(cache), seconds)
    beside.steps(state)
    time.sleep(seconds)
    alone = beside.steps(state)
    begun: list[float] = []
    found = rate(block_copies(cache, begun), seconds)
    copying = beside.steps(state)
    beside.end()
    share = round(found / contiguous, 3)
    has_goal = state == "idle" and cache.block_bytes >= GOAL_FROM
    report(
        "gpu copy beside decoding", programs=programs, fragment=cache.block_bytes, decoding=state,
        payload=BYTES, gb_per_s=round(found, 1), contiguous_gb_per_s=round(contiguous, 1),
        of_contiguous=share, begin_us=percentiles(begun), goal=GOAL if has_goal else None,
        goal_met=share >= GOAL if has_goal else None, step_ms_without_copies=alone,
        step_ms_with_copies=copying, slowdown=slowdowns(alone, copying), device=gpu(),
    )  # fmt: skip


def slowdowns(
    alone: dict[str, dict[str, float]], copying: dict[str, dict[str, float]]
) -> dict[str, dict[str, float]]:
    """By which factor median and p99 of each decoder's steps grew; nothing where too few ran."""
    return {
        who: {key: round(copying[who][key] / alone[who][key], 3) for key in ("p50", "p99")}
        for who in alone
        if alone[who] and copying[who]
    }


def rate(burst: Callable[[], None], seconds: float) -> float:
    """GB/s of payload of bursts, one after the other for so many seconds."""
    burst()
    bursts, begun = 0, time.perf_counter()
    while (lasted := time.perf_counter() - begun) < seconds:
        burst()
        bursts += 1
    return bursts * BURST * BYTES / lasted / 1e9


def block_copies(cache: Cache, begun: list[float]) -> Callable[[], None]:
    """All blocks, by the transport, several copies one behind the other.  ``begun`` gets the
    host's microseconds for each: where they exceed the copy's, the rate is the host's."""
    blocks = block_ids(cache.blocks)
    backwards, attachment = blocks[::-1], cache.attachments[-1]

    def burst() -> None:
        copies = []
        for _ in range(BURST):
            start = time.perf_counter()
            copies.append(attachment.begin_copy(backwards, blocks))
            begun.append((time.perf_counter() - start) * 1e6)
        while copies[-1].poll() is CopyState.PENDING:
            time.sleep(5e-5)  # leaves the interpreter to the thread that decodes
        assert all(copy.poll() is CopyState.DONE for copy in copies)

    return burst


def contiguous_copies(cache: Cache) -> Callable[[], None]:
    """As many bytes from the same mapping by one cudaMemcpyAsync each."""
    driver = cache.transport.driver
    stream, event = driver.new_stream(), driver.new_event()
    source = min(row.source for row in cache.attachments[-1]._table.rows)
    target = int(cache.tensor.data_ptr())

    def burst() -> None:
        for _ in range(BURST):
            driver.copy(target, source, BYTES, stream)
        driver.record(event, stream)
        while not driver.done(event):
            time.sleep(5e-5)

    return burst


def gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=sized(0.5, 0.1), help="of each rate")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
