"""Checksums of blocks in GPU memory, for KVSHM_VERIFY.

The bytes are copied to the host and hashed there with xxh3, as the CPU's transport does: the
same blocks have the same checksum on every transport, and no second hash has to be trusted.
It costs a copy over the bus, which a setting for tests may.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash

from kvshm.interfaces import Region
from kvshm.terms import BlockId

from ..regions import spans
from .driver import Driver, HostBuffer, Stream

_BUFFER_BYTES = 8 << 20


class Reader:
    """Reads own blocks, after what the model has put on its stream so far.  Any thread."""

    def __init__(self, driver: Driver, compute: Stream) -> None:
        self._driver = driver
        self._compute = compute
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._buffer: HostBuffer | None = None

    def follow(self, compute: Stream) -> None:
        """The model runs on ``compute`` from now on."""
        self._compute = compute

    def checksum(
        self, addresses: Sequence[int], regions: Sequence[Region], blocks: Sequence[BlockId]
    ) -> list[int]:
        """xxh3 of each block, all regions chained.  Blocks until the GPU is there."""
        block_bytes = sum(region.block_bytes for region in regions)
        batch = max(1, _BUFFER_BYTES // block_bytes)
        found: list[int] = []
        with self._lock:
            host = self._room_for(min(batch, len(blocks) or 1) * block_bytes)
            if self._stream is None:
                self._stream = self._driver.new_stream()
            stream = self._stream
            self._driver.wait(stream, self._compute)
            for begin in range(0, len(blocks), batch):
                found += self._batch(
                    addresses, regions, blocks[begin : begin + batch], host, stream
                )
        return found

    def _batch(
        self, addresses: Sequence[int], regions: Sequence[Region], blocks: Sequence[BlockId],
        host: HostBuffer, stream: Stream,
    ) -> list[int]:  # fmt: skip
        filled = 0
        ends = []
        for block in blocks:
            for handle, start, end in spans(regions, block):
                source, target = addresses[handle] + start, host.address + filled
                self._driver.copy(target, source, end - start, stream)
                filled += end - start
            ends.append(filled)
        self._driver.synchronize(stream)
        begins = [0, *ends[:-1]]
        return [
            xxhash.xxh3_64_intdigest(host.view[begin:end])
            for begin, end in zip(begins, ends, strict=True)
        ]

    def _room_for(self, nbytes: int) -> HostBuffer:
        if self._buffer is None or len(self._buffer.view) < nbytes:
            self.close()
            self._buffer = self._driver.host_allocate(nbytes)
        return self._buffer

    def close(self) -> None:
        """Free what a checksum took; a later one would take it again."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._driver.host_free(buffer)
        stream, self._stream = self._stream, None
        if stream is not None:
            self._driver.free_stream(stream)
