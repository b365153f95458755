"""In which order duplicates are found: by age, in parts of a long queue, at little cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")


from kvshm._shm.statistics import DUPLICATES_REUSED, LAST_COPIES_REUSED
from kvshm.hooks.vllm.exports import duplicates

from ..unit.served import ServedNode
from .pool_life import NUM_BLOCKS, Life, filled, served_pool


@pytest.fixture
def served() -> Iterator[ServedNode]:
    with served_pool() as node:
        yield node


def test_behind_a_duplicate_that_was_used_lately_older_ones_are_found(served: ServedNode) -> None:
    """A long answer has kept them from the queue."""
    life, queue = filled(served)
    life.join()
    for block in queue:
        life.now += 1
        life.hit([block])
    costs = life.cache.planner.costs
    for _ in range(20):
        costs.add_step(256, 0.25)
        costs.add_step(2048, 2.0)
        costs.add_load(256 // 16 * 1024, 0.125)
    old, young = queue[20:23], queue[58]
    answer = [life.pool.blocks[block] for block in old]
    life.pool.touch(answer)
    for block in (*old, young):
        life.copy(0, life.contents[block])
    life.now += 100
    life.hit([young])
    life.pool.free_blocks(answer)
    assert life.take(4) == [*old, queue[0]]


@pytest.mark.parametrize(("import_ratio", "places"), [(0.5, [30, 0]), (0.1, [30, 50]), (2, [0, 1])])
def test_what_was_used_last_stays_by_what_an_import_costs(
    served: ServedNode, import_ratio: float, places: list[int]
) -> None:
    life, queue = filled(served)
    life.join()
    for block in queue:  # a second apart, in the order in which they were
        life.now += 1
        life.hit([block])
    assert life.queue() == queue
    costs = life.cache.planner.costs
    for _ in range(20):
        costs.add_step(256, 0.25)
        costs.add_step(2048, 2.0)
        costs.add_load(256 // 16 * 1024, 0.25 * import_ratio)
    for place in (30, 50, 58):
        life.copy(0, life.contents[queue[place]])
    assert life.take(2) == [queue[place] for place in places]


def test_in_place_of_a_duplicate_that_was_used_meanwhile_the_next_one_is_taken(
    served: ServedNode,
) -> None:
    life, queue = filled(served)
    life.join()
    for place in (3, 5, 7, 9, 11):
        life.copy(0, life.contents[queue[place]])
    assert life.take(1) == [queue[3]]  # the walk has found the others, too
    life.hit([queue[5]])
    assert life.take(3) == [queue[place] for place in (7, 9, 11)]


def test_what_was_used_meanwhile_is_not_the_one_that_has_rested_longest(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    for place in (5, 40, 41):
        life.copy(0, life.contents[queue[place]])
    assert life.take(1) == [queue[5]]
    life.hit([queue[40]])
    assert life.take(2) == [queue[41], queue[40]]  # but goes before last copies
    assert life.take(2) == queue[:2]


def test_a_queue_is_walked_in_parts(served: ServedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "MOST_WALKED", 20)
    life, queue = filled(served)
    life.join()
    last = queue[-1]
    life.copy(0, life.contents[last])
    taken = [life.take(1)[0] for _ in range(4)]
    assert taken == [*queue[:2], last, queue[2]]


def test_more_blocks_are_wanted_than_there_are_duplicates(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each walk of a second round finds what the first has found."""
    monkeypatch.setattr(duplicates, "AHEAD", 4)
    life, queue = filled(served)
    life.join()
    for block in queue[20:32]:
        life.copy(0, life.contents[block])
    assert life.take(20) == [*queue[20:32], *queue[:8]]


