"""The slot table: one record per KV block of one engine, in one epoch, in shared memory.

The exporter publishes and retracts; importers lease, re-check and release; tools only read.
Records and parents travel packed (kvshm/records.py).  The protocol is drawn in
docs/protocol.md, its memory order in _core.c; this module checks arguments and keeps none of
the table's state.
"""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from . import _native
from . import syncpoints as syncpoints  # arms the core's sync points, if a test asked for it
from .counters import PUBLISHED, RETRACTED
from .errors import CorruptSegment
from .records import (
    GENERATION_SHIFT,
    LEASE_MASK,
    MAX_BLOCKS,
    MAX_RANKS,
    NUM_LEASE_BITS,
    SLOT_BYTES,
    STATE_SHIFT,
    TABLE_HEADER_BYTES,
    TABLE_MAGIC,
    SlotState,
    table_bytes,
)
from .segment import Header, Segment, check_header, write_header
from .table_header import Clock, TableHeader, TableSpec
from .terms import BlockHash, BlockId, Epoch, Generation, LeaseBit, Rank

__all__ = ["Slot", "SlotTable", "TableSpec"]

LARGEST_TABLE = table_bytes(MAX_BLOCKS, MAX_RANKS)
_SCAN_BATCH = 4096
_MAX_MS = (1 << 32) - 1
_STABLE_READS = 8
_SLOT = struct.Struct("<Q32sQII8x")
assert _SLOT.size == SLOT_BYTES


class Slot(NamedTuple):
    """One slot as it was at one moment.  In an EMPTY slot the fields from ``block_hash`` on
    are those of its last publication."""

    generation: Generation
    state: SlotState
    leases: int
    """Bit i: importer i holds a lease."""
    block_hash: BlockHash
    parent_tag: int
    depth: int
    published_ms: int


def _state_of(word: int) -> int:
    return word >> STATE_SHIFT & 0xF


