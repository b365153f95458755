"""The slot table: one slot per KV block of one engine, in one epoch, in shared memory.

Each role has a type: importers lease, re-check and release, the coordinator sweeps, tools only
read; kvshm/_shm/own_slot_table.py has those of the engine itself.  Methods name blocks by packed
records (kvshm/_shm/layout.py).  docs/protocol.md draws the protocol, core.c its memory order.
"""

from __future__ import annotations

import math
import struct
import time
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Self

from kvshm import _native
from kvshm._base import (
    syncpoints as syncpoints,  # arms the core's sync points, if a test asked for it
)
from kvshm._base.ids import BlockHash, Generation, LeaseBit, Rank
from kvshm.errors import CorruptSegment

from .layout import (
    GENERATION_SHIFT,
    IN_DRAIN_OFFSET,
    KEPT_UNTIL_OFFSET,
    LEASE_MASK,
    MAX_BLOCKS,
    MAX_HOLD_SECONDS,
    MAX_RANKS,
    NUM_LEASE_BITS,
    SLOT_BYTES,
    STATE_SHIFT,
    TABLE_HEADER_BYTES,
    TABLE_MAGIC,
    SlotState,
    table_bytes,
)
from .progress import COORDINATOR, OwnProgress
from .segment import Segment, check_header
from .statistics import SWEPT
from .table_header import WRAP_SECONDS, TableHeader

LARGEST_TABLE = table_bytes(MAX_BLOCKS, MAX_RANKS)
_SCAN_BATCH = 1 << 15
_STABLE_READS = 8
"""How often one slot is read until two reads in a row agree."""
LEASE_SECONDS = 10
"""For how long after a lease its table says that a lease may be in force."""
_SLOT = struct.Struct("<Q32sQIIII")
assert _SLOT.size == SLOT_BYTES


class Slot(NamedTuple):
    """One slot at one moment.  In an EMPTY slot the fields from ``block_hash`` on are those of the
    last publication."""

    generation: Generation
    state: SlotState
    leases: int
    block_hash: BlockHash
    parent_tag: int
    depth: int
    published_ms: int
    group: int = 0
    held_until: int = 0
    """When its hold ends, in seconds since the table was created: ``TableHeader.seconds_left``."""


def state_of(word: int) -> int:
    """Return the state in a slot's word; in a corrupt one it may be none of SlotState's."""
    return word >> STATE_SHIFT & 0xF


