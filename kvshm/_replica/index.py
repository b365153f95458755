"""The replica index of an engine: which blocks of which engines hold which prefix.

An engine writes its own replica, in its scheduler process.  Lookups there and in other processes
(kvshm/_replica/index_reader.py) run concurrently with the writer, without a lock.  A thread that
must not wait leaves its work to the writer (``forget``, ``close``).  Events may be lost,
repeated or out of order: a private tombstone per block of each engine records the highest
generation heard of and whether it was retracted, so that old events change nothing.

When the segment is full, a larger one is built and takes its place; without memory for that, new
entries are refused.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvshm import _native
from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import Epoch, LeaseBit
from kvshm._base.log import logger
from kvshm._shm.available_memory import check_available
from kvshm._shm.layout import (
    CAPACITY_OFFSET,
    INDEX_HEADER_BYTES,
    INDEX_MAGIC,
    MAX_BLOCKS,
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
from kvshm._shm.segment import INDEX_KIND, Header, Segment, SegmentName, write_header
from kvshm.errors import IndexFull, KvshmError, SegmentError

from .index_layout import ROW_NAME_BYTES, ROW_STRUCT, TOMBSTONE_STRUCT
from .index_reader import ReplicaReader

log = logger(__name__)

MIN_CAPACITY = 8

_SCANNED_BYTES = 1 + 2 * RECORD_BYTES // TOMBSTONE_BYTES
"""Bytes that a scan takes per byte of tombstones: a copy of the tombstones, two of the records."""


class ApplyResult(NamedTuple):
    """The result of a batch of events, in numbers of events."""

    added: int = 0
    removed: int = 0
    ignored: int = 0
    refused: int = 0
    """Publishes without room in the index."""


class StaleRecords(NamedTuple):
    """Packed records to remove from the index, and the engine that had the row at that time."""

    row: int
    epoch: Epoch
    records: bytes


class Heard(NamedTuple):
    """What has been heard of one engine's blocks since the last of these."""

    epoch: Epoch
    records: bytes | None
    """Packed, in order, of events and scans; a RETRACT may have no key.  None: the engine has gone,
    and all its blocks."""


