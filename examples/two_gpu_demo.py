"""Two processes share blocks in GPU memory: checksummed copies, on one GPU or two.

    python examples/two_gpu_demo.py [--blocks 256] [--copies 20]

Each process has a cache of its own.  The second maps the first's, copies random blocks out of
it, and both say what these blocks hash to.  Ends with 1 if a single block differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from gpu_memory import gpu_count, no_gpu
from gpu_peer import GpuPeer
from gpu_sizes import sized

LAYERS, BLOCK_BYTES = 32, 65536


def main() -> int:
    options = arguments()
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    last = 1 if gpu_count() > 1 else 0
    print(f"exporter on GPU 0, importer on GPU {last}")
    shape = {"layers": LAYERS, "blocks": options.blocks, "block_bytes": BLOCK_BYTES}
    with GpuPeer(device=0) as exporter, GpuPeer(device=last) as importer:
        exporter.call("make", seed=1, **shape)
        importer.call("make", seed=2, **shape)
        found = importer.call("attach", descriptor=exporter.call("export", epoch=1))
        print(f"attached in {found['seconds'] * 1e3:.1f} ms, copies go by {found['route']}")
        wrong = sum(one_copy(exporter, importer, options.blocks) for _ in range(options.copies))
    print(f"{wrong} blocks differ")
    return int(wrong > 0)


def one_copy(exporter: GpuPeer, importer: GpuPeer, blocks: int) -> int:
    """Copy random blocks onto random blocks; how many have another checksum afterwards."""
    count = random.randint(1, blocks)
    source, target = random.sample(range(blocks), count), random.sample(range(blocks), count)
    begun = time.perf_counter()
    state = importer.call("copy", source=source, target=target)
    milliseconds = (time.perf_counter() - begun) * 1e3
    wanted = exporter.call("checksum", blocks=source)
    found = importer.call("checksum", blocks=target)
    wrong = sum(a != b for a, b in zip(wanted, found, strict=True))
    megabytes = count * LAYERS * BLOCK_BYTES / 1e6
    print(
        f"{count:4} blocks, {megabytes:7.1f} MB: {state} in {milliseconds:6.2f} ms, {wrong} wrong"
    )
    return int(wrong)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=sized(256, 32), help="blocks per cache")
    parser.add_argument("--copies", type=int, default=sized(20, 5), help="how many copies to make")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
