"""Free blocks that another engine has, too, are handed out first, in vLLM's order among them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvshm._base.ids import BlockHash, BlockId, Epoch, Generation, LeaseBit, Rank
from kvshm._node.peers import QUARANTINE_FAILURES, Peers
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.statistics import DUPLICATES_LOST, DUPLICATES_REUSED, LAST_COPIES_REUSED
from kvshm.config import Auto, Config
from kvshm.halves import LoadPlanner, Marks
from kvshm.hooks.vllm.exports import duplicates
from kvshm.hooks.vllm.exports.free_order import FreeOrder

from ..sessions import new_namespace
from ..unit import exporters
from ..unit.exporters import OWN_EPOCH, Exporter
from ..unit.served import ServedNode

NUM_BLOCKS = 60
BIT = LeaseBit(9)


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


class Life:
    """A pool of vLLM's whose blocks hold contents by number, and other engines that have some."""

    def __init__(
        self, served: ServedNode, seed: int = 0, *, duplicates_first: bool = True, **settings: Any
    ) -> None:
        self.chance = random.Random(seed)
        self.now, self.pause = 0.0, 1.0
        self.pool = BlockPool(NUM_BLOCKS, True, 16)
        self.table = served.serve("me", OWN_EPOCH, NUM_BLOCKS).table
        self.table.set_life(Rank(0))
        self.peers = Peers(served.namespace, "me", OWN_EPOCH, served.segments)
        self.others = [Exporter(served, epoch, f"e{epoch}") for epoch in (1, 2)]
        own = SimpleNamespace(block_bytes=1024)
        config = Config(**{"min_prefix_tokens": 0} | settings)  # each block can be imported alone
        self.cache: Any = SimpleNamespace(role=config.decide_role())
        self.cache.epoch_state = SimpleNamespace(table=self.table, peers=self.peers, own_peer=own)
        self.cache.planner = LoadPlanner(config, self.cache)
        self.marks = Marks(NUM_BLOCKS, clock=lambda: self.now)
        self.order = FreeOrder(self.cache, self.pool, self.marks, duplicates_first=duplicates_first)
        if self.order._duplicates:
            self.order._duplicates._clock = lambda: self.now
        self.contents: dict[int, int] = {}
        self.theirs: list[dict[int, int]] = [{}, {}]
        self.used: list[Any] = []
        self._next = 1000

    def join(self) -> None:
        for other in self.others:
            self.peers.joined(other.info)

    def fresh(self) -> int:
        self._next += 1
        return self._next

    def take(self, count: int) -> list[int]:
        """Have vLLM take blocks and fill them with new contents; returns their ids."""
        ids = self.take_for_tokens(count)
        for block in self.used[-count:]:
            self.fill(block, self.fresh())
        return ids

    def take_for_tokens(self, count: int) -> list[int]:
        """Have vLLM take blocks that get no hash, some time after the last ones."""
        self.now += self.pause
        if self.order.may_change():
            self.order.change(count)
        blocks = self.pool.get_new_blocks(count)
        ids = [BlockId(block.block_id) for block in blocks]
        self.marks.clear(ids)
        self.table.force(self.table.retract(ids)[1])
        self.order.changed()
        self.used += blocks
        return list(ids)

    def fill(self, block: Any, number: int, parent: int | None = None, depth: int = 0) -> None:
        record = BlockRecord(digest(number), BlockId(block.block_id), Generation(0), depth)
        before = bytes(8) if parent is None else digest(parent)[:8]
        self.table.publish(pack_records([record]), before)
        block.set_block_hash(make_block_hash_with_group_id(digest(number), 0))
        self.contents[block.block_id] = number

    def prefix(self, *numbers: int) -> list[int]:
        """Have vLLM compute a prefix of these contents and free it; returns its block ids."""
        ids = self.take_for_tokens(len(numbers))
        blocks = self.used[-len(numbers) :]
        parents = (None, *numbers)
        for depth, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
            self.fill(block, number, parents[depth], depth)
        del self.used[-len(numbers) :]
        self.pool.free_blocks(reversed(blocks))
        return ids

    def hit(self, ids: list[int]) -> None:
        """A request begins with these blocks, and ends."""
        blocks = [self.pool.blocks[i] for i in ids]
        self.pool.touch(blocks)
        self.marks.make_sound([BlockId(i) for i in ids])
        assert self.marks.touch(blocks, len(blocks)) == len(blocks)
        self.pool.free_blocks(reversed(blocks))

    def copy(self, other: int, number: int) -> None:
        """Another engine comes to have these contents."""
        block = BlockId(len(self.theirs[other]))
        self.theirs[other][number] = block
        record = BlockRecord(digest(number), block, Generation(0), 0)
        event = self.others[other].table.publish(pack_records([record]), bytes(8))
        self.peers.apply_events([(self.others[other].info.epoch, event)])

    def drop(self, other: int, number: int) -> None:
        """Another engine reuses its block; this one does not hear of it yet."""
        self.others[other].table.retract([BlockId(self.theirs[other][number])])

    def free_all(self) -> None:
        self.pool.free_blocks(self.used)
        self.used = []

    def count(self, counter: Any) -> int:
        return self.table.counters.read(counter)

    def queue(self) -> list[int]:
        found = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        backwards, block = [], self.pool.free_block_queue.fake_free_list_tail.prev_free_block
        while block.prev_free_block is not None:
            backwards.append(block.block_id)
            block = block.prev_free_block
        assert backwards[::-1] == found
        assert len(found) == self.pool.get_num_free_blocks()
        return found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedNode]:
    monkeypatch.setattr(exporters, "NUM_BLOCKS", NUM_BLOCKS)
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        node = ServedNode(Path(directory), new_namespace())
        yield node
        node.close()


def filled(served: ServedNode, **arguments: Any) -> tuple[Life, list[int]]:
    """All blocks were in use once and are free; also the queue."""
    life = Life(served, **arguments)
    life.take(NUM_BLOCKS - 1)
    life.free_all()
    return life, life.queue()


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


def test_what_was_used_meanwhile_is_not_the_one_that_has_rested_longest(served: ServedNode) -> None:
    life, queue = filled(served)
    life.join()
    for place in (5, 40, 41):
        life.copy(0, life.contents[queue[place]])
    assert life.take(1) == [queue[5]]
    life.hit([queue[40]])
    assert life.take(2) == [queue[41], queue[40]]  # but goes before last copies
    assert life.take(2) == queue[:2]


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
