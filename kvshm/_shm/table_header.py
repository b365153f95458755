"""The header of a slot table: its owner, its sizes, and the words that hold for all slots.

A life word holds the epoch while one rank's KV memory matches the table: without it no lease
succeeds and no re-check passes.  A pulse is marked by the kernel when its process dies, before any
of the process's memory is freed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from kvshm import _native
from kvshm._base.ids import Fingerprint, LeaseBit
from kvshm.errors import CorruptSegment

from .counters import CounterValues
from .error_log import ErrorLog, LoggedError
from .histograms import HistogramValues
from .layout import (
    CREATED_OFFSET,
    ENGINE_NAME_BYTES,
    ENGINE_NAME_OFFSET,
    FINGERPRINT_OFFSET,
    HEARTBEAT_OFFSET,
    IN_DRAIN_OFFSET,
    KEEPS_OFFSET,
    KEPT_UNTIL_OFFSET,
    LEASES_TAKEN_OFFSET,
    LIFE_OFFSET,
    MAX_HOLD_SECONDS,
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
    TICKET_TIMES_OFFSET,
    TICKETS_OFFSET,
    WITHDRAWN_OFFSET,
    table_bytes,
)
from .progress import LoopProgress, read_progress
from .segment import Header, Segment
from .traffic import TrafficValues

Clock = Callable[[], int]
"""Nanoseconds of CLOCK_REALTIME."""

FIXED = struct.Struct("<32sIII")
NAMES = struct.Struct(f"<{ENGINE_NAME_BYTES}s{MODEL_NAME_BYTES}s")
WRAP_SECONDS = 1 << 32
"""The time in which holds are counted wraps here, as a slot's 32 bits do."""
_TICKETS = struct.Struct(f"<{NUM_TICKETS}Q")
assert FINGERPRINT_OFFSET + FIXED.size == NUM_RANKS_OFFSET + 4
assert ENGINE_NAME_OFFSET + ENGINE_NAME_BYTES == MODEL_NAME_OFFSET
assert NUM_BLOCKS_OFFSET == FINGERPRINT_OFFSET + 32


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", "ignore")


def seconds_left(until: int, now: int) -> int:
    """Return for how long a hold counts that ends ``until``; both in seconds since the table was
    created.  0 if there is none, it has ended, or the machine's clock was set back."""
    left = (until - now) % WRAP_SECONDS
    return left if until and left <= MAX_HOLD_SECONDS else 0


