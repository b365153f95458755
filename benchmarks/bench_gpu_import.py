"""From lookup to loaded: a 4k-token prefix of an 8B-shaped model, beside models that decode.

    python benchmarks/bench_gpu_import.py [--tokens 4096]

The KV has the shape of an 8B's (32 layers, 8 KV heads of 128, bf16: 64 KiB per layer and block of
16 tokens).  Measured is what an import costs between the scheduler's lookup and the report:
leasing in the exporter's slot table, copying, re-checking, releasing; and the host's part alone, on
a thread that has the GPU's context and on one that has not.  One JSON line per state: nobody
decodes, the exporter does, this process's other thread does, both do.  Goal, not asserted: 40 us of
host time.  Last come the matrix products of such a model's prefill alone, without attention: less
than any engine needs.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from gpu_decoder import Beside, decoding_peer
from gpu_memory import no_gpu
from gpu_node import table_of
from gpu_peer import Cache, block_ids
from gpu_sizes import sized
from measurement import percentiles, report

from kvshm._ground.ids import BlockId, Epoch, LeaseBit, Rank
from kvshm._shm.layout import unpack_records
from kvshm.interfaces import CopyState

LAYERS, BLOCK_BYTES = sized(32, 2), sized(2 * 8 * 128 * 2 * 16, 4096)
WIDTH, INNER = sized(4096, 64), sized(14336, 128)
"""Of the 8B model whose prefill is imitated."""
IMPORTS, BEGINS = sized(100, 10), sized(500, 50)
GOAL_US = 40.0
PAUSE_S = 5e-5
"""Between two looks at a copy: leaves the interpreter to the thread that decodes."""


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    blocks = arguments().tokens // 16
    with decoding_peer() as exporter:
        shape = {"layers": LAYERS, "blocks": blocks, "block_bytes": BLOCK_BYTES}
        exporter.call("make", seed=1, **shape)
        cache = Cache(0)
        cache.make(seed=2, **shape)
        cache.transport.late_writers = False  # as without a drafter: no copy waits for a step
        attached = cache.attach(exporter.call("export", epoch=1))["seconds"]
        exporter.call("publish_all", epoch=1)
        beside = Beside(exporter)
        for state in Beside.STATES:
            measure(cache, beside, state, blocks)
        exporter.call("unpublish")
        cache.detach()
        cache.close()
    report(
        "gpu attach and prefill", tokens=blocks * 16, attach_ms=round(attached * 1e3, 2),
        matrix_products_of_prefill_ms=round(prefill(blocks * 16) * 1e3, 2),
    )  # fmt: skip
    return 0


def measure(cache: Cache, beside: Beside, state: str, blocks: int) -> None:
    """Import all blocks several times in one state, and begin imports of one block."""
    beside.begin(state)
    time.sleep(sized(0.5, 0.1))
    alone = beside.steps(state)
    milliseconds = [import_all(cache, Epoch(1), blocks) * 1e3 for _ in range(IMPORTS)]
    importing = beside.steps(state)
    host = host_cost(cache)
    with ThreadPoolExecutor(1) as bare:  # as threads are that nobody has given the GPU's context
        without_context = bare.submit(host_cost, cache).result()
    beside.end()
    report(
        "gpu import of a prefix", decoding=state, tokens=blocks * 16, layers=LAYERS,
        payload=LAYERS * blocks * BLOCK_BYTES, lease_to_checked_ms=percentiles(milliseconds),
        host_us=host, host_us_without_context=without_context,
        goal_us=GOAL_US, goal_met=host["p50"] <= GOAL_US,
        step_ms_without_imports=alone, step_ms_with_imports=importing,
    )  # fmt: skip


def import_all(cache: Cache, epoch: Epoch, blocks: int) -> float:
    """Lease, copy, re-check and release all blocks; seconds."""
    table = table_of(epoch)
    packed = table.scan()
    begun = time.perf_counter()
    length, taken = table.lease(LeaseBit(0), packed)
    ids = [record.block_id for record in unpack_records(packed)]
    cache.begin(ids, block_ids(blocks))
    state = wait(cache)
    good = table.recheck(Rank(0), packed)
    table.release(LeaseBit(0), packed, taken)
    seconds = time.perf_counter() - begun
    table.close()
    assert (length, state, all(good)) == (blocks, CopyState.DONE, True)
    return seconds


def host_cost(cache: Cache) -> dict[str, float]:
    """Microseconds of this thread for imports of one block: until it is enqueued, and the look
    that sees it end."""
    found = []
    for _ in range(BEGINS):
        begun = time.perf_counter()
        cache.begin([BlockId(0)], [BlockId(1)])
        enqueued = time.perf_counter()
        cache.transport.driver.synchronize(cache.transport.copy_stream.stream)
        looked = time.perf_counter()
        assert cache.copies[0].poll() is CopyState.DONE
        found.append((time.perf_counter() - looked + enqueued - begun) * 1e6)
    return percentiles(found)


def wait(cache: Cache) -> CopyState:
    """How the copy that was begun last ended."""
    while (state := CopyState(cache.copies[0].poll())) is CopyState.PENDING:
        time.sleep(PAUSE_S)
    return state


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
    parser.add_argument("--tokens", type=int, default=sized(4096, 256), help="tokens of the prefix")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
