"""Checksums of blocks in GPU memory by a copy to the host, for KVSHM_VERIFY only."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvshm._base.ids import BlockId
from kvshm.interfaces import Region

from ..regions import spans
from .driver import Driver, Stream

_BUFFER_BYTES = 8 << 20


def block_checksums(
    driver: Driver,
    compute: Stream,
    addresses: Sequence[int],
    regions: Sequence[Region],
    blocks: Sequence[BlockId],
) -> list[int]:
    """xxh3 of each own block, all regions chained, after the model's present work on ``compute``.
    ``addresses``: of the memories.  Any thread.  Blocks until the GPU has done that work."""
    block_bytes = sum(region.block_bytes for region in regions)
    batch = max(1, _BUFFER_BYTES // block_bytes)
    host = driver.host_allocate(min(batch, len(blocks) or 1) * block_bytes)
    stream = driver.new_stream()
    found: list[int] = []
    try:
        driver.wait(stream, compute)
        for first in range(0, len(blocks), batch):
            filled = 0
            for block in blocks[first : first + batch]:
                for handle, start, end in spans(regions, block):
                    source, target = addresses[handle] + start, host.address + filled
                    driver.copy(target, source, end - start, stream)
                    filled += end - start
            driver.synchronize(stream)
            hashed = (host.view[at : at + block_bytes] for at in range(0, filled, block_bytes))
            found += map(xxhash.xxh3_64_intdigest, hashed)
    finally:
        driver.free_stream(stream)
    driver.host_free(host)  # not after an error: work on the stream may still write to it
    return found
