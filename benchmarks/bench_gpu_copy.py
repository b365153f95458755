"""Copying scattered blocks between processes on a GPU, beside everything one might use instead.

    python benchmarks/bench_gpu_copy.py [--bytes 268435456]

One JSON line per fragment size, number of blocks and state of the exporter: GB/s of payload of the
transport, of one contiguous device-to-device copy of as many bytes, of a loop of cudaMemcpyAsync,
of cudaMemcpyBatchAsync and of torch indexing; then the fixed cost of an import and what copying
does to a matrix product that runs at the same time.  Each rate is that of one call, the best of
ten, with what the host does for it: the transport's has Python's begin and its polling in it.  What
share of a contiguous copy it reaches is measured by bench_gpu_rates.py, over many copies.  Ends
with 1 at the first wrong byte.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

from gpu_bytes import expected, refuse_wrong
from gpu_memory import gpu_count, no_gpu
from gpu_peer import Cache, GpuPeer, block_ids
from gpu_sizes import sized
from measurement import percentiles, report

from kvshm._base.ids import BlockId
from kvshm.transport.cuda.copy_stream import copy_each

FRAGMENTS = sized([4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20], [16 << 10, 64 << 10])
COUNTS = (1, 16, 256)
"""Blocks in one copy, beside half the cache; one block has a fragment in every layer."""
LAYERS = 8
REPEATS = sized(10, 2)
PROGRAMS = sized((16, 32, 64, 128, 264), (64,))
BYTES = sized(1 << 28, 1 << 23)
ATTACHED = sized(16 << 30, 1 << 24)
SQUARE = sized(8192, 64)


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    total = arguments().bytes
    for device in range(min(2, gpu_count())):
        with GpuPeer(device=device) as exporter:
            for fragment in FRAGMENTS:
                rates(exporter, device, fragment, total)
    with GpuPeer() as exporter:
        fixed_cost(exporter)
        for programs in PROGRAMS:
            interference(exporter, programs)
    return 0


def prepare(exporter: GpuPeer, fragment: int, total: int, **options: Any) -> Cache:
    """Caches of ``total`` bytes here and at the exporter; this one has attached that one."""
    shape: dict[str, Any] = {
        "layers": LAYERS,
        "blocks": total // LAYERS // fragment,
        "block_bytes": fragment,
    }
    exporter.call("make", seed=1, **shape)
    cache = Cache(0)
    cache.make(seed=2, **shape, **options)
    cache.transport.late_writers = False  # as without a drafter: no copy waits for a step
    cache.attach(exporter.call("export", epoch=1))
    return cache


def release(exporter: GpuPeer, cache: Cache) -> None:
    cache.detach()
    cache.close()
    exporter.call("close")


def seconds_of(work: Callable[[], Any]) -> float:
    """The best of several runs, each until the device has done it."""
    import torch

    best = float("inf")
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def rates(exporter: GpuPeer, device: int, fragment: int, total: int) -> None:
    """Rates of every way for one fragment size, with the exporter idle and busy."""
    cache = prepare(exporter, fragment, total)
    peers, half = expected(cache, 1, block_ids(cache.blocks)), cache.blocks // 2
    for busy in (False, True):
        if busy:
            exporter.call("burn", on=True)
        for count in (*(c for c in COUNTS if c < half), half):
            found = rates_of(cache, fragment, count)
            report(
                "gpu copy", exporter_gpu=device, exporter_busy=busy, fragment=fragment,
                blocks=count, layers=LAYERS, payload=count * LAYERS * fragment, gb_per_s=found,
                device=gpu(), rate_of="one call, best of several",
                route=cache.attachments[-1].route.value,
            )  # fmt: skip
            refuse_wrong(wrong(cache, peers, count), f"in {count} blocks of {fragment} bytes")
        if busy:
            exporter.call("burn", on=False)
    release(exporter, cache)


def rates_of(cache: Cache, fragment: int, count: int) -> dict[str, float]:
    """GB/s of every way to copy so many random blocks onto random blocks."""
    payload = count * LAYERS * fragment
    source, target = lists(cache, count)
    ways = ways_of(cache, source, target, payload)
    return {name: round(payload / seconds_of(way) / 1e9, 3) for name, way in ways.items()}


def lists(cache: Cache, count: int) -> tuple[list[BlockId], list[BlockId]]:
    """Random blocks and where they go, always the same ones."""
    first, second = (random.Random(n).sample(block_ids(cache.blocks), count) for n in (1, 2))
    return first, second


def wrong(cache: Cache, peers: Any, count: int) -> int:
    """How many bytes a copy of the transport got wrong; ``peers``: all of the peer's blocks."""
    source, target = lists(cache, count)
    cache.blank()
    cache.copy(source, target)
    return int((cache.view()[target] != peers[source]).sum())


