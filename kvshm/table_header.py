"""The header of a slot table: who made it for what, and the words that speak for all slots.

A life word holds the epoch while one rank's KV memory is what the table says.  Without it no
lease succeeds and no re-check passes, so zeroing it withdraws everything at once.

A pulse says that a process may still use the table, and the leases of its engine: the kernel
marks it when the process dies, before it frees any of its memory.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from . import _native
from .counters import Counters
from .error_log import ErrorLog, LoggedError
from .errors import CorruptSegment, SegmentError
from .records import (
    CREATED_OFFSET,
    ENGINE_NAME_BYTES,
    ENGINE_NAME_OFFSET,
    FINGERPRINT_OFFSET,
    HEARTBEAT_OFFSET,
    LEASES_TAKEN_OFFSET,
    LIFE_OFFSET,
    MAX_BLOCKS,
    MAX_RANKS,
    MODEL_NAME_BYTES,
    MODEL_NAME_OFFSET,
    NUM_BLOCKS_OFFSET,
    NUM_LEASE_BITS,
    NUM_RANKS_OFFSET,
    NUM_TICKETS,
    PULSE_DIED,
    PULSES_OFFSET,
    RETIRED_OFFSET,
    TABLE_HEADER_BYTES,
    TABLE_MAGIC,
    TICKETS_OFFSET,
    table_bytes,
)
from .segment import TABLE_KIND, Header, Segment, SegmentName
from .terms import Epoch, Fingerprint, LeaseBit

Clock = Callable[[], int]
"""Nanoseconds of CLOCK_REALTIME."""

_FIXED = struct.Struct("<32sIII")
_NAMES = struct.Struct(f"<{ENGINE_NAME_BYTES}s{MODEL_NAME_BYTES}s")
_TICKETS = struct.Struct(f"<{NUM_TICKETS}Q")
assert FINGERPRINT_OFFSET + _FIXED.size == NUM_RANKS_OFFSET + 4
assert ENGINE_NAME_OFFSET + ENGINE_NAME_BYTES == MODEL_NAME_OFFSET
assert NUM_BLOCKS_OFFSET == FINGERPRINT_OFFSET + 32


@dataclass(frozen=True)
class TableSpec:
    """What a slot table is made for.  ValueError if no table can be like that."""

    namespace: str
    engine: str
    num_blocks: int
    block_size: int
    """Tokens per block."""
    num_ranks: int
    fingerprint: Fingerprint
    model: str = ""

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

    def segment_name(self, epoch: Epoch) -> str:
        """What people call the segment in one epoch."""
        return str(SegmentName(self.namespace, TABLE_KIND, self.engine, epoch))

    def write(self, segment: Segment, created_ns: int) -> None:
        """Fill the fixed fields of a new segment's header."""
        buffer, model = segment.buffer, self.model.encode()[:MODEL_NAME_BYTES]
        fixed = (self.fingerprint, self.num_blocks, self.block_size, self.num_ranks)
        _FIXED.pack_into(buffer, FINGERPRINT_OFFSET, *fixed)
        _NAMES.pack_into(buffer, ENGINE_NAME_OFFSET, self.engine.encode(), model)
        _native.store(buffer, CREATED_OFFSET, created_ns)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", "ignore")


