"""Reading a replica index: look up prefixes, list rows and entries.

Any process of the same user that has a descriptor may read while the owner writes.  The result of a
lookup is a hint: the lease in the slot table of the block's owner decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvshm import _native
from kvshm._shm.layout import (
    CAPACITY_OFFSET,
    COUNT_OFFSET,
    INDEX_MAGIC,
    MAX_BLOCKS,
    NUM_ROWS,
    RowState,
    index_bytes,
)
from kvshm._shm.segment import Header, Segment, check_header
from kvshm.errors import CorruptSegment

from .index_layout import Entry, Row, rows, used_entries

LARGEST_INDEX = index_bytes(2 * MAX_BLOCKS * NUM_ROWS)


class ReplicaReader:
    """A replica index mapped for reading.  Lock-free against the writer, never blocks."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.name = segment.name

    @staticmethod
    def from_fd(name: str, fd: int) -> ReplicaReader:
        """Map a replica from a descriptor, which is closed.  ``name``: for messages.  Raises
        SegmentError, and what derives from it."""
        segment = Segment.from_fd(name, fd, False, LARGEST_INDEX).close_descriptor()
        reader = ReplicaReader(segment)
        try:
            check_header(segment, INDEX_MAGIC)
            capacity, nbytes = reader.capacity, segment.buffer.nbytes
            if capacity & (capacity - 1) or index_bytes(capacity) != nbytes:
                raise CorruptSegment(f"{name} states {capacity} entries, has {nbytes} bytes")
        except BaseException:
            segment.close()
            raise
        return reader

    @property
    def header(self) -> Header:
        """The header, which names the owner.  Raises CorruptSegment."""
        return check_header(self._segment, INDEX_MAGIC)

    @property
    def buffer(self) -> memoryview:
        return self._segment.buffer

    @property
    def capacity(self) -> int:
        return _native.load(self._segment.buffer, CAPACITY_OFFSET)

    @property
    def count(self) -> int:
        return _native.load(self._segment.buffer, COUNT_OFFSET)

    def lookup(
        self,
        hashes: Sequence[bytes],
        start: int,
        stop: int,
        rows_mask: int | None = None,
        group: int = 0,
        scale: int = 1,
    ) -> list[tuple[int, bytes]]:
        """Return the longest prefix of the blocks from ``start`` to ``stop`` of a KV cache group
        that the rows in the mask (None: all live ones) hold, from as few as possible: each part
        with the owner's row and packed block records.  ``scale``: hashes for each block.  Any
        process."""
        buffer = self._segment.buffer
        if rows_mask is None:
            rows_mask = sum(1 << row.row for row in rows(buffer) if row.state is RowState.LIVE)
        if not isinstance(hashes, list):
            hashes = list(hashes[: stop * scale])
        return _native.index_lookup(buffer, hashes, start, stop, rows_mask, group, scale)

    def last(
        self, hashes: list[bytes], start: int, stop: int, rows_mask: int, group: int, scale: int
    ) -> int:
        """Return the index behind the last of the blocks from ``start`` to ``stop`` that a row in
        the mask holds; at most ``start`` if none does.  Otherwise as ``lookup``."""
        buffer = self._segment.buffer
        return _native.index_last(buffer, hashes, start, stop, rows_mask, group, scale)

    def rows(self) -> list[Row]:
        return list(rows(self._segment.buffer))

    def entries(self) -> Iterator[Entry]:
        """Yield all entries.  An entry that moves meanwhile may be missing or appear twice."""
        return (entry for _, entry in used_entries(self._segment.buffer))

    def close(self) -> None:
        """Unmap.  Idempotent."""
        self._segment.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} [{self.count} of {self.capacity} entries]>"