class TableHeader:
    """Reads the header of one mapped table: constant fields once, all others at each call."""

    num_blocks: int
    block_size: int
    num_ranks: int

    def __init__(self, segment: Segment, header: Header) -> None:
        """Take over a segment with a checked common header.  Raises CorruptSegment."""
        self._segment = segment
        self.epoch = header.epoch
        self.pid = header.pid
        buffer = segment.buffer
        if header.magic != TABLE_MAGIC or header.header_bytes != TABLE_HEADER_BYTES:
            raise CorruptSegment(f"{self.name} has a header of {header.header_bytes} bytes")
        fingerprint, self.num_blocks, self.block_size, self.num_ranks = FIXED.unpack_from(
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
        engine, model = NAMES.unpack_from(buffer, ENGINE_NAME_OFFSET)
        self.engine = _text(engine)
        self.model = _text(model)
        self.created_ns = _native.load(buffer, CREATED_OFFSET)
        self.counters = CounterValues(segment)
        self.histograms = HistogramValues(segment)
        self.traffic = TrafficValues(segment)
        self._errors = ErrorLog(segment)

    @property
    def name(self) -> str:
        """Of the segment, for people."""
        return self._segment.name

    @property
    def nbytes(self) -> int:
        """Actual size of the segment; the header may state another one."""
        return self._segment.buffer.nbytes

    @property
    def keeps(self) -> bool:
        """Whether the engine computes nothing, and keeps what others have computed."""
        return self._load(KEEPS_OFFSET) == 1

    @property
    def withdrawn(self) -> bool:
        """Whether the engine has withdrawn what it had published, and goes on: copies of it that
        others have may be wrong, and no keeper may keep them."""
        return self._load(WITHDRAWN_OFFSET) == 1

    @property
    def in_drain(self) -> bool:
        """Whether the engine is to import nothing, because it is about to be stopped."""
        return self._load(IN_DRAIN_OFFSET) != 0

    @property
    def gives_away(self) -> bool:
        """Whether keepers are to copy what this engine alone has."""
        until = self._load(IN_DRAIN_OFFSET)
        return until > 1 and self.seconds_left(until) > 0

    def _load(self, offset: int) -> int:
        return _native.load(self._segment.buffer, offset)

    # -- time

    _clock: Clock = staticmethod(time.time_ns)

    def _age_ns(self) -> int:
        return max(self._clock() - self.created_ns, 0)

    @property
    def age_seconds(self) -> int:
        """Whole seconds since the table was created; 0 if the clock was set back behind that."""
        return self._age_ns() // 1_000_000_000

    @property
    def age_ms(self) -> int:
        """Milliseconds since the table was created, as slots have them: they end after 49 days."""
        return min(self._age_ns() // 1_000_000, WRAP_SECONDS - 1)

    @property
    def now(self) -> int:
        """Whole seconds since the table was created, in which holds are counted."""
        return (self._clock() - self.created_ns) // 1_000_000_000 % WRAP_SECONDS

    @property
    def kept_until(self) -> int:
        """When the last hold, and the leases that were taken lately, end at the latest; 0: none."""
        return _native.load(self._segment.buffer, KEPT_UNTIL_OFFSET)

    def seconds_left(self, until: int) -> int:
        """For how long a hold until then still counts; 0 if it does not."""
        return seconds_left(until, self.now)

    # -- life words

    def _life_offset(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"{self.name} has {self.num_ranks} ranks, no rank {rank}")
        return LIFE_OFFSET + 8 * rank

    def life(self, rank: int) -> int:
        return self._load(self._life_offset(rank))

    @property
    def alive(self) -> bool:
        """Whether all ranks' life words hold the epoch."""
        buffer, end = self._segment.buffer, LIFE_OFFSET + 8 * self.num_ranks
        for offset in range(LIFE_OFFSET, end, 8):
            if _native.load(buffer, offset) != self.epoch:
                return False
        return True

    @property
    def retired(self) -> bool:
        return _native.load(self._segment.buffer, RETIRED_OFFSET) != 0

    def is_alive(self, rank: int) -> bool:
        """Whether the rank's KV memory matches the table, and no process of its engine has died."""
        buffer, life = self._segment.buffer, self._life_offset(rank)
        alive = _native.load(buffer, life) == self.epoch
        return alive and not _native.load(buffer, RETIRED_OFFSET) and not self.died

    # -- pulses: which processes of the engine still have the table

    def _pulses(self) -> list[int]:
        buffer = self._segment.buffer
        stop = PULSES_OFFSET + 8 * (1 + self.num_ranks)
        return [_native.load(buffer, offset) for offset in range(PULSES_OFFSET, stop, 8)]

    @property
    def owner_died(self) -> bool:
        """Whether the process that created the table has ended or given it up."""
        return bool(self._load(PULSES_OFFSET) & PULSE_DIED)

    @property
    def owner_begun(self) -> bool:
        """Whether the process that created the table has ever begun its pulse."""
        return self._load(PULSES_OFFSET) != 0

    @property
    def died(self) -> bool:
        """Whether the owner or a rank has ended or given the table up: that ends the epoch."""
        buffer, stop = self._segment.buffer, PULSES_OFFSET + 8 * (1 + self.num_ranks)
        for offset in range(PULSES_OFFSET, stop, 8):  # fast: each load reads this several times
            if _native.load(buffer, offset) & PULSE_DIED:
                return True
        return False

    @property
    def in_use(self) -> bool:
        """Whether a process of the engine still has the table and may release leases."""
        return any(pulse and not pulse & PULSE_DIED for pulse in self._pulses())

    @property
    def heartbeat(self) -> int:
        return self._load(HEARTBEAT_OFFSET)

    # -- the owner as an importer

    @property
    def leases_taken(self) -> int:
        """Number of batches of leases that the owner has taken on other engines' blocks."""
        return self._load(LEASES_TAKEN_OFFSET)

    @property
    def lease_bit(self) -> LeaseBit:
        return LeaseBit((self._load(NUM_RANKS_OFFSET) >> 32) - 1)

    def loads_since(self) -> list[int]:
        """When each of the owner's loads under way, which hold leases elsewhere, began, the oldest
        first: nanoseconds of the scheduler's CLOCK_MONOTONIC."""
        buffer = self._segment.buffer
        left = _TICKETS.unpack_from(buffer, TICKETS_OFFSET)
        begun = _TICKETS.unpack_from(buffer, TICKET_TIMES_OFFSET)
        return sorted(at for ranks, at in zip(left, begun, strict=True) if ranks)

    # -- progress

    def progress(self) -> list[LoopProgress]:
        return read_progress(self._segment, self.num_ranks)

    # -- error log

    def errors(self) -> list[LoggedError]:
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

    def close(self) -> None:
        self._segment.close()
