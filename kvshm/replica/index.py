"""The replica index of an engine: which blocks of which engines hold which prefix.

One engine writes its replica, in its scheduler process; lookups there and in other
processes (kvshm/replica/index_reader.py) run beside the writer without a lock.  A thread that must
not wait has the writer do its work (``forget``, ``end``).  Events may be
lost, repeated or out of order: a private tombstone per block of each engine remembers the
highest generation heard of and whether it was retracted, so that nothing old comes back.

When the segment is full a larger one is built beside it and put in its place; if there is no
memory for that, new entries are refused.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvshm import _native
from kvshm.errors import IndexFull, KvshmError, SegmentError
from kvshm.ids import Epoch, Generation, LeaseBit
from kvshm.log import logger
from kvshm.shm.available_memory import check_available
from kvshm.shm.layout import (
    CAPACITY_OFFSET,
    INDEX_HEADER_BYTES,
    INDEX_MAGIC,
    NUM_ROWS,
    RECORD_BYTES,
    ROW_BYTES,
    ROW_STATE_OFFSET,
    ROWS_OFFSET,
    TOMBSTONE_BYTES,
    RecordKind,
    RowState,
    index_bytes,
    pack_records,
    unpack_records,
)
from kvshm.shm.segment import INDEX_KIND, Header, Segment, SegmentName, write_header

from .index_layout import ROW_NAME_BYTES, ROW_STRUCT, Row
from .index_reader import ReplicaReader

log = logger(__name__)

MIN_CAPACITY = 8

_TOMBSTONE = struct.Struct("<QII")
assert _TOMBSTONE.size == TOMBSTONE_BYTES
_SCANNED_BYTES = 1 + 2 * RECORD_BYTES // TOMBSTONE_BYTES
"""What a scan takes for each byte of tombstones: a copy of it, and of all records two."""


class ApplyResult(NamedTuple):
    """What became of a batch of events."""

    added: int = 0
    removed: int = 0
    ignored: int = 0
    refused: int = 0
    """Publishes for which there was no room."""


class HeardBlock(NamedTuple):
    """What was heard of a block that is published."""

    tag: int
    generation: Generation


class StaleRecords(NamedTuple):
    """Packed records that shall not be offered any more, of the engine that had the row then."""

    row: int
    epoch: Epoch
    records: bytes


class Replica(ReplicaReader):
    """The replica as its owner writes it.

    Writers of several threads take turns by a lock; lookups take none.  After ``close``
    writes are dropped without an error: the threads of an engine end independently.
    """

    stale_records: deque[StaleRecords]
    """What ``forget`` was told and the writer has yet to do.  An entry leaves it only after the
    index has changed: who sees it empty before a lookup will not be offered any of it."""

    def __init__(self, segment: Segment, header: Header) -> None:
        super().__init__(segment)
        self._header = header
        self._lock = threading.Lock()
        self.stale_records = deque()
        self._ending = False
        self._tombstones: dict[int, bytearray] = {}
        self._refused = 0
        self._grow_at = 0

    @classmethod
    def create(cls, namespace: str, engine: str | int, epoch: Epoch, capacity: int) -> Replica:
        """Create an empty replica for ``capacity`` entries, rounded up to a power of two.

        Raises SegmentTooSmall.
        """
        header = Header(INDEX_MAGIC, INDEX_HEADER_BYTES, epoch, os.getpid())
        name = str(SegmentName(namespace, INDEX_KIND, str(engine), epoch))
        rounded = 1 << (max(capacity, MIN_CAPACITY) - 1).bit_length()
        return cls(_new_segment(name, rounded, header), header)

    def descriptor(self) -> int:
        """A new read-only descriptor of what the replica is at the moment, to hand on; the
        caller's to close.  Any thread.  Raises SegmentError."""
        return self._segment.descriptor(writable=False)

    @property
    def refused(self) -> int:
        """Publishes dropped so far because there was no room."""
        return self._refused

    # -- rows

    def add_row(self, epoch: Epoch, name: str, num_blocks: int, lease_bit: LeaseBit) -> int:
        """Begin a live row for another engine and return its number.

        Raises IndexFull if all rows are taken or there is no memory, SegmentError after ``close``.
        """
        with self._exclusive():
            row = next((r for r in range(NUM_ROWS) if r not in self._tombstones), None)
            if row is None:
                raise IndexFull(f"{self.name} has {NUM_ROWS} rows and all are taken")
            _check_memory(self.name, num_blocks * TOMBSTONE_BYTES, f"what is heard of {name}")
            fresh = Row(row, epoch, RowState.FREE, num_blocks, 0, lease_bit, name)
            _write_row(self._segment.buffer, fresh)
            _set_state(self._segment.buffer, row, RowState.LIVE)
            self._tombstones[row] = bytearray(num_blocks * TOMBSTONE_BYTES)
            return row

    def set_row_state(self, row: int, state: RowState) -> None:
        """Say whether lookups may use a row: those of other processes use live ones only."""
        with self._exclusive():
            if row in self._tombstones and not self._segment.closed:
                _set_state(self._segment.buffer, row, state)

    def drop_row(self, row: int) -> int:
        """Forget an engine, its entries and its tombstones; returns the number of entries."""
        with self._exclusive():
            if self._tombstones.pop(row, None) is None or self._segment.closed:
                return 0
            buffer = self._segment.buffer
            _set_state(buffer, row, RowState.GONE)
            dropped = _native.index_drop_row(buffer, row)
            _set_state(buffer, row, RowState.FREE)
            return dropped

    # -- entries

    def apply(self, row: int, records: bytes) -> ApplyResult:
        """Apply an ordered batch of one engine's events.

        What is not newer than what was heard before is ignored, and so is all of an unknown
        row.  A full index grows; if it cannot, publishes are refused.  Raises IndexError for
        a block the engine does not have and ValueError for a torn batch, both before
        anything was applied.
        """
        return self.apply_all([(row, records)])

    def apply_all(self, batches: Sequence[tuple[int, bytes]]) -> ApplyResult:
        """The same for batches of several engines, each with its row, and the GIL given up once
        for all of them.  After an exception batches before the one that raised are applied, and
        may be applied again."""
        try:  # as in _exclusive, which costs several times as much: this comes most often by far
            with self._lock:
                heard = {} if self._segment.closed else self._tombstones
                known = [(heard[row], row, records) for row, records in batches if row in heard]
                applied = self._apply(known) if known else ApplyResult()
        finally:
            self._run_pending()
        if len(known) == len(batches):
            return applied
        unknown = sum(len(records) for row, records in batches if row not in heard)
        return applied._replace(ignored=applied.ignored + unknown // RECORD_BYTES)

    def forget(self, row: int, epoch: Epoch, records: bytes) -> None:
        """Drop packed records that a lease or copy showed to be stale, as if their retracts,
        lost or still on their way, had arrived; unless the row is another engine's by now.

        Never waits: where another thread writes, that thread does it before it is done.
        """
        self.stale_records.append(StaleRecords(row, epoch, records))
        self._run_pending()

    def tombstones(self, row: int) -> bytes:
        """Return what was heard of a row so far (its tombstones): taken before a scan of that
        engine's table begins, for ``resync``.  Raises IndexFull if there is no memory for both."""
        with self._exclusive():
            heard = self._tombstones.get(row, b"")
            _check_memory(self.name, len(heard) * _SCANNED_BYTES, "a scan of a table")
            return bytes(heard)

    def resync(self, row: int, before: bytes, scanned: bytes) -> ApplyResult:
        """Bring a row in line with a scan of its engine's table.

        A block published in ``before`` that the scan did not see has left READY, since words
        change before events are sent: its entry is removed, unless something newer was heard
        meanwhile.  Raises as ``apply`` does.
        """
        return self.apply(row, _native.index_stale(before, scanned) + scanned)

    def check_integrity(self) -> list[str]:
        """Also: exactly the blocks heard of as published have entries.  Takes the lock."""
        with self._exclusive():
            wrong = super().check_integrity()
            held = {
                (e.row, int(e.block_id)): HeardBlock(e.tag, e.generation) for e in self.entries()
            }
        heard = {
            (row, block): known
            for row in self._tombstones
            for block, known in published_blocks(self.tombstones(row)).items()
        }
        return wrong + [
            f"row, block {place}: {held.get(place)} held, {heard.get(place)} heard of"
            for place in sorted(held.keys() | heard.keys())
            if held.get(place) != heard.get(place)
        ]

    def close(self) -> None:
        """Unmap.  Idempotent; waits for a write under way."""
        with self._exclusive():
            super().close()

    def close_soon(self) -> None:
        """``close`` without waiting: where another thread writes, that thread does it before it
        is done."""
        self._ending = True
        self._run_pending()

    # -- turns

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Write, one thread at a time; and what others asked for meanwhile, afterwards."""
        try:
            with self._lock:
                yield
        finally:
            self._run_pending()

    def _run_pending(self) -> None:
        """Do what was asked for, unless another thread writes: it comes here once it is done,
        and what was asked for before that it finds."""
        while (self.stale_records or self._ending) and self._lock.acquire(blocking=False):
            try:
                if self._do_pending():
                    return
            finally:
                self._lock.release()

    def _do_pending(self) -> bool:
        """Whether the end has come."""
        while self.stale_records:
            try:
                self._drop(self.stale_records[0])
            finally:
                self.stale_records.popleft()
        if self._ending:
            super().close()
        return self._ending

    def _drop(self, stale: StaleRecords) -> None:
        tombstones = self._tombstones.get(stale.row)
        if tombstones is None or self._segment.closed:
            return
        if _epoch_of(self._segment.buffer, stale.row) != stale.epoch:
            return
        retracts = (r._replace(kind=RecordKind.RETRACT) for r in unpack_records(stale.records))
        with suppress(KvshmError, IndexError, ValueError):  # no block of this engine: not held
            self._apply([(tombstones, stale.row, pack_records(retracts))])

    # -- growth

    def _apply(self, batches: list[tuple[bytearray, int, bytes]]) -> ApplyResult:
        """Apply, growing as needed: applying again does nothing to what was applied before."""
        apply = _native.index_apply
        added, removed, ignored, full = apply(self._segment.buffer, batches)
        while full and self._grow():
            more = apply(self._segment.buffer, batches)
            added, removed, full = added + more[0], removed + more[1], more[3]
        self._refused += full
        return ApplyResult(added, removed, ignored, full)

    def _grow(self) -> bool:
        """Try to become larger; after a failure not again until twice as much was refused."""
        if self._refused < self._grow_at:
            return False
        try:
            self._enlarge()
        except IndexFull as exc:
            self._grow_at = 2 * self._refused + 1
            log.warning("%s; new entries are refused", exc)
            return False
        self._grow_at = 0
        return True

    def _enlarge(self) -> None:
        old = self._segment
        try:
            larger = _new_segment(self.name, 2 * self.capacity, self._header)
        except SegmentError as exc:
            raise IndexFull(f"{self.name} is full and cannot grow: {exc}") from exc
        try:
            _native.index_copy(old.buffer, larger.buffer)
        except BaseException:
            larger.close()
            raise
        # A lookup under way keeps the old mapping: it is dropped, not closed.
        self._segment = larger


def _new_segment(name: str, capacity: int, header: Header) -> Segment:
    """Create an empty index.  It is valid at once: to who is handed it before a smaller one was
    copied into it, it is an index with fewer entries."""
    segment = Segment.create(name, index_bytes(capacity))
    _native.store(segment.buffer, CAPACITY_OFFSET, capacity)
    write_header(segment, header)
    return segment


def _check_memory(name: str, nbytes: int, what: str) -> None:
    try:
        check_available(nbytes)
    except OSError as exc:
        raise IndexFull(
            f"{name} needs {nbytes} bytes for {what}: {exc.strerror}; free memory, or raise the "
            "container's limit"
        ) from exc


def published_blocks(heard: bytes) -> dict[int, HeardBlock]:
    """By block id: the blocks that these tombstones have as published."""
    return {
        block_id: HeardBlock(tag, Generation(generation))
        for block_id, (tag, state, generation) in enumerate(_TOMBSTONE.iter_unpack(heard))
        if state == RecordKind.PUBLISH
    }


def _write_row(buffer: memoryview, row: Row) -> None:
    name = row.name.encode()[:ROW_NAME_BYTES]
    fields = (row.epoch, row.state, row.num_blocks, row.entries, row.lease_bit + 1, name)
    ROW_STRUCT.pack_into(buffer, ROWS_OFFSET + row.row * ROW_BYTES, *fields)


def _epoch_of(buffer: memoryview, row: int) -> int:
    return _native.load(buffer, ROWS_OFFSET + row * ROW_BYTES)


def _set_state(buffer: memoryview, row: int, state: RowState) -> None:
    """One 8-byte store, since readers look at any time: state u32, num_blocks u32."""
    offset = ROWS_OFFSET + row * ROW_BYTES + ROW_STATE_OFFSET
    num_blocks = _native.load(buffer, offset) >> 32
    _native.store(buffer, offset, num_blocks << 32 | state)
