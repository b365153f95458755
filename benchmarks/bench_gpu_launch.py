"""What the host spends on one import of the CUDA transport, measured without a GPU.

    python benchmarks/bench_gpu_launch.py

The driver's library is played (tests/played_cuda): its calls only note what they are asked for, so
what is left is ours: Python and cuda-bindings.  A real driver's calls come on top, five for an
import; benchmarks/bench_gpu_copy.py measures the sum on a GPU.  Measured is a thread that has
entered the GPU's context, as the thread that carries out loads has, and one that has not.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measurement import percentiles, report

sys.path.append(str(Path(__file__).parents[1] / "tests" / "played_cuda"))
import library  # type: ignore[import-not-found]  # found by the path above

from kvshm._base.ids import BlockId
from kvshm.interfaces import CopyState
from kvshm.transport.cuda.copy_stream import CopyStream
from kvshm.transport.cuda.driver import Driver, RegionRow
from kvshm.transport.cuda.probe import upload

REPEATS = 3000
SHAPES = ((1, 1), (1, 32), (32, 32), (256, 32))
"""Blocks of an import and regions of a cache."""


def main() -> int:
    if (reason := library.missing()) is not None:
        print(reason)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        ctypes.CDLL(str(library.build(Path(directory))), ctypes.RTLD_GLOBAL)
        from kvshm.transport.cuda.nvidia import NvidiaDriver

        driver = NvidiaDriver(0)
        for entered in (True, False):
            for blocks, regions in SHAPES:
                in_thread(partial(measure, driver, blocks, regions, entered))
    return 0


def in_thread(job: Callable[[], None]) -> None:
    thread = threading.Thread(target=job)
    thread.start()
    thread.join()


def measure(driver: Driver, blocks: int, regions: int, entered: bool) -> None:
    """Begin imports of 16 bytes per fragment, and poll each until it has ended."""
    if entered:
        driver.enter_thread()
    made = CopyStream(driver, driver.compute_stream())
    memory = driver.allocate(2 << 20), driver.allocate(2 << 20)
    table = upload(driver, [RegionRow(*memory, 16, 16, 16)] * regions, made.stream)
    ids = [BlockId(block) for block in range(blocks)]
    made.prepare(table)
    made.prepare_buffers()
    begun, polled = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        copy = made.begin(table, ids, ids, lambda: None)
        middle = time.perf_counter()
        driver.synchronize(made.stream)
        waited = time.perf_counter()
        assert copy.poll() is CopyState.DONE
        polled.append((time.perf_counter() - waited) * 1e6)
        begun.append((middle - start) * 1e6)
    made.close()
    report(
        "host's part of a gpu import", blocks=blocks, regions=regions, entered=entered,
        begin_us=percentiles(begun), poll_us=percentiles(polled),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
