"""How long the model's thread is held up while other processes' memory is attached and detached.

    python benchmarks/bench_gpu_stalls.py [--gigabytes 100 16] [--kinds caching fd]

A driver may hold a lock of the context while it opens or closes memory, and the launches of the
model's thread wait for that lock, whichever thread attaches.  One thread launches tiny kernels and
takes the time of each launch; another attaches and detaches an allocation of another process.  One
JSON line per kind and size: p50, p99 and maximum of the launches in microseconds, with nothing
beside them, during attaches and during detaches.  The smallest size is the control: the same Python
beside the launches, and hardly any memory; it comes last, as the largest size comes first.  Sizes
that the GPU has no room for are cut to what is free, and the line says so.  One process exports all
of them, one after the other; this one attaches.  Goal, not asserted: no stall above 1 ms while
attaching.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

from gpu_memory import no_gpu
from gpu_peer import Cache, GpuPeer, PeerError, answer_calls
from gpu_sizes import sized
from measurement import percentiles, report

from kvshm.errors import KvshmError

CONTROL_GB = 0.002
BLOCK_BYTES = 4096
SIZES_GB = sized((100.0, 16.0), (100.0, 0.05))
KEPT_FREE = sized(8 << 30, 3 << 30) + (1 << 29)
"""Bytes left to contexts, kernels and the importer."""
ROUNDS = sized(10, 3)
GOAL_US = 1000.0


class Launches:
    """A thread that launches one tiny kernel after the other, as a model's thread does."""

    def __init__(self) -> None:
        self._going = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.taken: list[tuple[float, float]] = []
        """Beginning and end of each launch."""

    def __enter__(self) -> Launches:
        self._going.set()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._going.clear()
        self._thread.join()

    def _run(self) -> None:
        import torch

        value = torch.zeros(1, device="cuda")
        stream = torch.cuda.current_stream()
        clock, taken = time.perf_counter, self.taken
        while self._going.is_set():
            for _ in range(50):
                begun = clock()
                value.add_(1)
                taken.append((begun, clock()))
            stream.synchronize()  # a full queue would hold launches up too

    def during(self, spans: list[tuple[float, float]]) -> dict[str, float]:
        """Microseconds of the launches that overlap one of these spans of time."""
        found = [
            (end - begun) * 1e6
            for begun, end in self.taken
            if any(begun < last and first < end for first, last in spans)
        ]
        if len(found) < 2:
            return {"n": len(found)}
        over = sum(one > GOAL_US for one in found)
        return {**percentiles(found), "over_1_ms": over}


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    options = arguments()
    cases = [(kind, size) for size in (*options.gigabytes, CONTROL_GB) for kind in options.kinds]
    with ExitStack() as running:
        exporter, cache = start(running)
        for kind, gigabytes in cases:
            try:
                measure(exporter, cache, kind, gigabytes)
            except (PeerError, KvshmError) as exc:  # this kind or size is not to be had here
                report("gpu stalls", kind=kind, asked_gb=gigabytes, not_measured=str(exc))
                exporter.kill()  # its memory, if it has any, must not be in the way
                cache.detach()
                exporter, cache = start(running)
        cache.close()
    return 0


class Exporter(Cache):
    """A cache that gives its memory back."""

    def free(self) -> None:
        """Close the transport and free the memory, which no peer may have mapped any more."""
        from kvshm.transport.cuda.transport import current_driver

        self.close()
        address, vmm_bytes = self.address, getattr(self, "vmm_bytes", 0)
        del self.transport, self.tensor
        gc.collect()
        self.torch.cuda.empty_cache()
        if vmm_bytes:
            self.torch.cuda.synchronize()
            current_driver().vmm_unmap(address, vmm_bytes)
            del self.vmm_bytes

    def allocate(self, kind: str, lead: int) -> None:
        """A small cache behind so many bytes in one allocation."""
        self.address = self.make(1, 1, 1, BLOCK_BYTES, kind=kind, lead=lead) - lead


def start(running: ExitStack) -> tuple[GpuPeer, Cache]:
    """An exporter, and a small cache here."""
    exporter = running.enter_context(GpuPeer(program=__file__))
    cache = Cache(0)
    cache.make(seed=2, layers=1, blocks=1, block_bytes=BLOCK_BYTES)
    return exporter, cache


def measure(exporter: GpuPeer, cache: Cache, kind: str, gigabytes: float) -> None:
    """Attach and detach an allocation of that size several times beside launches."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    lead = max(0, min(int(gigabytes * 1e9), free - KEPT_FREE)) >> 21 << 21
    exporter.call("allocate", kind=kind, lead=lead)
    cycle(cache, exporter.call("export", epoch=1), [], [])  # the first compiles the kernel
    descriptor = exporter.call("export", epoch=2)
    report("gpu stalls", kind=kind, asked_gb=gigabytes, gb=round(lead / 1e9, 3),
           cut_to_free_memory=lead < int(gigabytes * 1e9) >> 21 << 21, rounds=ROUNDS,
           **stalls(cache, descriptor), goal_us=GOAL_US, device=gpu())  # fmt: skip
    exporter.call("free")


def stalls(cache: Cache, descriptor: str) -> dict[str, Any]:
    """Launches without anything beside them, beside attaches and beside detaches; the latter's
    own milliseconds."""
    attached: list[tuple[float, float]] = []
    detached: list[tuple[float, float]] = []
    with Launches() as launches:
        time.sleep(0.2)  # the first launches load code
        launches.taken.clear()  # warm from here on
        begun = time.perf_counter()
        time.sleep(sized(1.0, 0.2))  # launches alone are the other arm
        alone = [(begun, time.perf_counter())]
        for _ in range(ROUNDS):
            cycle(cache, descriptor, attached, detached)
            time.sleep(0.02)  # so that a stall ends before the next begins
    during = launches.during(attached)
    return {
        "launch_us_alone": launches.during(alone),
        "launch_us_while_attaching": during,
        "launch_us_while_detaching": launches.during(detached),
        "attach_ms": milliseconds(attached), "detach_ms": milliseconds(detached),
        "goal_met": during["max"] <= GOAL_US if "max" in during else None,
    }  # fmt: skip


def cycle(
    cache: Cache,
    descriptor: str,
    attached: list[tuple[float, float]],
    detached: list[tuple[float, float]],
) -> None:
    """Attach, then detach until the memory is unmapped; note when each of them ran."""
    begun = time.perf_counter()
    cache.attach(descriptor)
    middle = time.perf_counter()
    attached.append((begun, middle))
    time.sleep(0.02)  # as between rounds
    begun = time.perf_counter()
    cache.detach()
    detached.append((begun, time.perf_counter()))


def milliseconds(spans: list[tuple[float, float]]) -> dict[str, float]:
    return percentiles([(end - begun) * 1e3 for begun, end in spans])


def gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, nargs="*", default=SIZES_GB)
    parser.add_argument("--kinds", nargs="*", default=("caching", "fd"))
    return parser.parse_args()


if __name__ == "__main__":
    if os.environ.get("GPU_PEER"):
        answer_calls(Exporter)
    else:
        sys.exit(main())