class Replica(ReplicaReader):
    """The replica as its owner writes it.  A lock lets one thread write at a time; lookups take no
    lock.  After ``close`` writes are dropped without an error, since the threads of an engine end
    independently."""

    stale_records: deque[StaleRecords]
    """Records given to ``forget`` that the writer has yet to remove.  They leave the queue after
    the index has changed: a lookup that begins with the queue empty returns none of them."""

    def __init__(self, segment: Segment, header: Header) -> None:
        super().__init__(segment)
        self.refused = 0
        """Number of publishes dropped so far for lack of room."""
        self._header = header
        self._lock = threading.Lock()
        self.stale_records = deque()
        self._ending = False
        self._tombstones: dict[int, bytearray] = {}
        self._grow_at = 0
        self.heard: deque[Heard] | None = None
        """What is written here, for a reader who wants to follow it; None: nobody does."""

    @classmethod
    def create(cls, namespace: str, engine: str | int, epoch: Epoch, capacity: int) -> Replica:
        """Create an empty replica for ``capacity`` entries, rounded up to a power of two.  Raises
        SegmentTooSmall."""
        header = Header(INDEX_MAGIC, INDEX_HEADER_BYTES, epoch, os.getpid())
        name = str(SegmentName(namespace, INDEX_KIND, str(engine), epoch))
        rounded = 1 << (max(capacity, MIN_CAPACITY) - 1).bit_length()
        return cls(_new_segment(name, rounded, header), header)

    def descriptor(self) -> int:
        """A new read-only descriptor of the present segment, to hand out; the caller closes it.
        Any thread.  Raises SegmentError."""
        return self._segment.descriptor(writable=False)

    # -- rows

    def add_row(self, epoch: Epoch, name: str, num_blocks: int, lease_bit: LeaseBit) -> int:
        """Add a live row for another engine and return the row's number.  Raises IndexFull if all
        rows are taken or there is no memory, SegmentError after ``close``."""
        with self._exclusive():
            row = next((r for r in range(NUM_ROWS) if r not in self._tombstones), None)
            if row is None:
                raise IndexFull(f"{self.name} has {NUM_ROWS} rows and all are taken")
            _check_memory(self.name, num_blocks * TOMBSTONE_BYTES, f"what is heard of {name}")
            buffer, text = self._segment.buffer, name.encode()[:ROW_NAME_BYTES]
            fresh = (epoch, RowState.FREE, num_blocks, 0, lease_bit + 1, text)
            ROW_STRUCT.pack_into(buffer, ROWS_OFFSET + row * ROW_BYTES, *fresh)
            _set_state(buffer, row, RowState.LIVE)
            self._tombstones[row] = bytearray(num_blocks * TOMBSTONE_BYTES)
            return row

    def set_row_state(self, row: int, state: RowState) -> None:
        """Set whether lookups may use a row: lookups of other processes use only live rows."""
        with self._exclusive():
            if row in self._tombstones and not self._segment.closed:
                _set_state(self._segment.buffer, row, state)

    def drop_row(self, row: int) -> int:
        """Remove an engine's row, entries and tombstones; return the number of entries."""
        with self._exclusive():
            if self._tombstones.pop(row, None) is None or self._segment.closed:
                return 0
            buffer = self._segment.buffer
            if self.heard is not None:
                self.heard.append(Heard(self._epoch_of(row), None))
            _set_state(buffer, row, RowState.GONE)
            dropped = _native.index_drop_row(buffer, row)
            _set_state(buffer, row, RowState.FREE)
            return dropped

    # -- entries

    def apply(self, row: int, records: bytes) -> ApplyResult:
        """Apply an ordered batch of one engine's events.  Events that are not newer than the
        tombstones are ignored, and so are events of an unknown row.  A full index grows; if it
        cannot, publishes are refused.  Raises IndexError for a block that the engine does not have
        and ValueError for an incomplete record, both before anything is applied."""
        return self.apply_all([(row, records)])

    def apply_all(self, batches: Sequence[tuple[int, bytes]]) -> ApplyResult:
        """The same for batches of several engines, each with its row; releases the GIL once for all
        of them.  After an exception the batches before the failed one are applied, and may be
        applied again."""
        try:  # as in _exclusive, which costs several times as much: this is the most frequent call
            with self._lock:
                heard = {} if self._segment.closed else self._tombstones
                known = [(heard[row], row, records) for row, records in batches if row in heard]
                if self.heard is not None:
                    self.heard += [Heard(self._epoch_of(row), part) for _, row, part in known]
                applied = self._apply(known) if known else ApplyResult()
        finally:
            self._run_pending()
        if len(known) == len(batches):
            return applied
        unknown = sum(len(records) for row, records in batches if row not in heard)
        return applied._replace(ignored=applied.ignored + unknown // RECORD_BYTES)

    def forget(self, row: int, epoch: Epoch, records: bytes) -> None:
        """Remove packed records that a lease or copy showed to be stale, as if their retracts (lost
        or still on their way) had arrived; unless another engine has the row by now.  Never waits:
        if another thread is writing, that thread removes them before it returns."""
        self.stale_records.append(StaleRecords(row, epoch, records))
        self._run_pending()

    def tombstones(self, row: int, first: int = 0, stop: int = MAX_BLOCKS) -> bytes:
        """Return a copy of a row's tombstones of the blocks from ``first`` to ``stop``, for
        ``resync``: call it before a scan of these slots of that engine's table begins.  Raises
        IndexFull without memory for the copy and the scan."""
        with self._exclusive():
            heard = memoryview(self._tombstones.get(row, b""))
            part = heard[first * TOMBSTONE_BYTES : stop * TOMBSTONE_BYTES]
            _check_memory(self.name, len(part) * _SCANNED_BYTES, "a scan of a table")
            return bytes(part)

    def has_heard(self, row: int, block: int, generation: int) -> bool:
        """Whether a block's publication at ``generation``, or something later of that block, has
        been applied.  False for a block or a row that does not exist.  Takes no lock: the answer
        may be a moment old.  Any thread."""
        heard, offset = self._tombstones.get(row, b""), block * TOMBSTONE_BYTES
        if not 0 <= offset < len(heard):
            return False
        _, kind, known = TOMBSTONE_STRUCT.unpack_from(heard, offset)
        ahead = (known - generation) % (1 << 32)  # generations wrap, as is_news of replica.c knows
        return bool(kind) and ahead < 1 << 31

    def resync(self, row: int, before: bytes, scanned: bytes, first: int = 0) -> ApplyResult:
        """Make a row agree with a scan of its engine's table, or of a part of it that begins at
        block ``first``.  A block that is published in ``before`` and missing in the scan has left
        READY, since words change before events are sent: its entry is removed, unless a newer event
        has arrived meanwhile.  Raises as ``apply`` does."""
        return self.apply_all([(row, _native.index_stale(before, scanned, first)), (row, scanned)])

    def close(self) -> None:
        """Unmap.  Idempotent.  Never waits: if another thread is writing, that thread unmaps the
        segment before it returns."""
        self._ending = True
        self._run_pending()

    # -- one writer at a time

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock; afterwards do what other threads have requested meanwhile."""
        try:
            with self._lock:
                yield
        finally:
            self._run_pending()

    def _run_pending(self) -> None:
        """Do what was requested, unless another thread is writing: that thread calls this method
        after its write and finds all earlier requests."""
        while (self.stale_records or self._ending) and self._lock.acquire(blocking=False):
            try:
                if self._do_pending():
                    return
            finally:
                self._lock.release()

    def _do_pending(self) -> bool:
        """Remove stale records and close if requested.  Returns whether the replica is closed."""
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
        if self._epoch_of(stale.row) != stale.epoch:
            return
        retracts = (r._replace(kind=RecordKind.RETRACT) for r in unpack_records(stale.records))
        with suppress(KvshmError, IndexError, ValueError):  # not a block of this engine: no entry
            self._apply([(tombstones, stale.row, pack_records(retracts))])

    def _epoch_of(self, row: int) -> Epoch:
        return Epoch(_native.load(self._segment.buffer, ROWS_OFFSET + row * ROW_BYTES))

    # -- growth

    def _apply(self, batches: list[tuple[bytearray, int, bytes]]) -> ApplyResult:
        """Apply, and grow as needed.  Applying a batch again does not change applied events."""
        apply = _native.index_apply
        added, removed, ignored, full = apply(self._segment.buffer, batches)
        while full and self._grow():
            more = apply(self._segment.buffer, batches)
            added, removed, full = added + more[0], removed + more[1], more[3]
        self.refused += full
        return ApplyResult(added, removed, ignored, full)

    def _grow(self) -> bool:
        """Try to grow.  After a failure, retry only when twice as many events were refused."""
        if self.refused < self._grow_at:
            return False
        try:
            self._enlarge()
        except SegmentError as exc:
            self._grow_at = 2 * self.refused + 1
            log.line(CoreLine.INDEX_FULL, self.name, exc)
            return False
        self._grow_at = 0
        return True

    def _enlarge(self) -> None:
        larger = _new_segment(self.name, 2 * self.capacity, self._header)
        try:
            _native.index_copy(self._segment.buffer, larger.buffer)
        except BaseException:
            larger.close()
            raise
        # The old segment is not closed: a lookup under way may still use its mapping.
        old, self._segment = self._segment, larger
        last = old.detach()
        del old  # unmaps, unless a lookup under way still has it
        os.close(last)


def _new_segment(name: str, capacity: int, header: Header) -> Segment:
    """Create an empty, valid index.  A process that maps it before the smaller index was copied
    into it finds fewer entries."""
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


def _set_state(buffer: memoryview, row: int, state: RowState) -> None:
    """One 8-byte store (state u32, num_blocks u32), since readers may read at any time."""
    offset = ROWS_OFFSET + row * ROW_BYTES + ROW_STATE_OFFSET
    num_blocks = _native.load(buffer, offset) >> 32
    _native.store(buffer, offset, num_blocks << 32 | state)