class SlotTableView(TableHeader):
    """Reads a slot table, as tools may.  Lock-free between processes; no call blocks.  All methods
    raise CorruptSegment if the table contradicts itself, IndexError for blocks, ranks and lease
    bits that do not exist, SegmentError once the table is closed."""

    WRITABLE: ClassVar[bool] = False
    """Whether this role maps the table writable."""

    @classmethod
    def from_fd(cls, name: str, fd: int, largest: int = LARGEST_TABLE, keep: bool = False) -> Self:
        """Map the table that ``fd`` describes.  Closes ``fd``, unless ``keep``.  ``name``: for
        messages; ``largest``: most bytes.  Raises SegmentError, and what derives from it."""
        segment = Segment.from_fd(name, fd, cls.WRITABLE, largest)
        if not keep:
            segment.close_descriptor()
        try:
            return cls(segment, check_header(segment, TABLE_MAGIC))
        except BaseException:
            segment.close()
            raise

    @property
    def buffer(self) -> memoryview:
        """The whole segment, as ``_native`` takes it."""
        return self._segment.buffer

    def scan(self, first: int = 0, stop: int | None = None) -> bytes:
        """Records of all READY slots from ``first`` to ``stop`` (None: the last one); slots that
        change meanwhile may be missing."""
        parts, block = [], first
        stop = self.num_blocks if stop is None else min(stop, self.num_blocks)
        while block < stop:
            begin = block
            size = min(_SCAN_BATCH, stop - begin)
            records, block = _native.scan(self._segment.buffer, begin, size, stop)
            if block == begin:
                raise CorruptSegment(f"{self.name} had {self.num_blocks} blocks, now only {begin}")
            parts.append(records)
        return b"".join(parts)

    def slot(self, block_id: int) -> Slot:
        """One slot, consistent unless it changes faster than it can be read."""
        offset = self._slot_offset(block_id)
        word = self._load(offset)
        for _ in range(_STABLE_READS):
            fields = _SLOT.unpack_from(self._segment.buffer, offset)[1:]
            before, word = word, self._load(offset)
            if before == word:
                break
        try:
            state = SlotState(state_of(word))
        except ValueError as exc:
            raise CorruptSegment(f"{self.name}: slot {block_id} has word {word:#x}") from exc
        return Slot(Generation(word >> GENERATION_SHIFT), state, word & LEASE_MASK, *fields)

    def slots(self) -> Iterator[Slot]:
        """All slots in order of their block ids, each read when it is requested."""
        return map(self.slot, range(self.num_blocks))

    def recheck(self, rank: Rank, records: bytes) -> list[bool]:
        """For each record: whether the block's bytes, copied from ``rank`` before, may be used."""
        good = _native.recheck(self._segment.buffer, self.epoch, rank, records)
        return [flag == 1 for flag in good]

    def checksum(self, rank: Rank, block_id: int) -> int:
        """Checksum of the rank's bytes of a block (KVSHM_VERIFY); 0 if none was written."""
        return self._load(self._checksum_offset(rank, block_id))

    def check_integrity(self) -> list[str]:
        """Return, as text, where a slot is not EMPTY, READY or DRAINING, an EMPTY one has leases,
        or a life word is neither the epoch nor 0.  May run while others write."""
        return self._header_violations() + [
            f"slot {block}: {wrong}"
            for block in range(self.num_blocks)
            if (wrong := self._slot_violation(block))
        ]

    def _slot_violation(self, block_id: int) -> str:
        offset = self._slot_offset(block_id)
        word = self._load(offset)
        state, leases = state_of(word), word & LEASE_MASK
        sound = state in (SlotState.READY, SlotState.DRAINING)
        if sound or (state == SlotState.EMPTY and not leases) or self._load(offset) != word:
            return ""
        return f"state {state} with leases {leases:#x}"

    def _hold(self, records: bytes, seconds: float) -> int:
        if not seconds > 0:
            return 0
        now, begun = self.now, (self._clock() - self.created_ns) % 1_000_000_000 / 1e9
        lasts = math.ceil(begun + min(seconds, MAX_HOLD_SECONDS))
        until = self._after(now, min(lasts, MAX_HOLD_SECONDS))
        found = _native.hold(self._segment.buffer, self.epoch, records, now, until)
        if found:
            self._keep_until(until)
        return found

    # -- statistics, roughly while the slots change

    def count_blocks(self, places: bytearray, used: int, number: int) -> tuple[int, int, int, int]:
        """Count the blocks as table ``number`` among several: ``_native.census_add``."""
        return _native.census_add(self._segment.buffer, places, used, number)

    def missing_in(self, replica: memoryview, row: int) -> tuple[int, float]:
        """Return how many READY blocks another replica's row misses, and the oldest's age."""
        missing, since_ms = _native.census_missing(self._segment.buffer, replica, row)
        return missing, max(self._age_ns() / 1e9 - since_ms / 1e3, 0.0) if missing else 0.0

    @staticmethod
    def _after(now: int, seconds: int) -> int:
        """That many seconds later, as the slot has it: 0 would be no hold."""
        return (now + seconds) % WRAP_SECONDS or 1

    def _keep_until(self, until: int) -> None:
        """Have the table's owner look for kept blocks until then, or later."""
        while self.seconds_left(known := self.kept_until) < self.seconds_left(until):
            if _native.compare_exchange(self._segment.buffer, KEPT_UNTIL_OFFSET, known, until):
                return

    def _slot_offset(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"{self.name} has {self.num_blocks} blocks, no block {block_id}")
        return TABLE_HEADER_BYTES + SLOT_BYTES * block_id

    def _checksum_offset(self, rank: int, block_id: int) -> int:
        self._life_offset(rank)
        self._slot_offset(block_id)
        checksums = TABLE_HEADER_BYTES + SLOT_BYTES * self.num_blocks
        return checksums + 8 * (rank * self.num_blocks + block_id)

    def __repr__(self) -> str:
        if self._segment.closed:
            return f"<{type(self).__name__} {self.name} [closed]>"
        words = [self._load(self._slot_offset(block)) for block in range(self.num_blocks)]
        counts = Counter(map(state_of, words))
        states = ", ".join(f"{counts[state]} {state.name.lower()}" for state in SlotState)
        leased = sum(bool(word & LEASE_MASK) for word in words)
        retired = ", retired" if self.retired else ""
        return f"<{type(self).__name__} {self.name} [{states}, {leased} leased{retired}]>"


