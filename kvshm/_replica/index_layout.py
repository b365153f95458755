"""Reads the rows and entries of a mapped replica index.

All functions read a buffer, mapped or copied, and trust no number in it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvshm._base.ids import BlockId, Epoch, Generation, LeaseBit
from kvshm._shm.layout import (
    ENTRY_BYTES,
    ENTRY_ROW_SHIFT,
    INDEX_HEADER_BYTES,
    NUM_ROWS,
    ROW_BYTES,
    ROWS_OFFSET,
    TOMBSTONE_BYTES,
    RowState,
)

ROW_NAME_BYTES = 32
ROW_STRUCT = struct.Struct(f"<QIIQI4x{ROW_NAME_BYTES}s")
ENTRY_STRUCT = struct.Struct("<QII")
TOMBSTONE_STRUCT = struct.Struct("<QII")
"""Tag, kind of the last record (0: none was heard), generation; repeats tombstone of replica.c."""
assert ROW_STRUCT.size == ROW_BYTES
assert ENTRY_STRUCT.size == ENTRY_BYTES
assert TOMBSTONE_STRUCT.size == TOMBSTONE_BYTES

_ENTRIES_AT_ONCE = 4096
_BLOCK_MASK = (1 << ENTRY_ROW_SHIFT) - 1
_TAKEN = frozenset(RowState) - {RowState.FREE}


class Row(NamedTuple):
    """One engine that the replica knows."""

    row: int
    epoch: Epoch
    state: RowState
    num_blocks: int
    entries: int
    lease_bit: LeaseBit
    name: str


class Entry(NamedTuple):
    """One block of one engine in the replica; ``tag`` is ``tag_in_group`` of its hash."""

    tag: int
    row: int
    block_id: BlockId
    generation: Generation


def tag_in_group(block_hash: bytes, group: int) -> int:
    """The tag of a block's entry.  Repeats tag_of of core_index.h."""
    mixed = group * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(block_hash[:8], "little") ^ mixed


def rows(buffer: memoryview) -> Iterator[Row]:
    for row in range(NUM_ROWS):
        epoch, state, num_blocks, count, bit, name = ROW_STRUCT.unpack_from(
            buffer, ROWS_OFFSET + row * ROW_BYTES
        )
        if state in _TAKEN:
            text = name.rstrip(b"\0").decode("utf-8", "replace")
            yield Row(row, epoch, RowState(state), num_blocks, count, LeaseBit(bit - 1), text)


def used_entries(buffer: memoryview) -> Iterator[tuple[int, Entry]]:
    chunk = _ENTRIES_AT_ONCE * ENTRY_BYTES
    for offset in range(INDEX_HEADER_BYTES, buffer.nbytes, chunk):
        first = (offset - INDEX_HEADER_BYTES) // ENTRY_BYTES
        stored = ENTRY_STRUCT.iter_unpack(bytes(buffer[offset : offset + chunk]))
        for place, (tag, held, generation) in enumerate(stored, first):
            if owner := held >> ENTRY_ROW_SHIFT:  # row + 1; 0 in a free entry
                block_id = BlockId(held & _BLOCK_MASK)
                yield place, Entry(tag, owner - 1, block_id, Generation(generation))