def ways_of(
    cache: Cache, source: list[BlockId], target: list[BlockId], payload: int
) -> dict[str, Callable[[], Any]]:
    """What is measured, by name.  All but the transport copy from the peer's mapping too."""
    import torch

    driver, stream = cache.transport.driver, cache.transport.driver.new_stream()
    table = cache.attachments[-1]._table
    from_ids, tfrom_ids = (memoryview(array("q", ids)).cast("B") for ids in (source, target))
    here, other = cache.view(), torch.empty_like(cache.tensor)
    there = other.view(LAYERS, cache.blocks, cache.block_bytes).transpose(0, 1)
    rows = torch.tensor(source, device="cuda"), torch.tensor(target, device="cuda")
    peer = min(row.source for row in table.rows)

    def indexed() -> None:
        here[rows[1]] = there[rows[0]]

    return {
        "transport": lambda: cache.copy(source, target),
        "contiguous": lambda: driver.copy(other.data_ptr(), peer, payload, stream),
        "loop": lambda: copy_each(driver, table, source, target, stream),
        "batch": lambda: driver.copy_batch(table, from_ids, tfrom_ids, stream),
        "torch indexing, own memory": indexed,
    }


def fixed_cost(exporter: GpuPeer) -> None:
    """Microseconds of an import that carries next to nothing, and of attaching 16 GiB."""
    cache = prepare(exporter, 4096, 1 << 22)
    begun, done = [], []
    for _ in range(sized(1000, 50)):
        start = time.perf_counter()
        cache.begin([BlockId(0)], [BlockId(1)])
        begun.append((time.perf_counter() - start) * 1e6)
        cache.finish()
        done.append((time.perf_counter() - start) * 1e6)
    release(exporter, cache)
    report("gpu import of one block", begin_us=percentiles(begun), done_us=percentiles(done))
    exporter.call("make", seed=1, layers=1, blocks=1, block_bytes=4096, lead=ATTACHED)
    cache = Cache(0)
    cache.make(seed=2, layers=1, blocks=1, block_bytes=4096)
    found = cache.attach(exporter.call("export", epoch=1))
    report("gpu attach", nbytes=ATTACHED, seconds=round(found["seconds"], 4), device=gpu())
    release(exporter, cache)


def interference(exporter: GpuPeer, programs: int) -> None:
    """How much slower a matrix product gets while blocks are copied without a pause."""
    import torch

    cache = prepare(exporter, 64 << 10, BYTES, programs=programs)
    blocks = block_ids(cache.blocks)
    copying = seconds_of(lambda: cache.copy(blocks, blocks))
    square = torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(20):
            torch.mm(square, square)

    alone = seconds_of(products)
    slowed = {}
    for share in (0.5, 1.0):
        cache.begin(blocks, blocks)
        slowed[f"{share:.0%}"] = round(beside(cache, blocks, products, copying / share) / alone, 3)
    payload = cache.blocks * LAYERS * cache.block_bytes
    report(
        "gpu copy beside a matrix product", programs=programs, device=gpu(),
        gb_per_s=round(payload / copying / 1e9, 2), matmul_ms=round(alone * 50, 3),
        slowdown_at_share_of_peak=slowed,
    )  # fmt: skip
    release(exporter, cache)


def beside(cache: Cache, blocks: list[BlockId], work: Callable[[], None], every: float) -> float:
    """Seconds of ``work`` while a copy begins every ``every`` seconds at most."""
    import torch

    done = torch.cuda.Event()
    begun = following = time.perf_counter()
    work()
    done.record()
    while not done.query():
        if time.perf_counter() >= following and cache.copies[0].poll().value != "pending":
            cache.begin(blocks, blocks)
            following = time.perf_counter() + every
    seconds = time.perf_counter() - begun
    cache.finish()
    return seconds


def gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bytes", type=int, default=BYTES, help="bytes of each cache")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