class TableHeader:
    """The header of one mapped table.  What never changes is read once; the rest at each
    call.  Words may be written by any process that has the table mapped writable."""

    num_blocks: int
    block_size: int
    num_ranks: int

    def __init__(self, segment: Segment, header: Header, clock: Clock = time.time_ns) -> None:
        """Take over a segment whose common header was checked.  Raises CorruptSegment."""
        self._segment, self._clock = segment, clock
        self.name, self.epoch, self.pid = segment.name, header.epoch, header.pid
        self._pulse: object = None
        buffer = segment.buffer
        if header.magic != TABLE_MAGIC or header.header_bytes != TABLE_HEADER_BYTES:
            raise CorruptSegment(f"{self.name} has a header of {header.header_bytes} bytes")
        fingerprint, self.num_blocks, self.block_size, self.num_ranks = _FIXED.unpack_from(
            buffer, FINGERPRINT_OFFSET
        )
        if not self.num_blocks or not 0 < self.num_ranks <= MAX_RANKS:
            raise CorruptSegment(
                f"{self.name} states {self.num_blocks} blocks, {self.num_ranks} ranks"
            )
        if table_bytes(self.num_blocks, self.num_ranks) > buffer.nbytes:
            raise CorruptSegment(
                f"{self.name}: {self.num_blocks} blocks exceed {buffer.nbytes} bytes"
            )
        self.fingerprint = Fingerprint(fingerprint)
        engine, model = _NAMES.unpack_from(buffer, ENGINE_NAME_OFFSET)
        self.engine, self.model = _text(engine), _text(model)
        self.created_ns = _native.load(buffer, CREATED_OFFSET)
        self.counters = Counters(segment)
        self._next_ticket = 0
        self._errors = ErrorLog(segment)

    @property
    def nbytes(self) -> int:
        """Size of the segment, whatever its header states."""
        return self._segment.buffer.nbytes

    def _load(self, offset: int) -> int:
        return _native.load(self._segment.buffer, offset)

    def _store(self, offset: int, value: int) -> None:
        _native.store(self._segment.buffer, offset, value)

    # -- life

    def _life_offset(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"{self.name} has {self.num_ranks} ranks, no rank {rank}")
        return LIFE_OFFSET + 8 * rank

    def life(self, rank: int) -> int:
        """The rank's life word: the epoch while its KV memory is what the table says."""
        return self._load(self._life_offset(rank))

    @property
    def alive(self) -> bool:
        """Whether all ranks' life words hold the epoch."""
        buffer, end = self._segment.buffer, LIFE_OFFSET + 8 * self.num_ranks
        for offset in range(LIFE_OFFSET, end, 8):
            if _native.load(buffer, offset) != self.epoch:
                return False
        return True

    def set_life(self, rank: int) -> None:
        """The rank's KV memory is exported and is what the table says; that rank only."""
        self._store(self._life_offset(rank), self.epoch)

    def end_life(self, rank: int | None) -> None:
        """Before the rank's KV memory is freed or remapped (None: that of all ranks).  From
        here on no lease succeeds and no re-check of that rank passes."""
        for ended in range(self.num_ranks) if rank is None else (rank,):
            self._store(self._life_offset(ended), 0)

    def retire(self) -> None:
        """No lease will ever succeed again.  For good."""
        self._store(RETIRED_OFFSET, 1)

    @property
    def retired(self) -> bool:
        return _native.load(self._segment.buffer, RETIRED_OFFSET) != 0

    def is_alive(self, rank: int) -> bool:
        """Whether the rank's KV memory is what the table says, and the table not retired."""
        buffer, life = self._segment.buffer, self._life_offset(rank)
        alive = _native.load(buffer, life) == self.epoch
        return alive and not _native.load(buffer, RETIRED_OFFSET) and not self.died

    # -- pulses: who of the engine's processes still has the table

    def begin_pulse(self, rank: int | None) -> None:
        """Let the kernel mark the end of this process, which is the rank's (None: the owner's).
        It counts as ended, too, once this object is closed or gone.  Raises SegmentError where
        the kernel or the process's limits do not allow that."""
        try:
            self._pulse = _native.pulse(self._segment.buffer, self._pulse_offset(rank))
        except OSError as exc:
            raise SegmentError(f"{self.name}: a death could not be told: {exc}") from exc

    def _pulse_offset(self, rank: int | None) -> int:
        if rank is None:
            return PULSES_OFFSET
        self._life_offset(rank)
        return PULSES_OFFSET + 8 * (1 + rank)

    def _pulses(self) -> list[int]:
        buffer = self._segment.buffer
        stop = PULSES_OFFSET + 8 * (1 + self.num_ranks)
        return [_native.load(buffer, offset) for offset in range(PULSES_OFFSET, stop, 8)]

    @property
    def owner_died(self) -> bool:
        """Whether the process that made the table has ended, or given it up."""
        return bool(self._load(PULSES_OFFSET) & PULSE_DIED)

    @property
    def owner_begun(self) -> bool:
        """Whether the process that made the table has ever shown a pulse in it."""
        return self._load(PULSES_OFFSET) != 0

    @property
    def died(self) -> bool:
        """Whether a process without which the epoch is at its end has ended, or given it up."""
        buffer, stop = self._segment.buffer, PULSES_OFFSET + 8 * (1 + self.num_ranks)
        for offset in range(PULSES_OFFSET, stop, 8):  # every load looks several times
            if _native.load(buffer, offset) & PULSE_DIED:
                return True
        return False

    @property
    def in_use(self) -> bool:
        """Whether a process of the engine still has the table, and may give leases back."""
        return any(pulse and not pulse & PULSE_DIED for pulse in self._pulses())

    def beat(self) -> None:
        """The owner is alive; about once a second."""
        _native.add(self._segment.buffer, HEARTBEAT_OFFSET, 1)

    @property
    def heartbeat(self) -> int:
        """Counts the owner's beats."""
        return self._load(HEARTBEAT_OFFSET)

    # -- the owner as an importer

    @property
    def leases_taken(self) -> int:
        """Counts the batches of leases the owner has taken on others' blocks."""
        return self._load(LEASES_TAKEN_OFFSET)

    @leases_taken.setter
    def leases_taken(self, count: int) -> None:
        self._store(LEASES_TAKEN_OFFSET, count)

    @property
    def lease_bit(self) -> LeaseBit:
        """The owner's bit in others' slots; NO_LEASE_BIT if it has none."""
        return LeaseBit((self._load(NUM_RANKS_OFFSET) >> 32) - 1)

    @lease_bit.setter
    def lease_bit(self, bit: LeaseBit) -> None:
        if not -1 <= bit < NUM_LEASE_BITS:
            raise IndexError(f"there is no lease bit {bit}")
        self._store(NUM_RANKS_OFFSET, (bit + 1) << 32 | self.num_ranks)

    # -- load tickets: the last rank to finish a load releases its leases

    def take_ticket(self, ranks: int) -> int | None:
        """Begin a load that ``ranks`` ranks will finish; the owner's scheduler only.

        Returns the ticket, None if all are in use.  Tickets are handed out in turn, so that
        one is not used again at once.
        """
        if not 0 < ranks <= MAX_RANKS:
            raise ValueError(f"a load of {ranks} ranks")
        first = self._next_ticket
        for ticket in (i % NUM_TICKETS for i in range(first, first + NUM_TICKETS)):
            if _native.compare_exchange(self._segment.buffer, self._ticket(ticket), 0, ranks):
                self._next_ticket = ticket + 1
                return ticket
        return None

    def finish_ticket(self, ticket: int) -> bool:
        """This rank has finished the load; once per rank.  True for the last one, who then
        releases the leases.  IndexError for a ticket that does not exist."""
        while left := self._load(self._ticket(ticket)):
            if _native.compare_exchange(self._segment.buffer, self._ticket(ticket), left, left - 1):
                return left == 1
        return False

    @staticmethod
    def _ticket(ticket: int) -> int:
        if not 0 <= ticket < NUM_TICKETS:
            raise IndexError(f"there is no ticket {ticket}")
        return TICKETS_OFFSET + 8 * ticket

    # -- error log

    def log_error(self, text: str) -> None:
        """Note an error where tools find it, also after this process has ended."""
        self._errors.add(text, self._clock())

    def errors(self) -> list[LoggedError]:
        """The errors noted, most recent last."""
        return self._errors.read()

    # -- integrity

    def _header_violations(self) -> list[str]:
        legal = (0, self.epoch)
        lives = [self.life(rank) for rank in range(self.num_ranks)]
        tickets = _TICKETS.unpack_from(self._segment.buffer, TICKETS_OFFSET)
        found = [f"life of rank {r} is {w:#x}" for r, w in enumerate(lives) if w not in legal]
        pulses = enumerate(self._pulses(), start=-1)
        found += [f"pulse {r} is {p:#x}" for r, p in pulses if p > PULSE_DIED]
        found += [f"ticket {i} waits for {n} ranks" for i, n in enumerate(tickets) if n > MAX_RANKS]
        if self.lease_bit >= NUM_LEASE_BITS:
            found.append(f"lease bit is {self.lease_bit}")
        return found

    def descriptor(self, writable: bool) -> int:
        """A new descriptor of the table, to hand on; the caller's to close.  Only of a table that
        was created, or kept.  Any thread.  Raises SegmentError."""
        return self._segment.descriptor(writable)

    def close(self) -> None:
        """Unmap.  Idempotent."""
        self._pulse = None
        self._segment.close()
