"""An engine's own slot table, as its scheduler and its worker ranks use it.

Each role has a type, so that a type checker refuses what the role must not do;
kvshm/_shm/slot_table.py has the types for other engines' tables.  docs/protocol.md draws the
protocol, core.c describes its memory order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from kvshm import _native
from kvshm._base.ids import BlockId, Epoch, Fingerprint, Generation, LeaseBit, Rank
from kvshm.errors import SegmentError

from .counters import Counters
from .error_log import ErrorCode
from .histograms import Histograms
from .layout import (
    CREATED_OFFSET,
    ENGINE_NAME_BYTES,
    ENGINE_NAME_OFFSET,
    FINGERPRINT_OFFSET,
    GENERATION_SHIFT,
    HEARTBEAT_OFFSET,
    KEEPS_OFFSET,
    KEPT_UNTIL_OFFSET,
    LEASE_MASK,
    LEASES_TAKEN_OFFSET,
    MAX_BLOCKS,
    MAX_RANKS,
    MODEL_NAME_BYTES,
    NUM_LEASE_BITS,
    NUM_RANKS_OFFSET,
    NUM_TICKETS,
    PULSES_OFFSET,
    RETIRED_OFFSET,
    SLOT_BYTES,
    SLOT_GROUP_OFFSET,
    TABLE_HEADER_BYTES,
    TABLE_MAGIC,
    TICKET_TIMES_OFFSET,
    TICKETS_OFFSET,
    WITHDRAWN_OFFSET,
    SlotState,
    table_bytes,
)
from .progress import CLIENT, SCHEDULER, OwnProgress
from .segment import TABLE_KIND, Header, Segment, SegmentName, write_header
from .slot_table import PeerSlotTable, SlotTableView, state_of
from .statistics import PUBLISHED, RETRACTED
from .table_header import FIXED, NAMES, Clock, seconds_left
from .traffic import OwnTraffic

_MAX_MS = (1 << 32) - 1

_Run = TypeVar("_Run", bound=tuple[Any, ...])


@dataclass(frozen=True)
class TableSpec:
    """The properties of a new slot table.  ValueError if they are impossible."""

    namespace: str
    engine: str
    num_blocks: int
    block_size: int
    """Tokens per hash."""
    num_ranks: int
    fingerprint: Fingerprint
    model: str = ""
    keeps: bool = False
    """Whether the engine computes nothing."""

    def __post_init__(self) -> None:
        if not 0 < self.num_blocks <= MAX_BLOCKS or not 0 < self.block_size < 1 << 32:
            raise ValueError(f"{self.num_blocks} blocks of {self.block_size} tokens")
        if not 0 < self.num_ranks <= MAX_RANKS:
            raise ValueError(f"{self.num_ranks} ranks, a slot table has 1 to {MAX_RANKS}")
        if len(self.fingerprint) != 32:
            raise ValueError(f"a fingerprint has 32 bytes, not {len(self.fingerprint)}")
        if len(self.engine.encode()) > ENGINE_NAME_BYTES:
            raise ValueError(f"engine name {self.engine!r} has over {ENGINE_NAME_BYTES} bytes")

    @property
    def nbytes(self) -> int:
        """Size of the segment."""
        return table_bytes(self.num_blocks, self.num_ranks)

    def write(self, segment: Segment, created_ns: int) -> None:
        """Fill the constant fields of a new segment's header."""
        buffer = segment.buffer
        # A path may hold bytes that are no text.
        model = self.model.encode(errors="replace")[:MODEL_NAME_BYTES]
        fixed = (self.fingerprint, self.num_blocks, self.block_size, self.num_ranks)
        FIXED.pack_into(buffer, FINGERPRINT_OFFSET, *fixed)
        NAMES.pack_into(buffer, ENGINE_NAME_OFFSET, self.engine.encode(), model)
        _native.store(buffer, CREATED_OFFSET, created_ns)
        _native.store(buffer, KEEPS_OFFSET, int(self.keeps))


