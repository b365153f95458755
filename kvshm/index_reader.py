"""Reading a replica index: look up prefixes, list rows and entries, check the whole.

Any process of the same user may map an engine's replica read-only and ask it while its
owner writes: worker ranks and the tools do.  What a lookup finds is a hint; the lease in the
owner's slot table decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import _native
from .errors import CorruptSegment, SegmentError, SegmentNotFound
from .index_parts import Entry, Row, entries, live_mask, rows, violations
from .records import (
    CAPACITY_OFFSET,
    COUNT_OFFSET,
    INDEX_MAGIC,
    SUCCESSOR_OFFSET,
    index_bytes,
)
from .segment import (
    Segment,
    SegmentName,
    check_header,
    list_segments,
    parse_segment_name,
)

Run = tuple[int, bytes]
"""Consecutive blocks of one prefix that one engine has: its row, and packed block records in the
order of the prefix.  As the native module makes them: another class would cost a lookup more than
all the rest of its Python."""


class ReplicaReader:
    """A replica index mapped for reading.  Lock-free against the writer, never blocks."""

    def __init__(self, segment: Segment, name: SegmentName) -> None:
        self._segment = segment
        self._name = name

    @staticmethod
    def open(name: str) -> ReplicaReader:
        """Map the replica ``name``, or what has replaced it since, read-only.

        Raises SegmentNotFound, SegmentNotReady, VersionMismatch or CorruptSegment.
        """
        parsed = parse_segment_name(name)
        if parsed is None:
            raise SegmentNotFound(f"{name!r} is no name of a replica index")
        reader = ReplicaReader(*_open_newest(parsed))
        reader._current()
        return reader

    @property
    def name(self) -> str:
        """Name of the segment that is mapped at the moment."""
        return str(self._name)

    @property
    def capacity(self) -> int:
        """Entries the segment has room for."""
        return _native.load(self._current().buffer, CAPACITY_OFFSET)

    @property
    def count(self) -> int:
        """Entries in use."""
        return _native.load(self._current().buffer, COUNT_OFFSET)

    def lookup(
        self, hashes: Sequence[bytes], start: int, stop: int, rows_mask: int | None = None
    ) -> list[Run]:
        """Return the longest prefix of ``hashes[start:stop]`` that the rows in the mask have,
        cut into as few owners as possible; an empty list if the first block is missing.

        ``rows_mask`` None means all live rows.  Any process; does not mutate.
        """
        buffer = self._current().buffer
        mask = live_mask(buffer) if rows_mask is None else rows_mask
        if not isinstance(hashes, list):
            hashes, start, stop = list(hashes[start:stop]), 0, stop - start
        return _native.index_lookup(buffer, hashes, start, stop, mask)

    def rows(self) -> list[Row]:
        """Return the engines the replica knows."""
        return list(rows(self._current().buffer))

    def entries(self) -> Iterator[Entry]:
        """Yield all entries; one that moves meanwhile may be missing or come twice."""
        return entries(self._current().buffer)

    def check_integrity(self) -> list[str]:
        """Return what is wrong with the index, in words; for a quiet writer it is empty."""
        return violations(self._current().buffer)

    def close(self) -> None:
        """Unmap.  Idempotent."""
        self._segment.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} [{self.count} of {self.capacity} entries]>"

    def _current(self) -> Segment:
        """Follow the announcements of larger segments to the newest that can be opened."""
        while (newer := _native.load(self._segment.buffer, SUCCESSOR_OFFSET)) > self._name.revision:
            try:
                self._segment, self._name = _open_newest(self._name._replace(revision=newer))
            except SegmentError:
                break  # its owner has gone, or is just creating the next: keep what there is
        return self._segment


# -- opening


def _open_newest(name: SegmentName) -> tuple[Segment, SegmentName]:
    """Open the segment ``name`` or, if it was replaced meanwhile, its newest revision."""
    try:
        return _open_checked(name), name
    except SegmentNotFound:
        newer = [
            other
            for other in list_segments(name.namespace)
            if other._replace(revision=name.revision) == name and other.revision > name.revision
        ]
        if not newer:
            raise
    newest = max(newer, key=lambda other: other.revision)
    return _open_checked(newest), newest


def _open_checked(name: SegmentName) -> Segment:
    segment = Segment.open(str(name), writable=False)
    try:
        check_header(segment, INDEX_MAGIC)
        check_capacity(segment)
    except BaseException:
        segment.close()
        raise
    return segment


def check_capacity(segment: Segment) -> None:
    """Raise CorruptSegment unless the stated capacity fits the segment."""
    capacity = _native.load(segment.buffer, CAPACITY_OFFSET)
    if capacity & (capacity - 1) or index_bytes(capacity) != segment.buffer.nbytes:
        raise CorruptSegment(
            f"{segment.name} states {capacity} entries, has {segment.buffer.nbytes} bytes"
        )
