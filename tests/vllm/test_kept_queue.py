"""Kept blocks move to the end of vLLM's queue of free blocks, and nothing else moves."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvshm._base.ids import BlockHash, BlockId, Epoch, Generation, LeaseBit
from kvshm._shm.layout import BlockRecord, pack_records, unpack_records
from kvshm.halves import Marks
from kvshm.hooks.vllm.exports.free_order import FreeOrder
from kvshm.hooks.vllm.exports.kept_blocks import KeptBlocks

from ..unit.served import AnyTable
from ..unit.test_slots import spec_of
from .conftest import Lines
from .pool_life import queue_of

BIT = LeaseBit(9)


def test_free_blocks_are_taken_from_the_head_of_a_linked_list() -> None:
    pool = BlockPool(9, True, 16)
    queue = pool.free_block_queue
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    for taken in (3, 1, 4):
        block, linked = head, []
        for _ in range(taken):
            assert block.next_free_block.prev_free_block is block
            linked.append(block := block.next_free_block)
        assert pool.get_new_blocks(taken) == linked
        assert (queue.fake_free_list_head, queue.fake_free_list_tail) == (head, tail)
    pool.free_blocks(linked)
    assert queue.num_free_blocks == 4
    assert tail.prev_free_block is linked[-1]
    assert tail.prev_free_block.next_free_block is tail


def test_free_blocks_without_a_hash_come_first() -> None:
    pool = BlockPool(9, True, 16)
    first, second, third = pool.get_new_blocks(3)
    for block, digest in ((first, b"1"), (third, b"3")):
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(digest * 32), 0))
    rest = pool.get_new_blocks(5)
    pool.free_blocks([third, second, first])
    pool.free_blocks(rest[:1])
    assert pool.free_block_queue.get_all_free_blocks() == [rest[0], second, third, first]
    assert [block.block_hash is None for block in (rest[0], second)] == [True, True]


class Life:
    """A pool of vLLM's and a slot table, and random holders."""

    def __init__(self, seed: int, blocks: int) -> None:
        self.chance = random.Random(seed)
        self.pool = BlockPool(blocks, True, 16)
        self.table = AnyTable.create(spec_of(num_blocks=blocks), Epoch(5))
        for rank in range(self.table.num_ranks):
            self.table.set_life(rank)
        cache: Any = SimpleNamespace(epoch_state=SimpleNamespace(table=self.table))
        self.kept = KeptBlocks(cache, self.pool.free_block_queue)
        self.records: dict[int, bytes] = {}
        self.used: list[Any] = []
        self.wanted = set[int]()

    def queue(self) -> list[int]:
        return queue_of(self.pool)

    def allocate(self) -> None:
        before = self.queue()
        number = self.chance.randint(0, min(12, len(before)))
        self.kept.put_last(number)
        after = self.queue()
        assert after == self.expected(before, number)
        assert after[:number] == sorted(before, key=self.wanted.__contains__)[:number]
        taken = self.pool.get_new_blocks(number)
        ids = [BlockId(block.block_id) for block in taken]
        _, draining = self.table.retract(ids)
        self.table.force(draining)
        self.wanted.difference_update(ids)
        fresh = [BlockRecord(BlockHash(bytes(32)), b, Generation(0), 0) for b in ids]
        for record in unpack_records(self.table.publish(pack_records(fresh), bytes(8 * number))):
            self.records[record.block_id] = pack_records([record])
        for block in taken:
            digest = block.block_id.to_bytes(32, "little")
            block.set_block_hash(make_block_hash_with_group_id(digest, 0))
        self.used += taken

    def expected(self, queue: list[int], number: int) -> list[int]:
        """The queue once enough others are before the first kept block."""
        others = [i for i, block in enumerate(queue) if block not in self.wanted]
        if not others or not 0 < number < len(queue):
            return queue
        end = others[number - 1] if number <= len(others) else len(queue)
        moved = [block for block in queue[:end] if block in self.wanted]
        return [block for block in queue if block not in moved] + moved

    def keep_some(self) -> None:
        for block in self.chance.sample(sorted(self.records), min(5, len(self.records))):
            if block in self.wanted:
                continue
            if self.chance.random() < 0.5:
                assert self.table.hold(self.records[block], 600) == 1
            else:
                assert self.table.lease(BIT, self.records[block])[0] == 1
            self.wanted.add(block)

    def free_some(self) -> None:
        self.chance.shuffle(self.used)
        for _ in range(self.chance.randint(0, len(self.used))):
            self.pool.free_blocks([self.used.pop()])


def test_kept_blocks_go_to_the_end_and_all_others_stay_in_order(subtests: pytest.Subtests) -> None:
    for seed in range(20):
        with subtests.test(seed=seed):
            life = Life(seed, 40)
            for _ in range(150):
                for what in (life.keep_some, life.free_some, life.allocate):
                    if life.chance.random() < 0.7:
                        what()
            life.table.close()


def test_an_unknown_queue_stays_as_it_is_and_the_log_says_so(lines: Lines) -> None:
    table = SimpleNamespace(kept_until=1)
    cache: Any = SimpleNamespace(epoch_state=SimpleNamespace(table=table))
    marks = Marks(4)
    assert FreeOrder(cache, BlockPool(4, True, 16), marks, duplicates_first=False).may_change()
    assert not lines
    odd = SimpleNamespace(null_block=object())
    assert not FreeOrder(cache, odd, marks, duplicates_first=True).may_change()
    assert "leased, held and last blocks are reused like others" in lines[0]
