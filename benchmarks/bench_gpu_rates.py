"""How fast blocks are copied beside models that decode, and what that does to the decoding.

    python benchmarks/bench_gpu_rates.py [--seconds 2.4]

One JSON line per number of programs of the copy kernel, size of fragments and state: nobody
decodes, the exporter does, the importer does, both do.  Each has GB/s of payload (the median of
several rounds), that as a share of one contiguous device-to-device copy in the same state, and by
which factor steps of the decoding got longer while blocks were copied without a pause (median and
p99; ``count`` is the number of steps).  The rounds take turns: contiguous copies, nothing, copies
of blocks, then backwards.  Goal, not asserted: idle at least 85 % of a contiguous copy from
fragments of 64 KiB on.  Ends with 1 at the first wrong byte.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu_bytes import differing, expected, refuse_wrong
from gpu_decoder import Beside, decoding_peer, together
from gpu_memory import no_gpu
from gpu_peer import Cache, GpuPeer, block_ids
from gpu_sizes import sized
from measurement import percentiles, report

from kvshm.interfaces import CopyState

FRAGMENTS = sized((16 << 10, 64 << 10, 256 << 10, 1 << 20), (16 << 10, 64 << 10))
PROGRAMS = {264: FRAGMENTS, 64: FRAGMENTS[:2], 132: FRAGMENTS[:2]}
"""And the fragments that each copies; 264 is what the transport uses on an H100 and an H200.  All
would not fit the time of a step of the suite."""
BYTES = sized(1 << 28, 1 << 22)
LAYERS = 8
EXPORTER_SEED = 1
BURST = sized(16, 2)
"""Copies under way at once: the GPU need not wait until this thread has seen the last one end."""
CONTIGUOUS_S = 0.2
"""Of a round's contiguous copies: the yardstick needs no steps of a decoder."""
ROUNDS = sized(4, 2)
"""Even, so that no part of a round comes first more often."""
GOAL = 0.85
GOAL_FROM = 64 << 10


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    seconds = arguments().seconds / ROUNDS
    with decoding_peer() as exporter:
        beside = Beside(exporter)
        for programs, fragments in PROGRAMS.items():
            for fragment in fragments:
                cache = prepare(exporter, fragment, programs)
                wanted = expected(cache, EXPORTER_SEED, block_ids(cache.blocks)[::-1])
                for state in Beside.STATES:
                    measure(Measured(beside, cache, wanted, state), programs, seconds)
                cache.detach()
                cache.close()
                exporter.call("close")
    return 0


def prepare(exporter: GpuPeer, fragment: int, programs: int) -> Cache:
    """A cache here, and one at the exporter that it has attached."""
    blocks = BYTES // LAYERS // fragment
    shape: dict[str, Any] = {"layers": LAYERS, "blocks": blocks, "block_bytes": fragment}
    exporter.call("make", seed=EXPORTER_SEED, **shape)
    cache = Cache(0)
    cache.make(seed=2, programs=programs, **shape)
    cache.transport.late_writers = False  # as without a drafter: no copy waits for a step
    cache.attach(exporter.call("export", epoch=1))
    return cache


class Measured:
    """What was measured in one state of the decoders, round by round."""

    def __init__(self, beside: Beside, cache: Cache, wanted: Any, state: str) -> None:
        self.beside, self.cache, self.wanted, self.state = beside, cache, wanted, state
        self.contiguous_gb: list[float] = []
        self.blocks_gb: list[float] = []
        self.begin_us: list[float] = []
        self.wrong = 0
        self._contiguous = contiguous_copies(cache)
        self._blocks = block_copies(cache, self.begin_us)
        self._steps: dict[str, list[dict[str, list[float]]]] = {"alone": [], "copying": []}

    def round(self, seconds: float, backwards: bool) -> None:
        """Measure everything once; ``seconds`` with copies of blocks, and as long without."""
        parts: list[Callable[[float], None]] = [self.contiguous, self.alone, self.copying]
        for part in reversed(parts) if backwards else parts:
            part(seconds)

    def contiguous(self, seconds: float) -> None:
        self.contiguous_gb.append(rate(self._contiguous, min(seconds, CONTIGUOUS_S)))

    def alone(self, seconds: float) -> None:
        if self.state != "idle":
            self.beside.taken(self.state)  # of what ran before
            time.sleep(seconds)  # the decoders' steps alone are the other arm
            self._steps["alone"].append(self.beside.taken(self.state))

    def copying(self, seconds: float) -> None:
        self.cache.blank()
        self.beside.taken(self.state)
        self.blocks_gb.append(rate(self._blocks, seconds))
        self._steps["copying"].append(self.beside.taken(self.state))
        self.wrong += differing(self.cache, self.wanted)

    def steps(self, when: str) -> dict[str, dict[str, float]]:
        """Milliseconds of each decoder's steps, of all rounds."""
        return together(self._steps[when])


def measure(measured: Measured, programs: int, seconds: float) -> None:
    """Both rates in one state, and the steps of the decoding with and without copies of blocks."""
    cache, state = measured.cache, measured.state
    measured.beside.begin(state)
    for number in range(ROUNDS):
        measured.round(seconds, backwards=number % 2 == 1)
    measured.beside.end()
    found, contiguous = map(statistics.median, (measured.blocks_gb, measured.contiguous_gb))
    share = round(found / contiguous, 3)
    alone, copying = measured.steps("alone"), measured.steps("copying")
    has_goal = state == "idle" and cache.block_bytes >= GOAL_FROM
    report(
        "gpu copy beside decoding", programs=programs, fragment=cache.block_bytes, decoding=state,
        payload=BYTES, gb_per_s=round(found, 1), contiguous_gb_per_s=round(contiguous, 1),
        of_contiguous=share, rounds=ROUNDS, begin_us=percentiles(measured.begin_us),
        goal=GOAL if has_goal else None, goal_met=share >= GOAL if has_goal else None,
        step_ms_without_copies=alone, step_ms_with_copies=copying,
        slowdown=slowdowns(alone, copying), wrong_bytes=measured.wrong, device=gpu(),
    )  # fmt: skip
    refuse_wrong(measured.wrong, f"of copies of {cache.block_bytes} bytes, decoding: {state}")


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
            time.sleep(5e-5)  # as beside copies

    return burst


def gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=sized(2.4, 0.2), help="of copies, per line"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
