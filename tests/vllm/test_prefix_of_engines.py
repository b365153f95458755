"""What an engine finds in its replica and its own slot table is what vLLM would find in one cache
that has the published blocks of all engines."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm")

from kvshm._base.ids import NO_LEASE_BIT, BlockId, Generation, LeaseBit, Rank, block_hash
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.groups import Group
from kvshm._engine.prefix_search import PrefixSearch
from kvshm._node.peer import PlannedRun
from kvshm._node.peers import Peers
from kvshm._shm.layout import BlockRecord, pack_records, unpack_records
from kvshm.hooks.vllm.imports.pool_room import PoolRoom

from ..sessions import new_namespace
from ..unit import exporters
from ..unit.exporters import OWN_EPOCH, Exporter
from ..unit.served import AnyTable, ServedNode
from .test_longest_prefix import (
    HASHES,
    MODELS,
    MODELS_AND_DRAFTS,
    SIZE,
    Key,
    Node,
    caches,
    hash_at,
    made,
)

CASES = 40
"""Random caches per model."""
OWN_BIT = LeaseBit(9)
NUM_BLOCKS = 100
"""Of each engine, as of vLLM's pool in ``Node``."""


class Engines:
    """An engine whose cache is vLLM's pool, and two others that it knows."""

    def __init__(self, served: ServedNode, node: Node) -> None:
        self.node, self.groups = node, node.groups
        self.table = served.serve("me", OWN_EPOCH, NUM_BLOCKS).table
        self.table.set_life(Rank(0))
        self.peers = Peers(served.namespace, "me", OWN_EPOCH, served.segments)
        self.others = [Exporter(served, epoch, f"e{epoch}") for epoch in (1, 2)]
        for other in self.others:
            self.peers.joined(other.info)
        info = replace(self.others[0].info, epoch=OWN_EPOCH, name="me")
        self.epoch = EpochState(self.table, self.peers, None, info)  # type: ignore[arg-type]  # no server
        manager = SimpleNamespace(
            coordinator=node.coordinator, block_pool=node.coordinator.block_pool
        )
        self.search = PrefixSearch()
        self.search.groups = node.groups
        room = PoolRoom(manager, {}, node.groups, 512)
        self.search.own_blocks, self.search.last_own = room.own_blocks, room.last_own
        self.shown: list[tuple[AnyTable, list[BlockId]]] = []

    def record(self, key: Key, block: int) -> BlockRecord:
        number, index = key
        digest = block_hash(hash_at((index + 1) * self.groups.all[number].scale - 1))
        return BlockRecord(digest, BlockId(block), Generation(0), index, group=number)

    def show(self, table: AnyTable, blocks: dict[Key, int]) -> bytes:
        """Publish these blocks, and nothing else; returns the events."""
        old = [slot for slot, seen in enumerate(table.slots()) if seen.state.name == "READY"]
        gone = table.retract([BlockId(block) for block in old])[0] if old else b""
        records = [self.record(key, block) for key, block in blocks.items()]
        return gone + table.publish(pack_records(records), bytes(8 * len(records)))

    def hold(self, own: set[Key], published: set[Key], others: list[set[Key]]) -> None:
        """This engine has ``own`` in its cache, of which the slot table shows ``published``."""
        self.node.hold(own)
        blocks = {key: block for block, key in enumerate(sorted(own), 1)}
        self.show(self.table, {key: blocks[key] for key in sorted(published)})
        for other, keys in zip(self.others, others, strict=True):
            event = self.show(other.table, {key: i for i, key in enumerate(sorted(keys))})
            self.peers.apply_events([(other.info.epoch, event)])

    def leased(self, run: PlannedRun) -> int:
        """How many of a run's blocks are what the run says, in the slot table of their engine."""
        bit = NO_LEASE_BIT if run.peer is self.epoch.own_peer else OWN_BIT
        count, taken = run.peer.table.lease(bit, run.records)
        if bit >= 0:
            run.peer.table.release(bit, run.records, taken)
        return int(count)

    def close(self) -> None:
        self.peers.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedNode]:
    monkeypatch.setattr(exporters, "NUM_BLOCKS", NUM_BLOCKS)
    directory = tempfile.mkdtemp(prefix="kv-")
    node = ServedNode(Path(directory), new_namespace())
    yield node
    node.close()
    shutil.rmtree(directory)


def before(group: Group, length: int) -> set[Key]:
    return {(group.number, index) for index in range(length // group.scale)}


# An engine with one group of full attention does not use own blocks behind a gap.
@pytest.mark.parametrize(
    ("name", "drafts"), [each for each in MODELS_AND_DRAFTS if each != ("latents", False)]
)
def test_published_blocks_of_all_engines_count_like_one_cache(
    served: ServedNode, name: str, drafts: bool
) -> None:
    """And each run names blocks of one engine that can be leased there, as what it says."""
    specs = MODELS[name]
    rnd, longer, own_runs = random.Random(f"{name} {drafts}"), 0, 0
    engines = Engines(served, made(specs, {rnd.randrange(len(specs))} if drafts else set()))
    node, hashes = engines.node, [hash_at(index) for index in range(HASHES)]
    for _ in range(CASES):
        own, *others = caches(rnd, node)
        tokens = rnd.randint(HASHES * SIZE // 2, HASHES * SIZE)
        local = node.hit(own, tokens)
        published = {key for key in sorted(own) if rnd.random() < 0.9}
        hit = {key for group in node.groups.all for key in before(group, local) & own}
        best = max(local, node.hit(hit.union(published, *others), tokens))
        engines.hold(own, published, others)
        found = engines.search.longest(engines.epoch, hashes, local, tokens // SIZE, HASHES)
        length = found.length or local
        assert length == best or (length > best and drafts and node.groups.step > 1)
        assert bool(found.runs) is (length > local)
        said = [record for run in found.runs for record in unpack_records(run.records)]
        wanted = [(p.group, p.first + i) for p in found.parts for i in range(p.num_blocks)]
        assert wanted == [
            (p.group, p.first + i)
            for p in node.groups.parts(local, length)
            for i in range(p.num_blocks)
        ]
        assert [(r.group, r.depth) for r in said] == wanted
        assert [r.block_hash for r in said] == [engines.record(key, 0).block_hash for key in wanted]
        assert [engines.leased(run) for run in found.runs] == [r.num_blocks for r in found.runs]
        longer += bool(found.runs)
        own_runs += engines.epoch.own_peer in [run.peer for run in found.runs]
    engines.close()
    assert longer > CASES // 20, "hardly any case imports"
    assert own_runs or node.groups.is_single_full_attention or len(specs) == 1, (
        "no own block was of use"
    )