class PeerSlotTable(SlotTableView):
    """Another engine's slot table, for an importer's scheduler and ranks."""

    WRITABLE = True

    def lease(self, bit: LeaseBit, records: bytes) -> tuple[int, bytes]:
        """Lease the longest prefix of ``records`` that still matches.  Returns its length, and one
        byte per record: 1 if this call took the lease.  NO_LEASE_BIT takes none: the re-check alone
        protects the copy."""
        if bit >= 0 and records and self.WRITABLE:  # first: no lease is in force while it is 0
            self._keep_until(self._after(self.now, LEASE_SECONDS))
        return _native.lease(self._segment.buffer, self.epoch, _bounded(bit), records)

    def release(self, bit: LeaseBit, records: bytes, taken: bytes | None = None) -> int:
        """Give back the leases that ``lease`` reported as taken (None: of all).  Returns how many
        were still held: the exporter may have forced some."""
        return _native.release(self._segment.buffer, _bounded(bit), records, taken)

    def hold(self, records: bytes, seconds: float) -> int:
        """Ask the owner to hand these blocks out last for ``seconds``, MAX_HOLD_SECONDS at most.  A
        hint, which ends by itself.  Returns how many slots still match; 0 after the epoch."""
        return self._hold(records, seconds)

    def put_in_drain(self, seconds: int, again: bool = False) -> int:
        """Have the owner import nothing from its next lookup on, and keepers copy for so many
        seconds, MAX_HOLD_SECONDS at most, what it alone has; or for longer, if that was asked for
        before.  ``again``: unless the drain was ended meanwhile.  Returns what ``end_copies``
        takes."""
        until = self._after(self.now, 1 + min(seconds, MAX_HOLD_SECONDS - 1))
        while True:
            known = self._load(IN_DRAIN_OFFSET)
            left = self.seconds_left(known) if known > 1 else 0
            if (again and not known) or left >= self.seconds_left(until):
                return 0
            if _native.compare_exchange(self._segment.buffer, IN_DRAIN_OFFSET, known, until):
                return until

    def end_copies(self, asked: int) -> None:
        """Have keepers copy no more.  The engine stays in drain.  Nothing happens if the drain was
        ended, or others have asked for more time, since ``put_in_drain`` returned ``asked``."""
        if asked:
            _native.compare_exchange(self._segment.buffer, IN_DRAIN_OFFSET, asked, 1)

    def end_drain(self) -> None:
        """Let the owner import again."""
        _native.store(self._segment.buffer, IN_DRAIN_OFFSET, 0)


class RosterSlotTable(SlotTableView):
    """The slot table of an engine in the roster, for the coordinator."""

    WRITABLE = True

    def descriptor(self, writable: bool) -> int:
        """A new descriptor of the table, to hand out; the caller closes it.  Only if the table was
        mapped with ``keep``.  Any thread.  Raises SegmentError."""
        return self._segment.descriptor(writable)

    def sweep(self, bits: int) -> int:
        """Clear the leases of dead importers (``bits``); return how many slots changed."""
        swept = _native.sweep(self._segment.buffer, bits)
        _native.add(self._segment.buffer, SWEPT.offset, swept)
        return swept

    def coordinator_went_round(self, clock_offset_ns: int | None) -> None:
        """Show tools that the coordinator is not stuck, once a second."""
        progress = OwnProgress(self._segment, time.monotonic_ns, lambda: clock_offset_ns)
        progress.went_round(COORDINATOR)


def _bounded(bit: int) -> int:
    """The bit, or an invalid one that fits a C int: it may come from a corrupt header."""
    return min(bit, NUM_LEASE_BITS)