class EngineSlotTable(SlotTableView):
    """The engine's own slot table: what its scheduler and its worker ranks both do with it."""

    WRITABLE = True
    counters: Counters
    histograms: Histograms
    _ticks: Clock = staticmethod(time.monotonic_ns)
    """Nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self, segment: Segment, header: Header, clock: Clock = time.time_ns) -> None:
        super().__init__(segment, header)
        self._header = header
        self.counters = Counters(segment)
        self.histograms = Histograms(segment)
        self.loops = OwnProgress(segment, self._ticks)
        self._clock = clock
        self._pulse: object = None

    def begin_pulse(self, rank: int | None) -> None:
        """Have the kernel mark a pulse of the table when this process dies.  ``rank``: the rank
        whose process this is; None: this is the owner.  The process also counts as dead once this
        object is closed or freed.  Raises SegmentError if the kernel or the limits of the process
        do not allow that."""
        if rank is not None:
            self._life_offset(rank)
        offset = PULSES_OFFSET + 8 * (0 if rank is None else 1 + rank)
        try:
            self._pulse = _native.pulse(self._segment.buffer, offset)
        except OSError as exc:
            raise SegmentError(
                f"{self.name}: the kernel cannot mark the death of this process: {exc}"
            ) from exc

    def end_life(self, rank: int | None) -> None:
        """Call this before the rank's KV memory (None: of all ranks) is freed or remapped.  From
        then on no lease succeeds and no re-check of that rank passes."""
        for ended in range(self.num_ranks) if rank is None else (rank,):
            self._store(self._life_offset(ended), 0)

    def withdraw(self) -> None:
        """Have keepers drop what they have copied from here; the engine goes on.  Cannot be
        undone."""
        self._store(WITHDRAWN_OFFSET, 1)

    def log_error(self, *about: str, code: ErrorCode = ErrorCode.OTHER) -> None:
        """Record an error for tools, which can read it even after this process has ended.
        ``about``: what the places of the code's text stand for."""
        self._errors.add(code, about, self._clock())

    def close(self) -> None:
        self._pulse = None
        super().close()

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._segment.buffer, offset, value)


class RankSlotTable(EngineSlotTable):
    """The engine's own slot table, for its worker ranks."""

    def set_life(self, rank: int) -> None:
        """State that the rank's KV memory is exported and matches the table.  Only the rank itself
        calls this."""
        self._store(self._life_offset(rank), self.epoch)

    def set_checksum(self, rank: Rank, block_id: int, checksum: int) -> None:
        """Store the checksum of the rank's part of a block, before the block is published.  Only
        the rank itself calls this."""
        self._store(self._checksum_offset(rank, block_id), checksum)

    def finish_ticket(self, ticket: int) -> bool:
        """State that a rank has finished the load that took this ticket; once per rank.  True for
        the last rank, which then releases the leases.  IndexError for a ticket that does not
        exist."""
        while left := self._load(_ticket(ticket)):
            if _native.compare_exchange(self._segment.buffer, _ticket(ticket), left, left - 1):
                return left == 1
        return False


