"""From lookup to loaded: a 4k-token prefix of an 8B-shaped model, beside models that decode.

    python benchmarks/bench_gpu_import.py [--tokens 4096]

The KV has the shape of an 8B's (32 layers, 8 KV heads of 128, bf16: 64 KiB per layer and block of
16 tokens).  Measured is what an import costs between the scheduler's lookup and the report:
leasing in the exporter's slot table, copying, re-checking, releasing; and the host's part alone,
for 1, 256 and 640 blocks (10,240 tokens), on a thread that has the GPU's context.  One JSON line
per state: nobody decodes, the exporter does, this process's other thread does, both do.  Imports
take turns with pauses, so that the decoders' steps beside them compare with those alone; ``count``
is the number of steps.  Goal, not asserted: 40 us to begin an import of 256 blocks and to poll it
once it has ended, p50; lease, re-check and release stand beside that sum and are not in it.  Ends
with 1 if a block was wrong.  Last come the matrix products of such a model's prefill alone, without
attention: less than any engine needs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from gpu_bytes import refuse_wrong, wrong_blocks
from gpu_decoder import Beside, decoding_peer, together
from gpu_memory import no_gpu
from gpu_node import table_of
from gpu_peer import Cache, block_ids
from gpu_sizes import sized
from measurement import percentiles, report

from kvshm._base.ids import BlockId, Epoch, LeaseBit, Rank
from kvshm._shm.layout import RECORD_BYTES, unpack_records
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.interfaces import CopyState

LAYERS, BLOCK_BYTES = sized(32, 2), sized(2 * 8 * 128 * 2 * 16, 4096)
WIDTH, INNER = sized(4096, 64), sized(14336, 128)
"""Of the 8B model whose prefill is imitated."""
COUNTS = sized((1, 256, 640), (1, 8, 16))
"""Blocks of the imports whose host time is measured."""
EPOCH = Epoch(1)
ROUNDS, ROUND_S = 4, sized(0.75, 0.1)
"""Of imports, and as many pauses as long as they; even, so that neither comes first more often."""
BEGINS, BEGINS_S = sized(500, 50), sized(1.0, 0.5)
"""Imports whose host time is taken, or as many as fit that time."""
GOAL_US, GOAL_BLOCKS = 40.0, COUNTS[1]
GOAL_OF = f"begin and poll of {GOAL_BLOCKS} blocks, p50; no lease, re-check, release"
PAUSE_S = 5e-5
"""Between two looks at a copy: leaves the interpreter to the thread that decodes."""


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    blocks = arguments().tokens // 16
    with decoding_peer() as exporter:
        shape = {"layers": LAYERS, "blocks": max(blocks, *COUNTS), "block_bytes": BLOCK_BYTES}
        exporter.call("make", seed=1, **shape)
        cache = Cache(0)
        cache.make(seed=2, **shape)
        cache.transport.late_writers = False  # as without a drafter: no copy waits for a step
        attached = cache.attach(exporter.call("export", epoch=EPOCH))["seconds"]
        exporter.call("publish_all", epoch=EPOCH)
        beside, table = Beside(exporter), table_of(EPOCH)
        for state in Beside.STATES:
            measure(cache, table, beside, state, blocks)
        table.close()
        exporter.call("unpublish")
        cache.detach()
        cache.close()
    report(
        "gpu attach and prefill", tokens=blocks * 16, attach_ms=round(attached * 1e3, 2),
        matrix_products_of_prefill_ms=round(prefill(blocks * 16) * 1e3, 2),
    )  # fmt: skip
    return 0


def measure(cache: Cache, table: PeerSlotTable, beside: Beside, state: str, blocks: int) -> None:
    """Import so many blocks again and again in one state; then the host's part."""
    cache.blank()
    beside.begin(state)
    time.sleep(sized(0.3, 0.1))  # the decoders get going
    milliseconds: list[float] = []
    alone: list[dict[str, list[float]]] = []
    importing: list[dict[str, list[float]]] = []
    for number in range(2 * ROUNDS):
        pauses = number % 4 in (0, 3)  # pause, imports, imports, pause
        beside.taken(state)  # of what ran before
        if pauses and state != "idle":
            time.sleep(ROUND_S)  # the decoders' steps alone are the other arm
        elif not pauses:
            milliseconds += imports(cache, table, blocks)
        (alone if pauses else importing).append(beside.taken(state))
    wrong = wrong_blocks(cache, table, ids_of(leasable(table, blocks)))
    host = {str(count): host_cost(cache, table, count) for count in COUNTS}
    beside.end()
    report(
        "gpu import of a prefix", decoding=state, tokens=blocks * 16, layers=LAYERS,
        payload=LAYERS * blocks * BLOCK_BYTES, lease_to_checked_ms=percentiles(milliseconds),
        host_us_by_blocks=host, goal_us=GOAL_US, goal_of=GOAL_OF,
        goal_met=host[str(GOAL_BLOCKS)]["begin_and_poll"]["p50"] <= GOAL_US,
        step_ms_without_imports=together(alone), step_ms_with_imports=together(importing),
        wrong_blocks=wrong,
    )  # fmt: skip
    refuse_wrong(wrong, f"blocks, decoding: {state}")


