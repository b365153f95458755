"""Lives of a pool of vLLM's whose blocks other engines have, too."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvshm._base.ids import BlockHash, BlockId, Generation, LeaseBit, Rank
from kvshm._node.peers import Peers
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm.config import Config
from kvshm.halves import LoadPlanner, Marks
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
        self.begin(ids)
        self.pool.free_blocks(reversed(self.used[-len(ids) :]))
        del self.used[-len(ids) :]

    def begin(self, ids: list[int]) -> None:
        """A request begins with these blocks, and goes on."""
        blocks = [self.pool.blocks[i] for i in ids]
        self.pool.touch(blocks)
        self.marks.make_sound([BlockId(i) for i in ids])
        assert self.marks.touch(blocks, len(blocks)) == len(blocks)
        self.used += blocks

    def copy(self, other: int, number: int) -> None:
        """Another engine comes to have these contents."""
        block = BlockId(min(set(range(NUM_BLOCKS)).difference(self.theirs[other].values())))
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
        return queue_of(self.pool)


def queue_of(pool: BlockPool) -> list[int]:
    """The ids of the free blocks in their order, which is the same in both directions."""
    found = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    backwards, block = [], pool.free_block_queue.fake_free_list_tail.prev_free_block
    while block.prev_free_block is not None:
        backwards.append(block.block_id)
        block = block.prev_free_block
    assert backwards[::-1] == found
    assert len(found) == pool.get_num_free_blocks()
    return found


@contextmanager
def served_pool() -> Iterator[ServedNode]:
    """A node of engines with NUM_BLOCKS blocks each."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="kv-") as run_dir,
    ):
        patch.setattr(exporters, "NUM_BLOCKS", NUM_BLOCKS)
        node = ServedNode(Path(run_dir), new_namespace())
        yield node
        node.close()


def filled(served: ServedNode, **arguments: Any) -> tuple[Life, list[int]]:
    """All blocks were in use once and are free; also the queue."""
    life = Life(served, **arguments)
    life.take(NUM_BLOCKS - 1)
    life.free_all()
    return life, life.queue()
