"""The native module's replica index.  test_index_model.py compares it with a plain dictionary."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvshm import _native
from kvshm._base.ids import BlockHash, BlockId, Generation
from kvshm._shm.layout import (
    CAPACITY_OFFSET,
    COUNT_OFFSET,
    ENTRY_BYTES,
    ENTRY_ROW_SHIFT,
    HEADER_BYTES_OFFSET,
    INDEX_HEADER_BYTES,
    LAYOUT_VERSION,
    NUM_ROWS,
    ROW_BYTES,
    ROW_ENTRIES_OFFSET,
    ROWS_OFFSET,
    SEQUENCE_OFFSET,
    TOMBSTONE_BYTES,
    BlockRecord,
    RecordKind,
    index_bytes,
    pack_records,
    unpack_records,
)
from kvshm.errors import CorruptSegment

BLOCKS = 16
ALL_ROWS = 2**64 - 1


def make_index(capacity: int) -> mmap.mmap:
    memory = mmap.mmap(-1, index_bytes(capacity))
    struct.pack_into("<IQ", memory, HEADER_BYTES_OFFSET, INDEX_HEADER_BYTES, index_bytes(capacity))
    _native.store(memory, CAPACITY_OFFSET, capacity)
    _native.mark_ready(memory, LAYOUT_VERSION)
    return memory


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(2, "little") * 16)


def event(
    number: int, block: int, generation: int, kind: RecordKind = RecordKind.PUBLISH
) -> BlockRecord:
    return BlockRecord(digest(number), BlockId(block), Generation(generation), number % 7, kind)


class Index:
    def __init__(self, capacity: int = 64) -> None:
        self.memory = make_index(capacity)
        self.tombstones = {row: bytearray(BLOCKS * TOMBSTONE_BYTES) for row in (0, 1, 63)}

    def apply(self, row: int, *events: BlockRecord) -> tuple[int, int, int, int]:
        return _native.index_apply(self.memory, [(self.tombstones[row], row, pack_records(events))])

    def lookup(
        self, hashes: Sequence[bytes], rows: int = ALL_ROWS
    ) -> list[tuple[int, BlockRecord]]:
        runs = _native.index_lookup(self.memory, list(hashes), 0, len(hashes), rows)
        owners = [owner for owner, _ in runs]
        assert all(a != b for a, b in pairwise(owners)), "cut where the owner changes, only"
        return [(owner, record) for owner, packed in runs for record in unpack_records(packed)]

    def count(self) -> int:
        return _native.load(self.memory, COUNT_OFFSET)

    def row_count(self, row: int) -> int:
        return _native.load(self.memory, ROWS_OFFSET + row * ROW_BYTES + ROW_ENTRIES_OFFSET)


def test_what_is_published_is_found_with_all_it_says() -> None:
    index = Index()
    assert index.apply(63, event(1, 5, 9)) == (1, 0, 0, 0)
    assert index.lookup([digest(1)]) == [(63, event(1, 5, 9)._replace(depth=0))]
    assert index.lookup([digest(2)]) == []
    assert (index.count(), index.row_count(63), index.row_count(0)) == (1, 1, 0)
    assert _native.load(index.memory, SEQUENCE_OFFSET) == 2


def test_a_short_digest_is_padded() -> None:
    index = Index()
    short = b"0123456789abcdef"
    index.apply(0, event(1, 5, 9)._replace(block_hash=BlockHash(short.ljust(32, b"\0"))))
    ((_, found),) = index.lookup((short,))
    assert found.block_hash == short.ljust(32, b"\0")


def test_a_run_ends_where_no_one_goes_on() -> None:
    index = Index()
    index.apply(0, event(1, 1, 0), event(2, 2, 0), event(4, 4, 0))
    found = index.lookup([digest(n) for n in (1, 2, 3, 4)])
    assert [r.block_id for _, r in found] == [1, 2]


def test_start_and_stop_select_part_of_the_prefix() -> None:
    index = Index()
    index.apply(0, event(1, 1, 0), event(2, 2, 0), event(3, 3, 0))
    hashes = [digest(n) for n in (1, 2, 3)]
    for start, stop, wanted in [(1, 3, [2, 3]), (1, 2, [2]), (2, 99, [3]), (3, 3, []), (2, 1, [])]:
        runs = _native.index_lookup(index.memory, hashes, start, stop, 1)
        found = [r.block_id for _, packed in runs for r in unpack_records(packed)]
        assert found == wanted


def test_the_last_block_that_a_row_has_is_found_from_the_end() -> None:
    index = Index()
    index.apply(0, event(2, 2, 0), event(4, 4, 0))
    index.apply(1, event(5, 5, 0))
    hashes = [digest(n) for n in range(8)]

    def last(start: int, stop: int, rows: int = 1, *more: int) -> int:
        return _native.index_last(index.memory, hashes, start, stop, rows, *more)

    assert [last(0, stop) for stop in (99, 5, 4, 3)] == [5, 5, 3, 3]
    assert [last(0, 2), last(3, 4), last(5, 5), last(7, 3)] == [0, 3, 5, 0], "none"
    assert [last(0, 8, rows) for rows in (2, 3, 4)] == [6, 6, 0]
    assert last(0, 8, 1, 7) == 0, "of another group"
    assert [last(0, 8, rows, 0, 3) for rows in (1, 2)] == [1, 2], "three hashes for each block"
    with pytest.raises(TypeError):
        last(0, 8, 1, 0, 1, 1)


def test_a_run_is_cut_into_as_few_owners_as_possible() -> None:
    index = Index()
    index.apply(0, event(1, 1, 0), event(2, 2, 0))
    index.apply(1, event(1, 1, 0), event(2, 2, 0), event(3, 3, 0))
    index.apply(63, event(3, 3, 0), event(4, 4, 0))
    hashes = [digest(n) for n in (1, 2, 3, 4)]
    assert [row for row, _ in index.lookup(hashes)] == [1, 1, 1, 63]
    assert [row for row, _ in index.lookup(hashes, 1 << 0 | 1 << 63)] == [0, 0, 63, 63]
    assert index.lookup(hashes, 1 << 63) == []


def test_a_newer_publication_replaces_the_block() -> None:
    index = Index()
    index.apply(0, event(1, 5, 0))
    assert index.apply(0, event(2, 5, 1)) == (1, 1, 0, 0)
    assert index.lookup([digest(1)]) == []
    assert index.count() == 1


def test_a_retracted_generation_never_comes_back() -> None:
    index = Index()
    index.apply(0, event(1, 5, 3, RecordKind.RETRACT))
    assert index.apply(0, event(1, 5, 3), event(1, 5, 2)) == (0, 0, 2, 0)
    assert index.apply(0, event(1, 5, 4)) == (1, 0, 0, 0)


def test_generations_are_compared_across_the_wrap() -> None:
    index = Index()
    index.apply(0, event(1, 5, 2**32 - 1))
    assert index.apply(0, event(2, 5, 0)) == (1, 1, 0, 0)
    assert index.apply(0, event(1, 5, 2**32 - 1)) == (0, 0, 1, 0)


def test_an_unknown_kind_is_ignored() -> None:
    index = Index()
    packed = bytearray(pack_records([event(1, 5, 3)]))
    packed[-4:] = b"\7\0\0\0"
    assert _native.index_apply(index.memory, [(index.tombstones[0], 0, bytes(packed))]) == (
        0,
        0,
        1,
        0,
    )


def test_a_full_index_refuses_and_can_be_heard_again() -> None:
    index = Index(capacity=8)
    assert index.apply(0, *(event(n, n, 0) for n in range(9))) == (6, 0, 0, 3)
    assert index.apply(0, event(20, 3, 1)) == (1, 1, 0, 0), "a replacement needs no room"
    assert index.apply(0, event(1, 1, 0, RecordKind.RETRACT)) == (0, 1, 0, 0)
    assert index.apply(0, event(7, 7, 0), event(8, 8, 0)) == (1, 0, 0, 1)


def test_dropping_a_row_leaves_the_others() -> None:
    index = Index(capacity=16)
    for row in (0, 1):
        index.apply(row, *(event(n, n, 0) for n in range(6)))
    assert _native.index_drop_row(index.memory, 0) == 6
    assert [row for row, _ in index.lookup([digest(n) for n in range(6)])] == [1] * 6
    assert (index.count(), index.row_count(0), index.row_count(1)) == (6, 0, 6)


@pytest.mark.parametrize("first", [0, 1])
def test_a_record_is_its_owners_own_whoever_stands_before_it(first: int) -> None:
    index = Index()
    index.apply(first, event(1, 1, 4))
    index.apply(1 - first, event(1, 9, 5), event(2, 10, 6))
    found = index.lookup([digest(1), digest(2)])
    assert found == [
        (1 - first, event(1, 9, 5)._replace(depth=0)),
        (1 - first, event(2, 10, 6)._replace(depth=1)),
    ]


def test_bad_rows_and_blocks_are_refused_before_anything_changes() -> None:
    index = Index()
    before = bytes(index.memory)
    for row, block in [(NUM_ROWS, 1), (0, BLOCKS), (0, 2**32 - 1)]:
        packed = pack_records([event(1, 1, 0), event(2, block, 0)])
        with pytest.raises(IndexError):
            _native.index_apply(index.memory, [(index.tombstones[0], row, packed)])
    with pytest.raises(IndexError):
        _native.index_drop_row(index.memory, NUM_ROWS)
    assert bytes(index.memory) == before


@pytest.mark.parametrize("hashes", [[b""], [b"x" * 33], ["x"], [None], 5])
def test_what_is_no_hash_is_refused(hashes: list[bytes]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _native.index_lookup(make_index(8), hashes, 0, 1, ALL_ROWS)
    with pytest.raises((ValueError, TypeError)):
        _native.index_last(make_index(8), hashes, 0, 1, ALL_ROWS)


@pytest.mark.parametrize("capacity", [0, 4, 63, 128, 2**63, 2**64 - 1])
def test_a_corrupt_capacity_is_an_exception(capacity: int) -> None:
    index = Index(64)
    _native.store(index.memory, CAPACITY_OFFSET, capacity)
    for call in (
        lambda: index.apply(0, event(1, 1, 0)),
        lambda: index.lookup([digest(1)]),
        lambda: _native.index_last(index.memory, [digest(1)], 0, 1, ALL_ROWS),
        lambda: _native.index_drop_row(index.memory, 0),
    ):
        with pytest.raises(CorruptSegment):
            call()


def test_an_index_without_a_free_entry_ends_every_probe() -> None:
    index = Index(8)
    for offset in range(INDEX_HEADER_BYTES, len(index.memory), ENTRY_BYTES):
        struct.pack_into("<Q", index.memory, offset + 8, 1 << ENTRY_ROW_SHIFT)
    assert index.lookup([digest(1)]) == []
    with pytest.raises(CorruptSegment):
        index.apply(0, event(1, 1, 0))
    with pytest.raises(CorruptSegment):
        _native.index_drop_row(index.memory, 0)


def test_a_writer_that_died_leaves_hints_that_can_be_read() -> None:
    index = Index()
    index.apply(0, event(1, 5, 0))
    _native.store(index.memory, SEQUENCE_OFFSET, 3)
    assert len(index.lookup([digest(1)])) == 1
    index.apply(0, event(2, 6, 0))
    assert _native.load(index.memory, SEQUENCE_OFFSET) == 4
