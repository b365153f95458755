"""What a keeper knows and decides, without a node."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvshm import BlockName, Change, News
from kvshm._base.ids import BlockId
from kvshm.tools.keeper.admission import Known, Waiting, is_admitted
from kvshm.tools.keeper.catalogue import Catalogue, Use
from kvshm.tools.keeper.pace import LEAST_BLOCK_BYTES, Pace
from kvshm.tools.keeper.room import Room
from kvshm.tools.keeper.staging import STAGED_BYTES, Staging, value_bytes
from kvshm.tools.keeper.store import StoreError
from kvshm.tools.options import parse_size

A, B, KEEPER = 1, 2, 9


def name(number: int, group: int = 0) -> BlockName:
    return BlockName(number.to_bytes(32, "little"), group)


def put(block: int, generation: int, number: int) -> Change:
    return Change(BlockId(block), generation, name(number), 0)


def gone(block: int, generation: int) -> Change:
    return Change(BlockId(block), generation, None)


def hear(catalogue: Catalogue, epoch: int, *changes: Change, left: bool = False) -> list[BlockName]:
    return [use.name for use in catalogue.hear(News(epoch, changes, left), {KEEPER})]


# -- the catalogue


def test_each_publication_is_a_use_but_those_of_keepers_and_what_is_heard_twice() -> None:
    catalogue = Catalogue()
    assert list(catalogue.hear(News(A, (put(0, 0, 5),)), {KEEPER})) == [Use(name(5), 0)]
    assert hear(catalogue, A, put(0, 0, 5)) == []  # as a scan repeats it
    assert hear(catalogue, KEEPER, put(3, 0, 5)) == []
    assert hear(catalogue, B, put(7, 2, 5)) == [name(5)]
    assert hear(catalogue, A, gone(0, 0), put(0, 1, 5)) == [name(5)]
    assert catalogue.uses(name(5)) == 3
    assert sorted(catalogue.holders(name(5))) == [A, B, KEEPER]


def test_an_old_event_changes_nothing() -> None:
    catalogue = Catalogue()
    hear(catalogue, A, put(0, 4, 5))
    assert hear(catalogue, A, gone(0, 3), put(0, 2, 6)) == []
    assert list(catalogue.holders(name(5))) == [A]


def test_one_of_two_copies_in_an_engine_may_go() -> None:
    catalogue = Catalogue()
    hear(catalogue, A, put(0, 0, 5), put(1, 0, 5))
    hear(catalogue, A, gone(1, 0))
    assert list(catalogue.holders(name(5))) == [A]
    hear(catalogue, A, put(0, 1, 6))  # the retract was lost
    assert list(catalogue.holders(name(5))) == []
    assert len(catalogue) == 1


@pytest.mark.parametrize("own", [False, True], ids=["it leaves", "an own epoch begins"])
def test_what_an_engine_had_goes_with_it_and_uses_are_remembered(own: bool) -> None:
    catalogue = Catalogue()
    hear(catalogue, A, put(0, 0, 5))
    hear(catalogue, 0 if own else A, left=not own)
    assert (len(catalogue), catalogue.uses(name(5))) == (0, 1)
    assert hear(catalogue, B, put(0, 0, 5)) == [name(5)]
    assert catalogue.uses(name(5)) == 2


def test_only_so_many_uses_are_remembered_the_latest() -> None:
    catalogue = Catalogue(max_remembered=2)
    hear(catalogue, A, put(0, 0, 1), put(1, 0, 2), put(2, 0, 3))
    assert [catalogue.uses(name(number)) for number in (1, 2, 3)] == [0, 1, 1]


# -- admission


@pytest.mark.parametrize(
    ("known", "room", "admitted"),
    [
        (Known(uses=1, kept=False), True, True),
        (Known(uses=1, kept=False), False, False),
        (Known(uses=2, kept=False), False, True),
        (Known(uses=9, kept=False, there=False), True, False),
    ],
)
def test_what_is_admitted(known: Known, room: bool, admitted: bool) -> None:
    assert is_admitted(known, room) is admitted


def test_blocks_are_taken_in_order_once_each_and_when_it_is_their_time() -> None:
    waiting = Waiting()
    for at, number in enumerate((1, 2, 1, 3)):
        waiting.add(name(number), at)

    def unknown(_: BlockName) -> Known:
        return Known(1, kept=False)

    assert list(waiting.take(9, 9, unknown, before=2)) == [name(1), name(2)]
    assert list(waiting.take(9, 9, unknown, before=2.5)) == []
    assert list(waiting.take(9, 0, unknown, before=3)) == []  # and let go
    assert len(waiting) == 0


def test_what_has_gone_again_takes_no_turn() -> None:
    waiting = Waiting()
    for number in range(100):
        waiting.add(name(number), 0)
    there = name(99)
    found = waiting.take(1, 9, lambda block: Known(1, kept=False, there=block == there), before=0)
    assert list(found) == [there]
    assert not waiting.let_go


def test_what_is_let_go_for_lack_of_room_is_told() -> None:
    for few, kept, told in ((9, False, True), (9, True, False), (1, True, True)):
        waiting = Waiting(few)
        for number in (1, 2):
            waiting.add(name(number), 0)
        list(waiting.take(9, 0, lambda _, kept=kept: Known(1, kept), before=0))
        assert waiting.let_go is told


def test_the_room_that_is_left_counts_down() -> None:
    waiting = Waiting()
    uses = {1: 1, 2: 1, 3: 2, 4: 1}
    for number in uses:
        waiting.add(name(number), 0)

    def known(block: BlockName) -> Known:
        return Known(uses[block.key[0]], kept=False)

    assert list(waiting.take(3, 1, known, before=0)) == [name(1), name(3)]


# -- pace


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 10**8)), max_size=60))
def test_no_more_is_copied_than_the_rate_and_one_moment_allow(
    steps: list[tuple[float, int]],
) -> None:
    rate, now, copied, largest = 1 << 30, 0.0, 0, 0
    pace = Pace(rate, now)
    for pause, size in steps:
        now += pause
        blocks = pace.blocks(size, now)
        pace.copied(blocks, size)
        copied += blocks * max(size, LEAST_BLOCK_BYTES)
        largest = max(largest, size)
        assert copied <= rate * (now + 0.05) + largest


def test_a_block_larger_than_a_moment_is_copied_in_its_time() -> None:
    pace, size = Pace(1 << 20, 0.0), 10 << 20
    took = [at for at in range(100) if pace.blocks(size, at) and not pace.copied(1, size)]
    assert took[:3] == [1, 11, 21]


# -- room

steps = st.lists(
    st.tuples(st.sampled_from(["take", "take", "leave", "move"]), st.sampled_from([1, 2, 3])),
    max_size=60,
)
STRIDES = {1: 1, 2: 3, 3: 7}
MEMORY = 40


def idle_slabs(room: Room) -> list[int]:
    """Slabs of a shelf that has no block there."""
    owned = [(slab, room._grids[o]) for slab, o in enumerate(room._owners) if o is not None]
    return [
        slab
        for slab, grid in owned
        if not {*room._touching(grid, (slab,))} & {*grid.free, *grid.used}
    ]


@given(steps, st.sampled_from([1, 8, 40]))
def test_no_byte_is_in_two_blocks_and_all_memory_can_be_used(
    steps: list[tuple[str, int]], num_slabs: int
) -> None:
    room, used = Room(MEMORY, 1, num_slabs), set[tuple[int, int]]()
    for shelf, stride in STRIDES.items():
        room.open(shelf, stride)
    for step, shelf in steps:
        own = sorted(block for number, block in used if number == shelf)
        if step == "take":
            spare = room.spare(shelf)
            room.give_up(shelf, room.idle(shelf))
            assert room.spare(shelf) == spare
            assert room.can_take(shelf) == (spare > 0)
            block = room.take(shelf)
            assert (block is not None) == (spare > 0)
            if block is not None:
                assert (block + 1) * STRIDES[shelf] <= MEMORY
                assert room.spare(shelf) == spare - 1
                used.add((shelf, block))
        elif step == "leave" and own:
            room.leave(shelf, own[0])
            used.remove((shelf, own[0]))
        elif step == "move" and (others := sorted(each for each in used if each[0] != shelf)):
            owner, block = others[len(used) * 7 % len(others)]
            at = block * STRIDES[owner]
            slabs = room.window(shelf, at)
            gone = room.in_the_way(shelf, slabs)
            is_last = at >= MEMORY // STRIDES[shelf] * STRIDES[shelf]
            assert is_last or block in gone[owner]
            for number, blocks in gone.items():
                for each in blocks:
                    room.leave(number, each)
                    used.remove((number, each))
            room.give_up(shelf, slabs)
            assert room.spare(shelf) > 0 or is_last
        assert not idle_slabs(room)  # which nobody could use any more
        at = [b * STRIDES[n] + byte for n, b in used for byte in range(STRIDES[n])]
        assert len(at) == len({*at})


@pytest.mark.parametrize("stride", [1, 3, 7, 40])
def test_one_shelf_can_use_all_memory_and_another_one_after_it(stride: int) -> None:
    room = Room(MEMORY, 1, 8)
    for shelf in (1, 2):
        room.open(shelf, stride)
        assert room.spare(shelf) == MEMORY // stride
        blocks = [room.take(shelf) for _ in range(MEMORY // stride)]
        assert sorted(blocks) == list(range(MEMORY // stride))
        assert room.take(shelf) is None
        room.close(shelf)


def test_a_slab_that_a_shelf_does_not_use_counts_as_room_and_can_be_had() -> None:
    room = Room(MEMORY, 1, 8)  # slabs of 5
    room.open(1, 5)
    room.open(2, 10)
    assert [room.take(1) for _ in range(8)] == [*range(8)]
    for block in (0, 1, 3):
        room.leave(1, block)
    assert room.idle(2) == [0, 1, 3]
    assert list(room.owners(2, [0, 1, 3])) == [1]
    assert (room.spare(2), room.can_take(2)) == (1, False)
    room.give_up(2, room.idle(2))
    assert (room.take(2), room.take(2)) == (0, None)
    assert room.idle(1) == []


def test_what_gives_way_counts_as_room_and_slabs_apart_do_not() -> None:
    room = Room(MEMORY, 1, 8)  # slabs of 5
    room.open(1, 5)
    room.open(2, 10)
    assert [room.take(1) for _ in range(8)] == [*range(8)]
    assert (room.spare(2), room.spare(2, giving_way=[1])) == (0, 4)
    for block in (1, 4, 6):
        room.leave(1, block)
        room.give_up(2, [block])
    assert room.spare(2) == 0
    room.leave(1, 5)
    room.give_up(2, [5])
    assert room.spare(2) == 1
    assert room.take(2) == 2


# -- the command line


def test_sizes() -> None:
    given = ("8G", "512m", "7", "3 GiB".replace(" ", ""), "2KB", " 1T ")
    assert [parse_size(text) for text in given] == [8 << 30, 512 << 20, 7, 3 << 30, 2048, 1 << 40]
    for wrong in ("", "0", "G", "-1G", "1.5G", "8 G", "8P"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size like 8G"):
            parse_size(wrong)


class _Lender:
    """Of a store: what lends memory."""

    def __init__(self, most: int) -> None:
        self._most = most

    def buffer(self, nbytes: int) -> memoryview:
        if nbytes > self._most:
            raise StoreError("no memory")
        return memoryview(bytearray(nbytes))


def test_what_a_store_is_given_has_room_for_a_block_of_any_size() -> None:
    large: Any = SimpleNamespace(layout=SimpleNamespace(block_bytes=((STAGED_BYTES, 1),)))
    lender: Any = _Lender(2 * STAGED_BYTES)
    staging = Staging(lender)
    assert staging.values(large) == 1
    assert len(staging.value(large, 0)) == value_bytes(large) > STAGED_BYTES
    lender = _Lender(STAGED_BYTES)
    assert Staging(lender).values(large) == 0