class SlotTable(TableHeader):
    """One mapped slot table.  Lock-free between processes; no call blocks.

    All methods raise CorruptSegment if the table contradicts itself, IndexError for blocks,
    ranks and lease bits that do not exist, SegmentError once the table is closed.
    """

    @classmethod
    def create(
        cls, spec: TableSpec, epoch: Epoch, pid: int | None = None, clock: Clock = time.time_ns
    ) -> SlotTable:
        """Create the table of a new epoch: every slot EMPTY, every life word 0.

        ``pid``: its owner's, for people (default: this process).  Raises SegmentTooSmall.
        """
        segment = Segment.create(spec.segment_name(epoch), spec.nbytes)
        spec.write(segment, clock())
        owner = os.getpid() if pid is None else pid
        header = Header(TABLE_MAGIC, TABLE_HEADER_BYTES, epoch, owner)
        write_header(segment, header)
        return cls(segment, header, clock)

    @classmethod
    def of(
        cls,
        name: str,
        fd: int,
        *,
        writable: bool = True,
        largest: int = LARGEST_TABLE,
        keep: bool = False,
        clock: Clock = time.time_ns,
    ) -> SlotTable:
        """Map a table whose descriptor was handed on; ``fd`` is closed, or kept to be handed on
        again.  ``name`` is what to call it, ``largest`` of how many bytes it may be.

        Raises SegmentNotReady, VersionMismatch, CorruptSegment or SegmentError.
        """
        segment = Segment.of(name, fd, writable, largest)
        if not keep:
            segment.keep_no_descriptor()
        try:
            return cls(segment, check_header(segment, TABLE_MAGIC), clock)
        except BaseException:
            segment.close()
            raise

    # -- exporter's side: its scheduler only

    def publish(self, records: bytes, parents: bytes) -> bytes:
        """Make blocks readable by others.  ``parents`` holds 8 bytes of each parent's hash.

        Returns the records of those that are READY now, with their generations: the event
        to send.  A slot that is not EMPTY is left alone.
        """
        return _native.publish(self._segment.buffer, records, parents, self._age_ms())

    def publish_marked(
        self, marks: bytearray, pool: Sequence[Any], runs: list[tuple[list[bytes], int, bytes]]
    ) -> tuple[bytes, list[tuple[list[bytes], int, bytes]]]:
        """The same for blocks in runs (kvshm/marks.py), as far as ``pool`` has the hashes of their
        places in the chain; counts them.  Returns the event to send, and the runs of which some
        blocks have no hash yet, or a slot that still drains."""
        buffer = self._segment.buffer
        return _native.marks_publish(buffer, marks, pool, runs, self._age_ms(), PUBLISHED.place)

    def retract(self, blocks: Sequence[BlockId]) -> tuple[bytes, list[BlockId]]:
        """Withdraw blocks: none of them can be leased from here on.

        Returns the event to send (RETRACT records of those that were READY) and the blocks
        that are still leased; the others may be reused at once.
        """
        records, draining = _native.retract(self._segment.buffer, blocks)
        return records, [BlockId(block) for block in draining]

    def retract_marked(
        self, marks: bytearray, blocks: Sequence[Any]
    ) -> tuple[bytes, list[BlockId]]:
        """The same for those of ``blocks`` that ``marks`` (kvshm/marks.py) has as published, and
        counts them; marks of all of them are cleared.  Takes pool blocks too."""
        return _native.marks_retract(self._segment.buffer, marks, blocks, RETRACTED.place)

    def drain(self, blocks: Sequence[BlockId], slow: int) -> list[BlockId]:
        """Free retracted blocks that nobody leases any more; leases in the bit mask ``slow``
        do not count.  Returns those still leased; the rest may be reused."""
        return [BlockId(block) for block in _native.drain(self._segment.buffer, blocks, slow)]

    def force(self, blocks: Sequence[BlockId]) -> tuple[int, int]:
        """Free retracted blocks whatever their leases; all may be reused afterwards.

        Returns how many were still draining, and the bit mask of the holders overridden.
        """
        return _native.force(self._segment.buffer, blocks)

    def reset(self) -> int:
        """Withdraw and free every block whatever its leases.  Returns how many were in use."""
        return _native.reset(self._segment.buffer)

    # -- importer's side

    def lease(self, bit: LeaseBit, records: bytes) -> tuple[int, bytes]:
        """Lease the longest prefix of ``records`` that is still what the records say.

        Returns its length, and one byte per record: 1 where this call took the lease, 0
        where the bit was set already, or where nothing was leased.  With NO_LEASE_BIT
        nothing is taken and the re-check alone protects the copy; the table may then be
        mapped read-only.
        """
        return _native.lease(self._segment.buffer, self.epoch, _bounded(bit), records)

    def release(self, bit: LeaseBit, records: bytes, taken: bytes | None = None) -> int:
        """Give back the leases that ``lease`` reported as taken (None: all of the records).

        Returns how many were still held: the exporter may have overridden some.
        """
        return _native.release(self._segment.buffer, _bounded(bit), records, taken)

    def recheck(self, rank: Rank, records: bytes) -> list[bool]:
        """Whether each record's bytes, copied from ``rank`` before this call, count."""
        good = _native.recheck(self._segment.buffer, self.epoch, rank, records)
        return [flag == 1 for flag in good]

    def sweep(self, bits: int) -> int:
        """Clear the leases of importers whose death is confirmed.  Returns slots changed."""
        return _native.sweep(self._segment.buffer, bits)

    # -- everybody: reading

    def scan(self) -> bytes:
        """Records of all READY slots, each untorn.  Slots that change meanwhile may be
        missing; their changes make events of their own."""
        parts, block = [], 0
        while block < self.num_blocks:
            begin = block
            records, block = _native.scan(self._segment.buffer, begin, _SCAN_BATCH)
            if block == begin:
                raise CorruptSegment(f"{self.name} had {self.num_blocks} blocks, now only {begin}")
            parts.append(records)
        return b"".join(parts)

    def slot(self, block_id: int) -> Slot:
        """One slot, untorn unless it changes faster than it can be read."""
        offset = self._slot_offset(block_id)
        word = self._load(offset)
        for _ in range(_STABLE_READS):
            fields = _SLOT.unpack_from(self._segment.buffer, offset)[1:]
            before, word = word, self._load(offset)
            if before == word:
                break
        try:
            state = SlotState(_state_of(word))
        except ValueError as exc:
            raise CorruptSegment(f"{self.name}: slot {block_id} has word {word:#x}") from exc
        return Slot(Generation(word >> GENERATION_SHIFT), state, word & LEASE_MASK, *fields)

    def slots(self) -> Iterator[Slot]:
        """All slots in order of their block ids, each read when it is asked for."""
        return map(self.slot, range(self.num_blocks))

    def checksum(self, rank: Rank, block_id: int) -> int:
        """Checksum of the rank's bytes of a block (KVSHM_VERIFY); 0 if none was written."""
        return self._load(self._checksum_offset(rank, block_id))

    def set_checksum(self, rank: Rank, block_id: int, checksum: int) -> None:
        """Note the checksum, before the block is published; that rank only."""
        self._store(self._checksum_offset(rank, block_id), checksum)

    def check_integrity(self) -> list[str]:
        """Return what is wrong with the table, in words; nothing on a sound one.

        Conservation laws: a slot is EMPTY, READY or DRAINING; an EMPTY one holds no leases;
        life words hold the epoch or 0.  May run beside writers: what looks wrong is read
        again before it is reported.
        """
        return self._header_violations() + [
            f"slot {block}: {wrong}"
            for block in range(self.num_blocks)
            if (wrong := self._slot_violation(block))
        ]

    def _age_ms(self) -> int:
        return min(max((self._clock() - self.created_ns) // 1_000_000, 0), _MAX_MS)

    def _slot_violation(self, block_id: int) -> str:
        offset = self._slot_offset(block_id)
        word = self._load(offset)
        if _is_sound(word) or self._load(offset) != word:
            return ""
        return f"state {_state_of(word)} with leases {word & LEASE_MASK:#x}"

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
            return f"<SlotTable {self.name} [closed]>"
        words = [self._load(self._slot_offset(block)) for block in range(self.num_blocks)]
        counts = Counter(map(_state_of, words))
        states = ", ".join(f"{counts[state]} {state.name.lower()}" for state in SlotState)
        leased = sum(bool(word & LEASE_MASK) for word in words)
        retired = ", retired" if self.retired else ""
        return f"<SlotTable {self.name} [{states}, {leased} leased{retired}]>"


def _bounded(bit: int) -> int:
    """The bit, or one that does not exist but fits a C int: it may stem from a spoiled header."""
    return min(bit, NUM_LEASE_BITS)


def _is_sound(word: int) -> bool:
    state = _state_of(word)
    if state == SlotState.EMPTY:
        return not word & LEASE_MASK
    return state in (SlotState.READY, SlotState.DRAINING)