class OwnSlotTable(EngineSlotTable):
    """The engine's own slot table, for its scheduler: the exporter's operations.  Single-threaded,
    except for what the client's thread writes: ``beat``, counters, errors and the lease bit."""

    _next_ticket = 0
    from_fd = None  # type: ignore[assignment]
    """An owner creates its table: none is mapped as one's own."""
    traffic: OwnTraffic

    def __init__(self, segment: Segment, header: Header, clock: Clock = time.time_ns) -> None:
        super().__init__(segment, header, clock)
        self.traffic = OwnTraffic(segment, self._ticks)

    @classmethod
    def create(
        cls, spec: TableSpec, epoch: Epoch, pid: int | None = None, clock: Clock = time.time_ns
    ) -> Self:
        """Create the table of a new epoch: every slot EMPTY, every life word 0.  ``pid``: the
        owner's pid, for people (default: this process).  Raises SegmentTooSmall."""
        name = str(SegmentName(spec.namespace, TABLE_KIND, spec.engine, epoch))
        segment = Segment.create(name, spec.nbytes)
        spec.write(segment, clock())
        owner = os.getpid() if pid is None else pid
        header = Header(TABLE_MAGIC, TABLE_HEADER_BYTES, epoch, owner)
        write_header(segment, header)
        table = cls(segment, header, clock)
        table.loops.note_clock(SCHEDULER)
        return table

    def publish(self, records: bytes, parents: bytes) -> bytes:
        """Make blocks readable by other engines.  ``parents``: for each block the first 8 bytes of
        the hash of the block before it; 0 for the first block of a chain.  Returns the records of
        the blocks that are READY now, with their generations: the event to send.  A slot that is
        not EMPTY is not changed."""
        return _native.publish(self._segment.buffer, records, parents, self._age_ms())

    def publish_marked(
        self, marks: bytearray, pool: Sequence[Any], runs: list[_Run]
    ) -> tuple[bytes, list[_Run]]:
        """Publish the blocks of ``runs`` (``engine.marks.Run``), each if ``pool`` gives the block
        the hash that its run's chain has for it, in the group that ``pool`` gives.  Adds the number
        of published blocks to the counter PUBLISHED.  Returns the event to send, and the runs with
        blocks that have no hash yet or a slot that is still draining."""
        buffer = self._segment.buffer
        return _native.marks_publish(buffer, marks, pool, runs, self._age_ms(), PUBLISHED.offset)

    def retract(self, blocks: Sequence[BlockId]) -> tuple[bytes, list[BlockId]]:
        """Withdraw blocks: none of them can be leased from then on.  Returns the event to send
        (RETRACT records of the blocks that were READY) and the blocks that are still leased; all
        others may be reused at once."""
        return _native.retract(self._segment.buffer, blocks)

    def retract_marked(
        self, marks: bytearray, blocks: Sequence[Any]
    ) -> tuple[bytes, list[BlockId]]:
        """Withdraw those ``blocks`` (ids, or blocks of the pool) that are published according to
        ``marks`` (``engine.marks.Marks``).  Adds their number to the counter RETRACTED, clears the
        marks of all ``blocks``, and returns what ``retract`` returns."""
        return _native.marks_retract(self._segment.buffer, marks, blocks, RETRACTED.offset)

    def drain(self, blocks: Sequence[BlockId], slow: int) -> list[BlockId]:
        """Free retracted blocks without leases; leases in the bit mask ``slow`` do not count.
        Returns the blocks still leased; all others may be reused."""
        return _native.drain(self._segment.buffer, blocks, slow)

    def force(self, blocks: Sequence[BlockId]) -> tuple[int, int]:
        """Free retracted blocks even if they are leased; all may be reused afterwards.  Returns how
        many were still draining, and the lease bits that were overridden, as a mask."""
        return _native.force(self._segment.buffer, blocks)

    def reset(self) -> int:
        """Withdraw and free all blocks, leased or not.  Returns how many were in use."""
        return _native.reset(self._segment.buffer)

    def retire(self) -> None:
        """Make all future leases fail.  Cannot be undone."""
        self._store(RETIRED_OFFSET, 1)

    def beat(self) -> None:
        """Show that the owner is alive; call it about once a second."""
        _native.add(self._segment.buffer, HEARTBEAT_OFFSET, 1)
        self.loops.note_clock(SCHEDULER)  # its thread has no time for that
        self.loops.went_round(CLIENT)

    def descriptor(self, writable: bool) -> int:
        """A new descriptor of the table, to hand out; the caller closes it.  Any thread.  Raises
        SegmentError, also if the table was not created in this process."""
        return self._segment.descriptor(writable)

    # -- the owner as an importer

    def count_lease_batch(self) -> None:
        """Count a batch of leases on other engines' blocks in the header's ``leases_taken``, by
        which exporters see that this importer goes on.  The counter LEASES_TAKEN counts leases."""
        self._store(LEASES_TAKEN_OFFSET, self.leases_taken + 1)

    def set_lease_bit(self, bit: LeaseBit) -> None:
        """Record in the header which lease bit the owner uses in other engines' slots;
        NO_LEASE_BIT if it has none."""
        if not -1 <= bit < NUM_LEASE_BITS:
            raise IndexError(f"there is no lease bit {bit}")
        self._store(NUM_RANKS_OFFSET, (bit + 1) << 32 | self.num_ranks)

    def generations(self, blocks: Sequence[BlockId]) -> list[Generation]:
        """The generations of these blocks, up to the first that is not READY.  IndexError for a
        block that does not exist."""
        load, buffer, ready = _native.load, self._segment.buffer, int(SlotState.READY)
        found = []
        for block in blocks:
            word = load(buffer, TABLE_HEADER_BYTES + SLOT_BYTES * block)
            if state_of(word) != ready:
                break
            found.append(Generation(word >> GENERATION_SHIFT))
        return found

    # -- blocks that are handed out last

    def hold(self, records: bytes, seconds: float) -> int:
        """Hold own blocks, as an importer may (``PeerSlotTable.hold``)."""
        return self._hold(records, seconds)

    def keeps_blocks(self) -> bool:
        """Whether a hold, or a lease that was taken lately, may be in force.  Resets the word that
        says so once the last one has ended."""
        if not (until := self.kept_until):
            return False
        if self.seconds_left(until):
            return True
        _native.compare_exchange(self._segment.buffer, KEPT_UNTIL_OFFSET, until, 0)
        return False

    def kept(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Those of these blocks that are leased or held.  IndexError for one that does not
        exist."""
        if not self.keeps_blocks():
            return []
        load, buffer, now = _native.load, self._segment.buffer, self.now
        found = []
        for block in blocks:
            at = self._slot_offset(block)
            held_until = load(buffer, at + SLOT_GROUP_OFFSET) >> 32  # read as one word with group
            if load(buffer, at) & LEASE_MASK or seconds_left(held_until, now):
                found.append(block)
        return found

    def kept_runs(self, head: object, wanted: int, most: int) -> _native.KeptRuns:
        """Walk a queue of free blocks behind ``head``, until ``wanted`` of them are neither leased
        nor held, or ``most`` were looked at (``_native.kept_runs``)."""
        return _native.kept_runs(self._segment.buffer, head, wanted, most, self.now)

    def as_peer(self) -> PeerSlotTable:
        """The same table as importers see it, on the same mapping: do not close it."""
        return PeerSlotTable(self._segment, self._header)

    def take_ticket(self, ranks: int) -> int | None:
        """Begin a load that ``ranks`` ranks will finish; the last one releases its leases.  A
        ticket is a word of the header that counts the ranks still at work on one load.  Returns its
        number, or None if all are in use.  Tickets are used in turn, so that a freed ticket is not
        reused at once."""
        if not 0 < ranks <= MAX_RANKS:
            raise ValueError(f"a load of {ranks} ranks")
        first = self._next_ticket
        for ticket in (i % NUM_TICKETS for i in range(first, first + NUM_TICKETS)):
            if self._load(_ticket(ticket)):
                continue
            self._store(TICKET_TIMES_OFFSET + 8 * ticket, self._ticks())  # before tools can see it
            if _native.compare_exchange(self._segment.buffer, _ticket(ticket), 0, ranks):
                self._next_ticket = ticket + 1
                return ticket
        return None

    def _age_ms(self) -> int:
        """Milliseconds since the table was created."""
        return min(self._age_ns() // 1_000_000, _MAX_MS)


def _ticket(ticket: int) -> int:
    if not 0 <= ticket < NUM_TICKETS:
        raise IndexError(f"there is no ticket {ticket}")
    return TICKETS_OFFSET + 8 * ticket
