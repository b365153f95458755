"""kvshm._replica.index: rows, and events and scans in any order."""

from __future__ import annotations

import pytest

from kvshm._replica.index import ApplyResult, Replica
from kvshm._shm.layout import (
    ENTRY_BYTES,
    INDEX_HEADER_BYTES,
    NUM_ROWS,
    ROW_BYTES,
    ROWS_OFFSET,
    RowState,
    pack_records,
    unpack_records,
)
from kvshm.errors import IndexFull

from .replicas import HASHES, RETRACT, found, packed, record

# -- events


def test_a_published_prefix_is_found_as_one_run(replica: Replica, row: int) -> None:
    assert replica.apply(row, packed(range(5))) == ApplyResult(added=5)
    assert replica.lookup(HASHES, 0, 100) == [(row, packed(range(5)))]
    assert replica.lookup(HASHES, 2, 4) == [(row, packed(range(2, 4)))]
    assert replica.lookup(HASHES, 5, 9) == []
    assert replica.lookup(tuple(HASHES), 2, 9) == replica.lookup(HASHES, 2, 9)
    assert replica.lookup((), 2, 9) == []


def test_an_equal_tag_is_no_more_than_a_hint(replica: Replica, row: int) -> None:
    """The index keeps 8 bytes of a hash; the record repeats the hash that was asked for, so
    that the lease can compare all 32 bytes with the slot's."""
    replica.apply(row, packed([0]))
    twin = HASHES[0][:8] + bytes(24)
    [(_, records)] = replica.lookup([twin], 0, 1)
    assert next(unpack_records(records)).block_hash == twin


def test_a_block_the_engine_does_not_have_is_refused_before_anything(replica: Replica) -> None:
    row = replica.add_row(1, "a", 10, 0)
    with pytest.raises(IndexError):
        replica.apply(row, packed([1, 10]))
    assert replica.count == 0
    with pytest.raises(ValueError, match="not a whole number"):
        replica.apply(row, packed([1])[:-1])


def test_what_is_forgotten_is_a_retract_that_was_lost(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1, 2], 5))
    replica.forget(row, 1, packed([1], 5))
    replica.forget(row, 1, packed([2], 4))
    assert replica.apply(row, packed([1], 5)) == ApplyResult(ignored=1), "nor does a replay help"
    assert (found(replica, 1), found(replica, 2)) == ([], [(row, 5)])


def test_nothing_is_forgotten_of_the_next_engine_of_a_row(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1]))
    replica.drop_row(row)
    assert replica.add_row(2, "next", 4096, 0) == row
    replica.apply(row, packed([1]))
    replica.forget(row, 1, packed([1]))
    assert found(replica, 1) == [(row, 1)]
    replica.forget(row, 2, packed([1]))
    assert found(replica, 1) == []


# -- rows


def test_rows_name_their_engines(replica: Replica) -> None:
    row = replica.add_row(77, "engine-" + "x" * 40, 100, 5)
    replica.apply(row, packed([1, 2, 3]))
    [shown] = replica.rows()
    assert shown == (row, 77, RowState.LIVE, 100, 3, 5, ("engine-" + "x" * 40)[:32])


def test_rows_and_entries_byte_for_byte(replica: Replica) -> None:
    """Another version maps this memory: what both sides of this one agree on is not enough."""
    assert replica.add_row(0x1122334455667788, "engine-7", 100, 5) == 0
    replica.apply(0, pack_records([record(3, 9, content=4)]))
    row = "88 77 66 55 44 33 22 11  01 00 00 00  64 00 00 00  01 00 00 00 00 00 00 00"
    row += "06 00 00 00  00 00 00 00"
    stored = bytes(replica.buffer[ROWS_OFFSET : ROWS_OFFSET + ROW_BYTES])
    assert stored == bytes.fromhex(row) + b"engine-7" + bytes(24)
    entries = bytes(replica.buffer[INDEX_HEADER_BYTES:])
    at = entries.index(HASHES[4][:8])
    entry = bytes.fromhex("03 00 00 01  09 00 00 00")  # row + 1 in the block's highest byte
    assert entries[at : at + ENTRY_BYTES] == HASHES[4][:8] + entry
    assert at % ENTRY_BYTES == 0


def test_lookups_without_a_mask_use_live_rows_only(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1]))
    replica.set_row_state(row, RowState.SUSPECTED)
    assert replica.rows()[0].state is RowState.SUSPECTED
    assert found(replica, 1) == []
    replica.set_row_state(row, RowState.LIVE)
    assert found(replica, 1) == [(row, 1)]


