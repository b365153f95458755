"""Reading a replica index: look up prefixes, list rows and entries, check the whole.

Any process of the same user may map an engine's replica read-only and ask it while its
owner writes: worker ranks and the tools do.  What a lookup finds is a hint; the lease in the
owner's slot table decides.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import _native
from .errors import CorruptSegment, SegmentError, SegmentNotFound
from .records import (
    CAPACITY_OFFSET,
    COUNT_OFFSET,
    ENTRY_BYTES,
    INDEX_HEADER_BYTES,
    INDEX_MAGIC,
    NUM_ROWS,
    RECORD_BYTES,
    ROW_BYTES,
    ROWS_OFFSET,
    SUCCESSOR_OFFSET,
    RowState,
    index_bytes,
)
from .segment import (
    Segment,
    SegmentName,
    check_header,
    list_segments,
    parse_segment_name,
)
from .terms import BlockId, Epoch, Generation, LeaseBit

ROW_STATE_OFFSET = 8
ROW_NAME_BYTES = 32
ROW_STRUCT = struct.Struct(f"<QIIQIxxxx{ROW_NAME_BYTES}s")
ENTRY_STRUCT = struct.Struct("<QIIII")
assert ROW_STRUCT.size == ROW_BYTES
assert ENTRY_STRUCT.size == ENTRY_BYTES

_ENTRIES_AT_ONCE = 4096
_TAKEN = frozenset(RowState) - {RowState.FREE}


class Run(NamedTuple):
    """Consecutive blocks of one prefix that one engine has."""

    row: int
    records: bytes
    """Packed block records, in the order of the prefix."""


class Row(NamedTuple):
    """One engine the replica knows."""

    row: int
    epoch: Epoch
    state: RowState
    num_blocks: int
    entries: int
    lease_bit: LeaseBit
    name: str


class Entry(NamedTuple):
    """One block of one engine as the replica has it; ``tag`` is the hash's first 8 bytes."""

    tag: int
    row: int
    block_id: BlockId
    generation: Generation
    depth: int


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
        mask = _live_mask(buffer) if rows_mask is None else rows_mask
        if not isinstance(hashes, list):
            hashes, start, stop = list(hashes[start:stop]), 0, stop - start
        records, owners = _native.index_lookup(buffer, hashes, start, stop, mask)
        return _runs(records, owners)

    def rows(self) -> list[Row]:
        """Return the engines the replica knows."""
        return list(_rows(self._current().buffer))

    def entries(self) -> Iterator[Entry]:
        """Yield all entries; one that moves meanwhile may be missing or come twice."""
        return _entries(self._current().buffer)

    def check_integrity(self) -> list[str]:
        """Return what is wrong with the index, in words; for a quiet writer it is empty."""
        return _violations(self._current().buffer)

    def close(self) -> None:
        """Unmap.  Idempotent."""
        self._segment.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} [{self.count} of {self.capacity} entries]>"

    def _current(self) -> Segment:
        """Follow the announcements of larger segments to the newest that can be opened."""
        while revision := _native.load(self._segment.buffer, SUCCESSOR_OFFSET):
            try:
                self._segment, self._name = _open_newest(self._name._replace(revision=revision))
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


# -- the parts of a mapped index


def _runs(records: bytes, owners: bytes) -> list[Run]:
    runs: list[Run] = []
    begin = 0
    for end in range(1, len(owners) + 1):
        if end == len(owners) or owners[end] != owners[begin]:
            runs.append(Run(owners[begin], records[begin * RECORD_BYTES : end * RECORD_BYTES]))
            begin = end
    return runs


def _rows(buffer: memoryview) -> Iterator[Row]:
    for row in range(NUM_ROWS):
        epoch, state, num_blocks, entries, bit, name = ROW_STRUCT.unpack_from(
            buffer, ROWS_OFFSET + row * ROW_BYTES
        )
        if state in _TAKEN:
            text = name.rstrip(b"\0").decode("utf-8", "replace")
            yield Row(row, epoch, RowState(state), num_blocks, entries, LeaseBit(bit - 1), text)


def _live_mask(buffer: memoryview) -> int:
    return sum(1 << row.row for row in _rows(buffer) if row.state is RowState.LIVE)


def used_entries(buffer: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield tag, block id, generation, row + 1 and depth of all entries, without a class: a
    large index has a million of them."""
    chunk = _ENTRIES_AT_ONCE * ENTRY_BYTES
    for offset in range(INDEX_HEADER_BYTES, buffer.nbytes, chunk):
        packed = bytes(buffer[offset : offset + chunk])
        yield from (fields for fields in ENTRY_STRUCT.iter_unpack(packed) if fields[3])


def _entries(buffer: memoryview) -> Iterator[Entry]:
    for tag, block_id, generation, owner, depth in used_entries(buffer):
        yield Entry(tag, owner - 1, BlockId(block_id), Generation(generation), depth)


def _violations(buffer: memoryview) -> list[str]:
    """The conservation laws: each used entry is counted once, in the header and in its row."""
    found = list(_entries(buffer))
    count = _native.load(buffer, COUNT_OFFSET)
    wrong = [] if len(found) == count else [f"{count} entries counted, {len(found)} in use"]
    per_row = Counter(entry.row for entry in found)
    for row in _rows(buffer):
        if per_row.pop(row.row, 0) != row.entries:
            wrong.append(f"row {row.row} counts {row.entries} entries and has another number")
    wrong += [f"{n} entries of row {row}, which is free" for row, n in per_row.items()]
    places = Counter((entry.row, entry.block_id) for entry in found)
    wrong += [f"{n} entries of block {place}" for place, n in places.items() if n > 1]
    return wrong + [f"entry {entry} cannot be found" for entry in found if _lost(buffer, entry)]


def _lost(buffer: memoryview, entry: Entry) -> bool:
    """Whether a lookup of the entry's tag in its row alone finds nothing."""
    digest = entry.tag.to_bytes(8, "little").ljust(32, b"\0")
    return not _native.index_lookup(buffer, [digest], 0, 1, 1 << entry.row)[1]
