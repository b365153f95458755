"""Free blocks that another engine has, too, are handed out first, in vLLM's order among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")


from kvshm._base.ids import BlockId, Epoch, Generation, Rank
from kvshm._node.peers import QUARANTINE_FAILURES
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.statistics import DUPLICATES_LOST, DUPLICATES_REUSED, LAST_COPIES_REUSED
from kvshm.config import Auto

from ..unit.served import ServedNode
from .pool_life import BIT, NUM_BLOCKS, digest, filled, served_pool


@pytest.fixture
def served() -> Iterator[ServedNode]:
    with served_pool() as node:
        yield node


def test_without_other_engines_nothing_moves(served: ServedNode) -> None:
    life, queue = filled(served)
    assert not life.order.may_change()
    assert life.take(7) == queue[:7]


def test_duplicates_are_taken_first_in_vllms_order(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    twice = [queue[i] for i in (3, 4, 17, 50)]
    for place, block in enumerate(twice):
        life.copy(place % 2, life.contents[block])
    assert life.take(3) == twice[:3]
    rest = [block for block in queue if block not in twice]
    assert life.take(3) == [twice[3], *rest[:2]]
    assert life.count(DUPLICATES_REUSED) == 4
    assert life.queue() == rest[2:]


def test_switched_off_nothing_moves(served: ServedNode) -> None:
    life, queue = filled(served, duplicates_first=False)
    life.join()
    life.copy(0, life.contents[queue[5]])
    assert not life.order.may_change()
    assert life.take(3) == queue[:3]


@pytest.mark.parametrize("gone", ["retracted", "reused", "ended", "dead"])
def test_what_another_engine_has_no_more_is_no_duplicate(served: ServedNode, gone: str) -> None:
    """Though this one has not heard of it."""
    life, queue = filled(served)
    life.join()
    life.copy(0, life.contents[queue[9]])
    other = life.others[0].table
    if gone == "ended":
        other.retire()
    elif gone == "dead":
        other.end_life(Rank(0))
    else:
        other.retract([BlockId(0)])
    if gone == "reused":
        record = BlockRecord(digest(7), BlockId(0), Generation(0), 0)
        other.publish(pack_records([record]), bytes(8))
    assert life.take(2) == queue[:2]
    assert life.count(DUPLICATES_REUSED) == 0


def test_the_same_hash_in_another_group_is_no_duplicate(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    number = life.contents[queue[9]]
    record = BlockRecord(digest(number), BlockId(0), Generation(0), 0, group=1)
    event = life.others[0].table.publish(pack_records([record]), bytes(8))
    life.peers.apply_events([(life.others[0].info.epoch, event)])
    assert life.take(1) == queue[:1]


def test_a_leased_duplicate_is_not_taken_first(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    life.copy(0, life.contents[queue[9]])
    record = BlockRecord(digest(life.contents[queue[9]]), BlockId(queue[9]), Generation(0), 0)
    assert life.table.lease(BIT, pack_records([record]))[0] == 1
    assert life.take(1) == queue[:1]


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"min_prefix_tokens": 33}, slice(2, None)),
        ({"max_import_blocks": 3}, slice(0, 3)),
        ({"min_prefix_tokens": Auto.AUTO}, slice(0)),  # not known: 256 tokens
    ],
    ids=str,
)
def test_what_a_setting_lets_nobody_import_again_is_no_duplicate(
    served: ServedNode, settings: dict[str, Any], first: slice
) -> None:
    life, queue = filled(served, **settings)
    life.join()
    chain = life.prefix(1, 2, 3, 4, 5)
    for number in (1, 2, 3, 4, 5):
        life.copy(0, number)
    goes = chain[first][::-1]
    assert life.take(5) == [*goes, *queue[5 : 10 - len(goes)]]


def test_what_is_computed_sooner_than_imported_is_no_duplicate(served: ServedNode) -> None:
    life, queue = filled(served, min_prefix_tokens=Auto.AUTO)
    life.join()
    costs = life.cache.planner.costs
    for _ in range(20):
        costs.add_step(256, 0.25)
        costs.add_step(2048, 2.0)
        costs.add_load(32 * 1024, 0.040)  # as long as computing 41 tokens: 2.6 blocks
    chain = life.prefix(1, 2, 3, 4, 5)
    life.hit(chain)
    life.now += 100
    for number in (1, 2, 3, 4, 5):
        life.copy(0, number)
    assert life.take(3) == [chain[4], chain[3], queue[5]]


def test_an_allocation_of_all_free_blocks_is_counted(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    for block in queue[5:9]:
        life.copy(0, life.contents[block])
    assert set(life.take(len(queue))) == set(queue)
    assert life.count(DUPLICATES_REUSED) == 4
    assert life.count(LAST_COPIES_REUSED) == len(queue) - 4


def test_an_engine_that_does_not_import_takes_none_first(served: ServedNode) -> None:
    life, queue = filled(served, role="producer")
    life.join()
    life.copy(0, life.contents[queue[9]])
    assert life.take(2) == queue[:2]


def test_blocks_without_contents_are_taken_before_duplicates(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    life.copy(0, life.contents[queue[9]])
    life.take_for_tokens(3)  # of which the first is the duplicate
    life.copy(0, life.contents[queue[11]])
    blank = [block.block_id for block in life.used]
    life.free_all()
    assert set(life.take(3)) == set(blank)
    assert life.take(2) == [queue[11], queue[2]]


def test_a_duplicate_stays_with_what_is_behind_it(served: ServedNode) -> None:
    """A last copy that was used is of no use without the blocks before it."""
    life, queue = filled(served)
    life.join()
    a, b, c, d = life.prefix(1, 2, 3, 4)
    life.hit([a, b, c, d])
    for number in (1, 2, 3):
        life.copy(0, number)
    assert life.take(4) == queue[4:8]
    life.copy(1, 4)  # now all have a copy, and go from the last to the first
    assert life.take(5) == [d, c, b, a, queue[8]]


def test_a_duplicate_stays_if_what_is_behind_it_has_become_a_last_copy(served: ServedNode) -> None:
    """Found in one walk, and the other engine drops the last one before they are taken."""
    life, queue = filled(served)
    life.join()
    chain = life.prefix(1, 2, 3, 4)
    life.hit(chain)
    life.copy(0, life.contents[queue[8]])
    for number in (1, 2, 3, 4):
        life.copy(0, number)
    assert life.take(1) == [queue[8]]
    life.drop(0, 4)
    assert life.take(3) == queue[4:7]


def test_what_cannot_be_imported_now_is_no_duplicate(served: ServedNode) -> None:
    """Loads from the other engine keep failing."""
    life, queue = filled(served)
    life.join()
    life.copy(0, life.contents[queue[9]])
    for _ in range(QUARANTINE_FAILURES):
        life.peers.load_failed(Epoch(life.others[0].info.epoch))
    assert life.take(1) == queue[:1]


def test_a_block_that_lost_its_hash_unnoticed_breaks_no_queue(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    for block in (queue[0], queue[5]):
        life.copy(0, life.contents[block])
    life.pool.blocks[queue[0]].reset_hash()
    assert life.take(2) == [queue[0], queue[5]]  # blocks without contents come first
    assert life.queue() == [*queue[1:5], *queue[6:]]


def test_a_last_copy_that_nobody_used_again_keeps_nothing(served: ServedNode) -> None:
    life, _ = filled(served)
    life.join()
    a, b, _ = life.prefix(1, 2, 3)
    life.hit([a, b])
    life.copy(0, 1)
    life.copy(1, 2)
    assert life.take(2) == [b, a]


def test_a_duplicate_stays_with_any_branch_behind_it(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    stem, branch = life.prefix(1, 2)
    life.hit([stem, branch])
    other = life.take_for_tokens(1)
    life.fill(life.used.pop(), 3, parent=1)
    life.pool.free_blocks([life.pool.blocks[other[0]]])
    life.hit([stem, *other])
    life.copy(0, 1)
    life.copy(0, 3)
    assert life.take(2) == [*other, queue[3]]


def test_what_is_no_duplicate_any_more_goes_when_vllm_would_take_it(served: ServedNode) -> None:
    """Found in the same walk as the first, but the other engine drops it before."""
    life, queue = filled(served)
    life.join()
    for place in (5, 40):
        life.copy(0, life.contents[queue[place]])
    assert life.take(1) == [queue[5]]
    life.drop(0, life.contents[queue[40]])
    rest = [block for block in queue if block != queue[5]]
    assert life.take(len(rest)) == rest


def test_last_copies_that_two_engines_drop_at_once_are_counted(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    for block in queue[5:7]:
        life.copy(0, life.contents[block])
    life.order.change(3)
    taken = [block.block_id for block in life.pool.get_new_blocks(3)]
    assert taken == [*queue[5:7], queue[0]]
    life.drop(0, life.contents[queue[6]])
    life.order.changed()
    assert life.count(DUPLICATES_LOST) == 1
    assert (life.count(DUPLICATES_REUSED), life.count(LAST_COPIES_REUSED)) == (2, 1)
    life.order.changed()
    assert life.count(DUPLICATES_LOST) == 1


def test_any_life_takes_duplicates_before_last_copies(served: ServedNode) -> None:
    life, _ = filled(served, seed=5)
    life.join()
    for _ in range(300):
        before = life.queue()
        many = life.chance.randint(1, 12)
        if len(before) > many:
            twice = [
                block
                for block in before
                if any(life.contents.get(block) in theirs for theirs in life.theirs)
            ]
            rest = [block for block in before if block not in twice]
            taken = life.take(many)
            first = min(many, len(twice))
            assert set(taken[:first]) <= set(twice)
            assert taken[first:] == rest[: many - first]
        for block in life.chance.sample(sorted(life.contents), min(3, len(life.contents))):
            other = life.chance.randrange(2)
            if (
                len(life.theirs[other]) < NUM_BLOCKS
                and life.contents[block] not in life.theirs[other]
            ):
                life.copy(other, life.contents[block])
        life.chance.shuffle(life.used)
        if life.chance.random() < 0.6:
            life.free_all()