def leasable(table: PeerSlotTable, count: int) -> bytes:
    """So many of the exporter's published blocks, always the same ones."""
    packed = table.scan()[: count * RECORD_BYTES]
    assert len(packed) == count * RECORD_BYTES
    return packed


def ids_of(packed: bytes) -> list[BlockId]:
    return [record.block_id for record in unpack_records(packed)]


def imports(cache: Cache, table: PeerSlotTable, blocks: int) -> list[float]:
    """Lease, copy, re-check and release all blocks, for the time of a round; milliseconds."""
    found: list[float] = []
    packed = leasable(table, blocks)
    deadline = time.perf_counter() + ROUND_S
    while len(found) < 2 or time.perf_counter() < deadline:
        begun = time.perf_counter()
        length, taken = table.lease(LeaseBit(0), packed)
        cache.begin(ids_of(packed), block_ids(blocks))
        state = wait(cache)
        good = table.recheck(Rank(0), packed)
        table.release(LeaseBit(0), packed, taken)
        found.append((time.perf_counter() - begun) * 1e3)
        assert (length, state, all(good)) == (blocks, CopyState.DONE, True)
    return found


def host_cost(cache: Cache, table: PeerSlotTable, count: int) -> dict[str, dict[str, float]]:
    """Microseconds of this thread for imports of so many blocks: what each part of one takes, with
    a poll that sees the copy end.  Waiting for the copy is in none of them."""
    packed, targets = leasable(table, count), block_ids(count)
    found: list[dict[str, float]] = []
    deadline = time.perf_counter() + BEGINS_S
    while len(found) < 2 or (len(found) < BEGINS and time.perf_counter() < deadline):
        found.append(one_import(cache, table, packed, targets))
    return {part: percentiles([one[part] for one in found]) for part in found[0]}


def one_import(
    cache: Cache, table: PeerSlotTable, packed: bytes, targets: list[BlockId]
) -> dict[str, float]:
    clock, source = time.perf_counter, ids_of(packed)
    times = [clock()]
    _, taken = table.lease(LeaseBit(0), packed)
    times.append(clock())
    cache.begin(source, targets)
    times.append(clock())
    cache.transport.driver.synchronize(cache.transport.copy_stream.stream)
    times.append(clock())
    state = cache.copies[0].poll()
    times.append(clock())
    good = table.recheck(Rank(0), packed)
    times.append(clock())
    table.release(LeaseBit(0), packed, taken)
    times.append(clock())
    assert (state, all(good)) == (CopyState.DONE, True)
    spans = [(end - begun) * 1e6 for begun, end in itertools.pairwise(times)]
    lease, begin, _, poll, recheck, release = spans
    return {
        "begin": begin, "poll": poll, "begin_and_poll": begin + poll, "lease": lease,
        "recheck": recheck, "release": release,
        "with_lease": begin + poll + lease + recheck + release,
    }  # fmt: skip


def wait(cache: Cache) -> CopyState:
    """How the copy that was begun last ended."""
    while (state := CopyState(cache.copies[0].poll())) is CopyState.PENDING:
        time.sleep(PAUSE_S)  # leaves the interpreter to the thread that decodes
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