def test_dropping_a_row_leaves_the_others_and_makes_room(replica: Replica) -> None:
    a, b = replica.add_row(1, "a", 100, 0), replica.add_row(2, "b", 100, 1)
    replica.apply(a, packed(range(20), 9))
    replica.apply(b, packed(range(20), 4))
    assert replica.drop_row(a) == 20
    assert replica.drop_row(a) == 0
    assert replica.lookup(HASHES, 0, 99) == [(b, packed(range(20), 4))]
    assert [r.epoch for r in replica.rows()] == [2]


def test_a_restarted_engine_begins_with_clean_tombstones(replica: Replica) -> None:
    """The same row may be handed on: generations of the new epoch start again."""
    old = replica.add_row(1, "a", 100, 0)
    replica.apply(old, packed([1], 50, RETRACT))
    replica.drop_row(old)
    new = replica.add_row(2, "a", 100, 0)
    assert new == old
    assert replica.apply(new, packed([1], 1)).added == 1


def test_events_of_a_dropped_row_are_ignored(replica: Replica, row: int) -> None:
    replica.drop_row(row)
    assert replica.apply(row, packed([1, 2])) == ApplyResult(ignored=2)
    assert replica.count == 0


def test_an_engine_with_more_blocks_than_there_is_memory_for_is_refused(replica: Replica) -> None:
    nbytes = 16 << 50
    with pytest.raises(IndexFull, match=rf"needs {nbytes} bytes for .* of big: \d+ are available"):
        replica.add_row(2, "big", 1 << 50, 0)
    assert replica.add_row(3, "small", 8, 0) == 0, "no row was taken"


def test_more_engines_than_rows_are_refused(replica: Replica) -> None:
    for engine in range(NUM_ROWS):
        replica.add_row(engine + 1, str(engine), 8, -1)
    with pytest.raises(IndexFull, match="64 rows"):
        replica.add_row(100, "too many", 8, -1)
    assert {r.lease_bit for r in replica.rows()} == {-1}


# -- scans


def test_resync_removes_what_the_scan_did_not_see(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1, 2, 3], 5))
    before = replica.tombstones(row)
    scanned = packed([2], 5) + packed([3], 6) + packed([4], 1)
    assert replica.resync(row, before, scanned) == ApplyResult(added=2, removed=2, ignored=1)
    assert [found(replica, n) for n in (1, 2, 3, 4)] == [[], [(row, 5)], [(row, 6)], [(row, 1)]]


def test_resync_keeps_what_was_heard_during_the_scan(replica: Replica, row: int) -> None:
    """A publish that was applied after ``heard`` was taken, of a block that the scan had
    passed already, and a retract of a block that the scan had still seen."""
    replica.apply(row, packed([1, 2], 5))
    before = replica.tombstones(row)
    replica.apply(row, packed([1], 6) + packed([3], 1) + packed([2], 5, RETRACT))
    replica.resync(row, before, packed([2], 5))
    assert [found(replica, n) for n in (1, 2, 3)] == [[(row, 6)], [], [(row, 1)]]


def test_a_scan_does_not_resurrect_what_was_retracted(replica: Replica, row: int) -> None:
    scanned = packed([1], 5)
    replica.apply(row, packed([1], 5, RETRACT))
    assert replica.resync(row, b"", scanned) == ApplyResult(ignored=1)


def test_a_part_of_a_table_is_scanned_alone(replica: Replica, row: int) -> None:
    """As if the other blocks were not there: neither what a scan of another part did not see, nor
    what lies before or behind this one, is removed."""
    replica.apply(row, packed([0, 1, 2, 3, 4], 5))
    before = replica.tombstones(row, 2, 4)
    assert before == replica.tombstones(row)[2 * 16 : 4 * 16]
    assert replica.resync(row, before, packed([3], 6), 2) == ApplyResult(added=1, removed=2)
    kept = [found(replica, n) for n in (0, 1, 2, 3, 4)]
    assert kept == [[(row, 5)], [(row, 5)], [], [(row, 6)], [(row, 5)]]
    assert replica.resync(row, before, packed([1, 4], 6), 2) == ApplyResult(2, 2, 2)
    assert [found(replica, n) for n in (1, 3, 4)] == [[(row, 6)], [(row, 6)], [(row, 6)]]
