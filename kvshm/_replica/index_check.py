"""The invariants of a replica index; they hold whenever nothing is being written.

All functions read a buffer, mapped or copied, and trust no number in it.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from kvshm import _native
from kvshm._shm.layout import (
    COUNT_OFFSET,
    ENTRY_BYTES,
    INDEX_HEADER_BYTES,
    NUM_ROWS,
    ROW_BYTES,
    ROWS_OFFSET,
    SEQUENCE_OFFSET,
    RowState,
)

from .index_layout import ROW_STRUCT, Entry, Row, rows, used_entries

_WORD = (1 << 64) - 1
_LINE_ENTRIES = 64 // ENTRY_BYTES


def violations(buffer: memoryview) -> list[str]:
    """Return, as ``place: violation`` each, where the index contradicts itself: counts in the
    header and rows, blocks named twice or not there, entries that a search cannot reach, rows of
    one epoch, an odd sequence."""
    used = dict(used_entries(buffer))
    taken = {row.row: row for row in rows(buffer)}
    wrong = _miscounted(buffer, used.values(), taken)
    twice = Counter((entry.row, entry.block_id) for entry in used.values())
    for place, entry in used.items():
        if entry.row in taken and entry.block_id >= taken[entry.row].num_blocks:
            blocks = taken[entry.row].num_blocks
            wrong.append(f"entry {place}: names block {entry.block_id}, its row has {blocks}")
    wrong += [
        f"row {row}: {n} entries name block {block}" for (row, block), n in twice.items() if n > 1
    ]
    capacity = (buffer.nbytes - INDEX_HEADER_BYTES) // ENTRY_BYTES
    return wrong + [
        f"entry {place}: cannot be found by its tag" for place in _hidden(used, capacity)
    ]


def _miscounted(buffer: memoryview, found: Collection[Entry], taken: dict[int, Row]) -> list[str]:
    count, sequence = (_native.load(buffer, at) for at in (COUNT_OFFSET, SEQUENCE_OFFSET))
    wrong = [] if len(found) == count else [f"header: {count} entries counted, {len(found)} in use"]
    if sequence % 2:
        wrong.append(f"header: sequence {sequence} is odd, a write was never ended")
    used = Counter(entry.row for entry in found)
    for row in taken.values():
        if used[row.row] != row.entries:
            wrong.append(f"row {row.row}: {row.entries} entries counted, {used[row.row]} in use")
    wrong += _row_violations(buffer, taken)
    return wrong + [
        f"row {row}: {n} entries, but the row is free"
        for row, n in used.items()
        if row not in taken
    ]


def _row_violations(buffer: memoryview, taken: dict[int, Row]) -> list[str]:
    wrong, epochs = [], dict[int, int]()
    for row in taken.values():
        if epochs.setdefault(row.epoch, row.row) != row.row:
            wrong.append(f"row {row.row}: of epoch {row.epoch:016x}, as row {epochs[row.epoch]} is")
    for number in range(NUM_ROWS):
        state = ROW_STRUCT.unpack_from(buffer, ROWS_OFFSET + number * ROW_BYTES)[1]
        if state != RowState.FREE and number not in taken:
            wrong.append(f"row {number}: there is no state {state}")
    return wrong


def _hidden(used: Mapping[int, Entry], capacity: int) -> Iterator[int]:
    """Yield the places that a search cannot reach: a free entry lies between home and place."""
    free = [place for place in range(capacity) if place not in used]
    for place, entry in used.items():
        if free:
            last_free = free[bisect(free, place) - 1]  # before the first one comes the last one
            if (place - _home(entry.tag, capacity)) % capacity >= (place - last_free) % capacity:
                yield place


def _home(tag: int, capacity: int) -> int:
    """Where the search for a tag begins: home_of of core_index.h, which this checks."""
    tag = (tag ^ tag >> 33) * 0xFF51AFD7ED558CCD & _WORD
    tag = (tag ^ tag >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
    return (tag ^ tag >> 33) % capacity // _LINE_ENTRIES * _LINE_ENTRIES