@pytest.mark.parametrize("used", [False, True], ids=["handed out", "used"])
def test_far_from_the_queues_head_a_walk_goes_on_where_the_last_one_ended(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    """Though it ended at a duplicate, which has gone or is used again."""
    monkeypatch.setattr(duplicates, "MOST_WALKED", 6)
    monkeypatch.setattr(duplicates, "AHEAD", 2)
    life, queue = filled(served)
    life.join()
    twice = queue[31:50]
    for block in twice:
        life.copy(0, life.contents[block])
    life.pause = 0.001
    while (taken := life.take(1)) != twice[:1]:  # the first walks only get there
        assert taken[0] in queue[:31]
    if used:
        life.hit([twice.pop(1)])
    else:
        assert life.take(1) == [twice.pop(1)]
    assert life.take(8) == twice[1:9]


def test_for_an_allocation_not_many_more_blocks_are_looked_at_than_it_wants(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each walk finds some."""
    monkeypatch.setattr(duplicates, "MOST_WALKED", 8)
    monkeypatch.setattr(duplicates, "AHEAD", 2)
    life, queue = filled(served)
    life.join()
    twice = queue[3::4]
    for block in twice:
        life.copy(0, life.contents[block])
    walk, walked = life.order._duplicates._search.walk, []  # type: ignore[union-attr]

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = walk(*args, **kwargs)
        walked.append(result.blocks)
        return result

    monkeypatch.setattr(life.order._duplicates._search, "walk", counted)  # type: ignore[union-attr]
    assert set(twice[:4]) < set(life.take(12))
    assert len(walked) > 1
    assert sum(walked) <= 8 + 12


def test_behind_many_duplicates_an_allocation_goes_in_vllms_order(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "MOST_CHOSEN", 3)
    life, queue = filled(served)
    life.join()
    for block in queue[20:30]:
        life.copy(0, life.contents[block])
    assert life.take(5) == [*queue[20:23], *queue[:2]]
    assert life.take(5) == [*queue[23:26], *queue[2:4]]


def test_what_rests_longest_goes_first_though_it_was_no_duplicate_when_others_were_found(
    served: ServedNode,
) -> None:
    life, queue = filled(served)
    life.join()
    for place in (20, 30, 40):
        life.copy(0, life.contents[queue[place]])
    assert life.take(1) == [queue[20]]
    for place in (2, 4):
        life.copy(0, life.contents[queue[place]])
    assert life.take(3) == [queue[place] for place in (2, 4, 30)]


def test_last_copies_that_nobody_wants_any_more_go_before_what_is_wanted_all_the_time(
    served: ServedNode,
) -> None:
    """Old ones that are first in the queue, and duplicates that are hit once in a while."""
    life, queue = filled(served)
    life.join()
    costs = life.cache.planner.costs
    for _ in range(20):
        costs.add_step(256, 0.25)
        costs.add_step(2048, 2.0)
        costs.add_load(256 // 16 * 1024, 0.025)
    old, wanted = queue[:40], queue[40:]
    life.hit(old[::-1])
    life.now += 100
    for block in wanted:
        life.hit([block])
        life.copy(0, life.contents[block])
    life.now += 9
    assert life.take(2) == old[:2]
    life.now += 3  # more than a tenth as long ago
    assert life.take(2) == wanted[:2]


def test_walks_that_find_little_take_a_hundredth_of_the_time(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    life.take(1)
    life.copy(0, life.contents[queue[20]])
    life.pause = 0.6 * max(duplicates.REST_SECONDS * len(queue), duplicates.LEAST_REST_SECONDS)
    assert life.take(1) == [queue[1]]
    assert life.take(1) == [queue[20]]


def test_what_a_block_held_when_it_was_found_is_not_what_it_holds_after_a_reset(
    served: ServedNode,
) -> None:
    life, queue = filled(served)
    life.join()
    for place in range(40, 50):
        life.copy(0, life.contents[queue[place]])
    assert life.take(1) == [queue[40]]  # the others are found, too
    life.free_all()
    assert life.pool.reset_prefix_cache()
    rest = life.take(len(life.queue()))
    life.free_all()
    for block in (*rest[:3], *queue[41:50]):
        life.copy(1, life.contents[block])
    assert life.take(3) == rest[:3]


@pytest.mark.parametrize("seed", range(8))
def test_any_life_keeps_the_queue_whole(
    served: ServedNode, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Walks end anywhere; blocks are used, dropped elsewhere and lose their hashes meanwhile."""
    drawn = random.Random(seed)
    for name, most in (("AHEAD", 20), ("MOST_WALKED", 40), ("MOST_CHOSEN", 9), ("MOST_ASKED", 4)):
        monkeypatch.setattr(duplicates, name, drawn.randint(1, most))
    life, _ = filled(served, seed=seed)
    life.join()
    life.pause = drawn.choice((1e-4, 1.0))
    for _ in range(400):
        free, counted = life.queue(), chosen(life)
        if free:
            many = min(len(free), drawn.choice((1, 2, 3, drawn.randint(1, 20))))
            hashed = [life.pool.blocks[block].block_hash is not None for block in free]
            first = hashed.index(True) if any(hashed) else len(free)
            taken = life.take(many)
            left = life.queue()
            assert sorted(taken + left) == sorted(free)
            assert left == [block for block in free if block not in set(taken)], "vLLM's order"
            if life.order.may_change():
                assert chosen(life) - counted == max(0, many - first)
        for _ in range(drawn.randint(1, 6)):
            go_on(life, drawn)


def chosen(life: Life) -> int:
    """Blocks that were handed out while there were other engines, behind the first with a hash."""
    return life.count(DUPLICATES_REUSED) + life.count(LAST_COPIES_REUSED)


def go_on(life: Life, drawn: random.Random) -> None:
    """One thing that may happen between two allocations."""
    free = life.queue()
    known = {*life.theirs[0], *life.theirs[1]}
    likely = [block for block in free if life.contents[block] in known] or free
    block, other = drawn.choice(sorted(life.contents)), drawn.randrange(2)
    match drawn.randrange(14):
        case 0 | 1 if free:
            life.hit([drawn.choice(likely)])
        case 2 if free:
            life.begin([drawn.choice(likely)])
        case 3 if free:
            life.pool.blocks[drawn.choice(free)].reset_hash()
        case 4 if not drawn.randrange(5):
            life.free_all()
            assert life.pool.reset_prefix_cache()
        case 5 | 6:
            drawn.shuffle(life.used)
            life.free_all()
        case _:
            theirs, number = life.theirs[other], life.contents[block]
            if len(theirs) == NUM_BLOCKS or number in theirs:
                number = drawn.choice(sorted(theirs))
                life.drop(other, number)
                del theirs[number]
            else:
                life.copy(other, number)
