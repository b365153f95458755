"""Holds: blocks that their owner is asked to hand out last, and what it finds of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvshm import _native
from kvshm._base.ids import NO_LEASE_BIT, BlockHash, BlockId, Epoch, Generation, LeaseBit
from kvshm._shm.layout import (
    MAX_HOLD_SECONDS,
    SLOT_BYTES,
    SLOT_HELD_OFFSET,
    TABLE_HEADER_BYTES,
    BlockRecord,
    pack_records,
    unpack_records,
)
from kvshm._shm.slot_table import LEASE_SECONDS, PeerSlotTable

from ..waiting import NanosecondClock as Clock
from .served import AnyTable, again
from .test_slots import EPOCH, HASH, publish, spec_of

SECOND = 10**9


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Iterator[AnyTable]:
    table = AnyTable.create(spec_of(num_blocks=8), EPOCH, clock=clock)
    for rank in range(table.num_ranks):
        table.set_life(rank)
    yield table
    table.close()


def kept(table: AnyTable) -> set[int]:
    first = None
    for block in reversed(range(table.num_blocks)):
        first = Free(block, next_free_block=first)
    runs, _, count = table.kept_runs(Free(-1, next_free_block=first), 99, table.num_blocks)
    found = {block for first, last in runs for block in range(first.block_id, last.block_id + 1)}
    assert len(found) == count
    return found


@dataclass
class Free:
    block_id: int
    block_hash: bytes | None = None
    ref_cnt: int = 0
    next_free_block: Free | None = None


def changed(records: bytes, **fields: object) -> bytes:
    return pack_records(record._replace(**fields) for record in unpack_records(records))


# -- whom a hold reaches


def test_a_hold_is_for_blocks_that_are_what_the_record_says(table: AnyTable) -> None:
    records = publish(table, 1, 2, 3)
    assert table.hold(records[:96], 5) == 2
    assert kept(table) == {1, 2}
    for wrong in (
        changed(records, generation=Generation(7)),
        changed(records, block_hash=BlockHash(b"x" * 32)),
        changed(records, group=1),
        changed(records, block_id=BlockId(5)),  # EMPTY
        changed(records, block_id=BlockId(table.num_blocks)),  # a hint to nowhere
    ):
        assert table.hold(wrong, 5) == 0
    assert kept(table) == {1, 2}
    beyond = changed(records[:48], block_id=BlockId(table.num_blocks))
    assert table.hold(beyond + records[96:], 5) == 1
    assert kept(table) == {1, 2, 3}, "a record that does not match hides no other"


def test_nothing_is_held_that_is_being_given_up(table: AnyTable) -> None:
    records = publish(table, 1, 2)
    table.lease(LeaseBit(3), records)
    table.retract([BlockId(1)])
    assert table.hold(records, 5) == 1
    assert kept(table) == {2}, "the next dispatch waits for the lease on 1 anyway"


@pytest.mark.parametrize("end", ["retire", "end_life", "another epoch"])
def test_nothing_is_held_once_the_epoch_has_ended(table: AnyTable, end: str) -> None:
    records = publish(table, 1)
    if end == "retire":
        table.retire()
    elif end == "end_life":
        table.end_life(0)
    else:
        table.epoch = Epoch(table.epoch + 2)
    assert table.hold(records, 5) == 0
    assert not table.kept_until


def test_who_may_only_read_holds_nothing(table: AnyTable) -> None:
    records = publish(table, 1)
    frozen = memoryview(table._segment.buffer).toreadonly()
    assert _native.hold(frozen, table.epoch, records, 0, 5) == 0
    assert kept(table) == set()


@pytest.mark.parametrize("seconds", [0, -1, -math.inf, math.nan])
def test_a_hold_for_no_time_is_none(table: AnyTable, seconds: float) -> None:
    assert table.hold(publish(table, 1), seconds) == 0
    assert not table.kept_until


# -- how long


@pytest.mark.parametrize(("seconds", "lasts"), [(0.01, 1), (1, 1), (2.5, 3), (60, 60)])
def test_a_hold_lasts_as_long_as_asked_rounded_up(
    table: AnyTable, clock: Clock, seconds: float, lasts: int
) -> None:
    records = publish(table, 1)
    table.hold(records, seconds)
    clock.now += lasts * SECOND - 1
    assert kept(table) == {1}
    assert table.keeps_blocks()
    clock.now += 1
    assert kept(table) == set()
    assert not table.keeps_blocks()


def test_a_hold_that_begins_within_a_second_is_not_cut_by_it(table: AnyTable, clock: Clock) -> None:
    clock.now += SECOND // 2
    table.hold(publish(table, 1), 1)
    clock.now += SECOND - 1
    assert kept(table) == {1}
    clock.now += SECOND
    assert kept(table) == set()


@pytest.mark.parametrize("seconds", [MAX_HOLD_SECONDS, 1e9, math.inf])
def test_no_one_holds_for_more_than_an_hour(table: AnyTable, clock: Clock, seconds: float) -> None:
    clock.now += SECOND // 2
    assert table.hold(publish(table, 1), seconds) == 1
    assert kept(table) == {1}
    clock.now += MAX_HOLD_SECONDS * SECOND
    assert kept(table) == set()


def test_the_longest_hold_counts(table: AnyTable, clock: Clock) -> None:
    records = publish(table, 1)
    for seconds in (5, 20, 10):
        assert table.hold(records, seconds) == 1
    clock.now += 20 * SECOND - 1
    assert kept(table) == {1}
    assert table.keeps_blocks()
    clock.now += 1
    assert kept(table) == set()


def test_a_clock_that_is_set_back_holds_nothing_for_longer(table: AnyTable, clock: Clock) -> None:
    clock.now += 10 * MAX_HOLD_SECONDS * SECOND
    records = publish(table, 1)
    table.hold(records, 60)
    clock.now -= 5 * MAX_HOLD_SECONDS * SECOND
    assert kept(table) == set()
    table.hold(records, 60)
    assert kept(table) == {1}
    assert table.keeps_blocks()
    clock.now += 60 * SECOND
    assert kept(table) == set()
    assert not table.keeps_blocks()


@pytest.mark.parametrize("behind", [1, 10, 60, 3600], ids="{} s".format)
def test_a_hold_lasts_as_long_if_the_clock_passes_the_table_s_creation(
    table: AnyTable, clock: Clock, behind: int
) -> None:
    records = publish(table, 1)
    clock.now -= behind * SECOND
    assert table.hold(records, 60) == 1
    clock.now += 60 * SECOND - 1
    assert (kept(table), table.keeps_blocks()) == ({1}, True)
    clock.now += 1 if behind != 60 else SECOND + 1  # the end would be at 0, which is no hold
    assert (table.kept([BlockId(1)]), table.keeps_blocks()) == ([], False)


def test_a_hold_ends_though_the_clock_is_set_back_behind_the_table(
    table: AnyTable, clock: Clock
) -> None:
    """A hold for a minute would last until the clock is there again, a day for example."""
    clock.now += 30 * SECOND
    records = publish(table, 1, 2)
    table.hold(records[:48], 60)
    clock.now -= 86_400 * SECOND
    assert kept(table) == set()
    assert table.age_seconds == 0
    assert table.hold(records[48:], 20) == 1
    clock.now += 20 * SECOND - 1
    assert (kept(table), table.keeps_blocks()) == ({2}, True)
    clock.now += 1
    assert table.kept([BlockId(2)]) == []
    assert not table.keeps_blocks()


def test_a_table_of_the_future_or_of_no_time_at_all_holds_as_well(
    table: AnyTable, clock: Clock
) -> None:
    records = publish(table, 1)
    for created in (2**64 - 1, 0):
        table.created_ns = created
        assert table.hold(records, 1) == 1
        assert kept(table) == {1}


# -- what ends it


def test_what_is_published_next_is_not_held(table: AnyTable) -> None:
    table.hold(publish(table, 1), 60)
    table.retract([BlockId(1)])
    assert kept(table) == set()
    publish(table, 1)
    assert kept(table) == set()
    assert table.slot(BlockId(1)).held_until == 0


def test_a_reset_ends_all_holds(table: AnyTable) -> None:
    table.hold(publish(table, 1, 2), 60)
    table.reset()
    assert kept(table) == set()


# -- what the owner finds without looking at slots


def test_a_table_says_whether_it_keeps_anything(table: AnyTable, clock: Clock) -> None:
    assert not table.keeps_blocks()
    records = publish(table, 1)
    assert table.hold(changed(records, generation=Generation(3)), 60) == 0
    assert not table.kept_until, "nothing was held"
    table.hold(records, 7)
    assert table.keeps_blocks()
    clock.now += 7 * SECOND
    assert table.kept_until
    assert not table.keeps_blocks()
    assert not table.kept_until, "from now on one word says it all"
    table.hold(records, 1)
    assert table.keeps_blocks()


def test_a_lease_says_that_there_may_be_leases(
    table: AnyTable, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = publish(table, 1, 2)
    table.lease(NO_LEASE_BIT, records)
    table.lease(LeaseBit(3), b"")
    assert not table.kept_until
    lease, said = _native.lease, list[bool]()

    def watched(*arguments: Any) -> Any:
        said.append(table.keeps_blocks())
        return lease(*arguments)

    monkeypatch.setattr(_native, "lease", watched)
    table.lease(LeaseBit(3), records[:48])
    assert said == [True], "before the first lease is there"
    assert table.keeps_blocks()
    assert kept(table) == {1}
    table.release(LeaseBit(3), records[:48])
    assert kept(table) == set()
    clock.now += LEASE_SECONDS * SECOND
    assert not table.keeps_blocks()


def test_kept_blocks_are_those_whose_slots_say_so(table: AnyTable, clock: Clock) -> None:
    records = publish(table, 1, 2, 3, 4)
    in_group = publish(table, 5, group=65535)
    for held, seconds in ((records[:48], 5), (in_group, 9)):
        assert table.hold(held, seconds) == 1
    table.lease(LeaseBit(3), records[48:144])
    table.retract([BlockId(3)])
    every = [BlockId(block) for block in range(table.num_blocks)]
    assert table.kept(every) == [1, 2, 3, 5], "also a retracted one that is still being read"
    clock.now += 5 * SECOND
    assert table.kept(every[::-1]) == [5, 3, 2]
    with pytest.raises(IndexError):
        table.kept([BlockId(table.num_blocks)])


def test_a_lease_cuts_no_hold_short(table: AnyTable, clock: Clock) -> None:
    records = publish(table, 1)
    table.hold(records, 60)
    table.lease(LeaseBit(3), records)
    table.release(LeaseBit(3), records)
    clock.now += 59 * SECOND
    assert table.keeps_blocks()
    assert kept(table) == {1}


def test_a_hold_of_another_mapping_is_seen_at_once(table: AnyTable, clock: Clock) -> None:
    records = publish(table, 4)
    other = again(table, PeerSlotTable)
    other._clock = clock
    assert other.hold(records, 3) == 1
    other.close()
    assert kept(table) == {4}
    (until,) = struct.unpack_from(
        "<I", table._segment.buffer, TABLE_HEADER_BYTES + 4 * SLOT_BYTES + SLOT_HELD_OFFSET
    )
    assert until == 3 == table.slot(BlockId(4)).held_until


# -- the walk along a queue


class Slotted:
    __slots__ = ("_block_hash", "block_id", "next_free_block", "ref_cnt")
    _block_hash: object

    @property
    def block_hash(self) -> object:
        return self._block_hash


def queue(ids: list[int], kind: type = Slotted) -> list[object]:
    """A head, the blocks, and a tail behind which there is nothing."""
    made = []
    for block_id in (-1, *ids, -1):
        block = kind.__new__(kind)
        block.block_id, block.next_free_block = block_id, None
        if made:
            made[-1].next_free_block = block
        made.append(block)
    return made


@pytest.mark.parametrize("kind", [Slotted, Free])
@pytest.mark.parametrize(
    ("wanted", "most", "runs", "others"),
    [
        (1, 8, [], 1),
        (2, 8, [(2, 3)], 2),
        (3, 8, [(2, 3), (5, 5)], 3),
        (4, 8, [(2, 3), (5, 5), (7, 7)], 3),
        (2, 3, [(2, 3)], 1),
        (2, 2, [(2, 2)], 1),
        (0, 8, [], 0),
    ],
)
def test_a_walk_ends_where_enough_others_were_found(
    table: AnyTable, kind: type, wanted: int, most: int, runs: list[tuple[int, int]], others: int
) -> None:
    table.hold(publish(table, 2, 3, 5, 7), 5)
    blocks = queue([1, 2, 3, 4, 5, 6, 7], kind)
    most = min(most, 7)
    found, idle, kept = table.kept_runs(blocks[0], wanted, most)
    assert [(first.block_id, last.block_id) for first, last in found] == runs
    assert idle == others
    assert kept == sum(last - first + 1 for first, last in runs)
    assert all(first in blocks and last in blocks for first, last in found)


def test_a_long_queue_is_walked_to_its_end() -> None:
    table = AnyTable.create(spec_of(num_blocks=3000), EPOCH)
    table.set_life(0)
    table.set_life(1)
    held = [block for block in range(3000) if block % 7 and block != 2999]
    records = pack_records(BlockRecord(HASH, BlockId(b), Generation(0), 0) for b in held)
    table.hold(table.publish(records, bytes(8 * len(held))), 60)
    blocks = queue(list(range(3000)))
    found, idle, kept = table.kept_runs(blocks[0], 2000, 3000)
    assert idle == 3000 - len(held)
    assert kept == len(held)
    assert len(found) == 429
    table.close()


def test_a_queue_that_is_not_what_it_says_is_refused(table: AnyTable) -> None:
    for ids, error in (([1, 2], IndexError), ([1, table.num_blocks, 2], IndexError)):
        with pytest.raises(error):
            table.kept_runs(queue(ids)[0], 3, 3)
    with pytest.raises(AttributeError):
        table.kept_runs(queue([])[1], 1, 1)
