"""Whether what a benchmark copied are the right bytes: a rate of wrong ones is worth nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gpu_peer import Cache

from kvshm._base.ids import BlockId, Rank
from kvshm._shm.slot_table import PeerSlotTable

MAX_BYTES = 1 << 30
"""Of a comparison by ``expected``: it takes the cache's size twice more on the GPU."""


def expected(cache: Cache, peer_seed: int, source: Sequence[BlockId]) -> Any:
    """What all blocks of the cache hold once the peer's ``source`` were copied there, in order:
    [block, layer, byte] on the GPU.  Takes seconds for a gigabyte."""
    assert cache.tensor.numel() <= MAX_BYTES
    return cache.contents(peer_seed, cache.blocks)[list(source)].to("cuda")


def differing(cache: Cache, wanted: Any) -> int:
    """How many bytes of the cache are not what ``expected`` said; waits for the GPU."""
    return int((cache.view() != wanted).sum())


def wrong_blocks(cache: Cache, table: PeerSlotTable, source: Sequence[BlockId]) -> int:
    """How many of the first blocks of the cache have another checksum than the peer's ``source``
    have in its slot table."""
    found = cache.transport.checksum([BlockId(block) for block in range(len(source))])
    wanted = [table.checksum(Rank(0), block) for block in source]
    return sum(want != have for want, have in zip(wanted, found, strict=True))


def refuse_wrong(wrong: int, what: str) -> None:
    """End the program with a clear error if something was wrong."""
    if wrong:
        sys.exit(f"wrong bytes: {wrong} {what}; no number of this benchmark is worth anything")
