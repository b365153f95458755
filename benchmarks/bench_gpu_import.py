"""From lookup to loaded: a 4k-token prefix of an 8B-shaped model, against computing it.

    python benchmarks/bench_gpu_import.py [--tokens 4096]

The KV has the shape of an 8B's (32 layers, 8 KV heads of 128, bf16: 64 KiB per layer and block of
16 tokens).  Measured is what an import costs between the scheduler's lookup and the report:
leasing in the exporter's slot table, copying, re-checking, releasing.  Beside it stand the matrix
products of such a model's prefill alone, without attention: less than any engine needs.
"""

from __future__ import annotations

import argparse
import sys
import time

from gpu_memory import no_gpu
from gpu_node import table_of
from gpu_peer import Cache, GpuPeer, block_ids
from measurement import percentiles, report

from kvshm._ground.ids import Epoch, LeaseBit, Rank
from kvshm._shm.layout import unpack_records

LAYERS, BLOCK_BYTES = 32, 2 * 8 * 128 * 2 * 16
WIDTH, INNER = 4096, 14336
"""Of the 8B model whose prefill is imitated."""


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    blocks = arguments().tokens // 16
    with GpuPeer() as exporter:
        shape = {"layers": LAYERS, "blocks": blocks, "block_bytes": BLOCK_BYTES}
        exporter.call("make", seed=1, **shape)
        cache = Cache(0)
        cache.make(seed=2, **shape)
        attached = cache.attach(exporter.call("export", epoch=1))["seconds"]
        exporter.call("publish_all", epoch=1)
        milliseconds = [import_all(cache, Epoch(1), blocks) * 1e3 for _ in range(50)]
        exporter.call("unpublish")
        report(
            "gpu import of a prefix", tokens=blocks * 16, layers=LAYERS,
            payload=LAYERS * blocks * BLOCK_BYTES, lease_to_checked_ms=percentiles(milliseconds),
            attach_ms=round(attached * 1e3, 2),
            matrix_products_of_prefill_ms=round(prefill(blocks * 16) * 1e3, 2),
        )  # fmt: skip
        cache.detach()
        cache.close()
    return 0


def import_all(cache: Cache, epoch: Epoch, blocks: int) -> float:
    """Lease, copy, re-check and release all blocks; seconds."""
    table = table_of(epoch)
    packed = table.scan()
    begun = time.perf_counter()
    length, taken = table.lease(LeaseBit(0), packed)
    ids = [record.block_id for record in unpack_records(packed)]
    state = cache.copy(ids, block_ids(blocks))
    good = table.recheck(Rank(0), packed)
    table.release(LeaseBit(0), packed, taken)
    seconds = time.perf_counter() - begun
    table.close()
    assert (length, state, all(good)) == (blocks, "done", True)
    return seconds


def prefill(tokens: int) -> float:
    """Seconds of an 8B's matrix products over so many tokens, attention left out."""
    import torch

    def make(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    hidden, inner = make(tokens, WIDTH), make(tokens, INNER)
    projections, up, down = (
        make(WIDTH, 2 * WIDTH + 2048),
        make(WIDTH, 2 * INNER),
        make(INNER, WIDTH),
    )
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(LAYERS):
            hidden @ projections, hidden @ up, inner @ down
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the prefix")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
