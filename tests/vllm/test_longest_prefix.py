"""What can be restored from several engines is what vLLM would find in one cache with all blocks.

vLLM's own coordinator searches a pool that has the local blocks and those of all peers; kvshm
searches behind the local hit, in peers that are lists of keys.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvshm._engine.groups import Find, Group, Groups
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import BlockRecord, pack_records, unpack_records
from kvshm.hooks.vllm.identity.groups import groups_of

HASHES = 24
SIZE = 4
CASES = 100
Key = tuple[int, int]


def full(scale: int = 1) -> FullAttentionSpec:
    return FullAttentionSpec(SIZE * scale, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


def window(tokens: int, scale: int = 1) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        SIZE * scale, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=tokens
    )


def chunk(tokens: int) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(
        SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, attention_chunk_size=tokens
    )


def states(scale: int = 1) -> MambaSpec:
    return MambaSpec(
        SIZE * scale, shapes=((4,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
    )


def latents(scale: int = 1) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=SIZE * scale, num_kv_heads=1, head_size=8, dtype=torch.uint8, tokens_per_state=4
    )


def latent_window(tokens: int, scale: int = 1) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=SIZE * scale,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.uint8,
        sliding_window=tokens,
    )


# Not here, because vLLM's search has no right answer: chunks that are no multiple of the blocks (it
# misses blocks of the last chunk), and windows of one token.
MODELS: dict[str, list[KVCacheSpec]] = {
    "gemma 3": [full(), window(10)],
    "several windowed groups": [full(), window(10), window(10), window(10)],
    "two windows": [full(), window(6), window(17)],
    "windows only": [window(9)],
    "window first": [window(12), full()],
    "two windows, none full": [window(5), window(14)],
    "chunks": [full(), chunk(12)],
    "chunks only": [chunk(16)],
    "larger full blocks": [full(2), window(10)],
    "larger windowed blocks": [full(), window(20, 4)],
    "three sizes": [full(2), window(11), window(30, 3)],
    "states": [full(), states()],
    "several groups of states": [states(), states(), full(), states()],
    "states alone": [states()],
    "states and windows": [window(9), states(), full()],
    "larger blocks with states": [full(3), states(3), window(10)],
    "latents": [latents()],
    # Windows, compressed latents, and the windows of what is not compressed yet.
    "deepseek v4": [latent_window(12, 2), latents(4), latent_window(8), latent_window(20, 2)],
}
# vLLM does not draft with chunked attention.
MODELS_AND_DRAFTS = [
    (name, drafts)
    for name, specs in MODELS.items()
    for drafts in (False, True)
    if not (drafts and any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs))
]


@dataclass
class Node:
    """One prompt, and who holds which of its blocks."""

    groups: Groups
    coordinator: Any
    asked: list[Key]

    def blocks(self, group: Group) -> int:
        return HASHES // group.scale

    def hold(self, keys: set[Key]) -> None:
        """Put blocks in vLLM's pool, and nothing else."""
        pool = self.coordinator.block_pool
        pool.cached_block_hash_to_block._cache.clear()
        for block, (number, index) in zip(pool.blocks[1:], sorted(keys), strict=False):
            block.reset_hash()
            scale = self.groups.all[number].scale
            key = make_block_hash_with_group_id(hash_at((index + 1) * scale - 1), number)
            pool._insert_block_hash(key, block, num_tokens=(index + 1) * scale * SIZE)

    def hit(self, keys: set[Key], tokens: int) -> int:
        """What vLLM finds in a cache with these blocks, in hashes."""
        self.hold(keys)
        hashes: Any = [hash_at(index) for index in range(HASHES)]
        return int(self.coordinator.find_longest_cache_hit(hashes, tokens)[1]) // SIZE

    def find(self, owners: list[set[Key]]) -> Find:
        return Owners(owners, self.asked)


class Owners:
    """Finds what these hold, and notes what it is asked for; of states, those that nobody has."""

    def __init__(self, owners: list[set[Key]], asked: list[Key]) -> None:
        self.owners, self.asked = owners, asked

    def holders(self, group: Group, index: int) -> list[int]:
        return [o for o, keys in enumerate(self.owners) if (group.number, index) in keys]

    def __call__(self, group: Group, first: int, stop: int) -> tuple[list[PlannedRun], int]:
        runs = []
        for index in range(first, stop):
            self.asked.append((group.number, index))
            if not (holders := self.holders(group, index)):
                break
            runs.append(run(holders[0], group.number, index))
        return runs, first + len(runs)

    def last(self, group: Group, start: int, stop: int) -> int:
        while stop > start and not self.holders(group, stop - 1):
            stop -= 1
            self.asked.append((group.number, stop))
        return stop


def hash_at(index: int) -> Any:
    return hashlib.sha256(bytes([index])).digest()


def run(owner: int, group: int, index: int) -> PlannedRun:
    record = BlockRecord(hash_at(index), index, 0, index, group=group)  # type: ignore[arg-type]
    peer: Any = SimpleNamespace(owner=owner)
    return PlannedRun(peer, pack_records([record]))


def made(specs: list[KVCacheSpec], eagle: set[int]) -> Node:
    groups = [
        KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in eagle)
        for i, spec in enumerate(specs)
    ]
    config = KVCacheConfig(
        num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=SIZE
    )
    coordinator = get_kv_cache_coordinator(
        config,
        max_model_len=HASHES * SIZE * 2,
        max_in_flight_tokens=HASHES * SIZE,
        use_eagle=bool(eagle),
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*(spec.block_size for spec in specs)),
        hash_block_size=SIZE,
    )
    found = groups_of(config, SimpleNamespace(coordinator=coordinator))
    assert isinstance(found, Groups), found
    return Node(found, coordinator, [])


def caches(rnd: random.Random, node: Node) -> Iterator[set[Key]]:
    """Random caches: runs of blocks with gaps, as evictions leave them."""
    for _ in range(3):
        keys = set()
        for group in node.groups.all:
            kept, rate = rnd.random() < 0.7, rnd.choice((0.03, 0.1, 0.3))
            for index in range(node.blocks(group)):
                if rnd.random() < rate:
                    kept = not kept
                if kept:
                    keys.add((group.number, index))
        yield keys


def test_the_longest_prefix_is_what_one_cache_with_all_blocks_would_give(
    subtests: pytest.Subtests,
) -> None:
    """With drafts and blocks of several sizes vLLM finds less than there is: near the begin of a
    prompt it drops the draft layers' block after it has rounded down already."""
    for name, drafts in MODELS_AND_DRAFTS:
        with subtests.test(name=name, drafts=drafts):
            specs, rnd, longer = MODELS[name], random.Random(name), 0
            nodes = [
                made(
                    specs,
                    set(rnd.sample(range(len(specs)), rnd.randint(1, len(specs))))
                    if drafts
                    else set(),
                )
                for _ in range(5 if drafts else 1)
            ]
            for _ in range(CASES):
                node = rnd.choice(nodes)
                own, *peers = caches(rnd, node)
                tokens = rnd.randint(1, HASHES * SIZE)
                local = node.hit(own, tokens)
                node.asked = []
                found = node.groups.longest(local, tokens // SIZE, HASHES, node.find([own, *peers]))
                length = found.length
                vllm = node.hit(own.union(*peers), tokens)
                assert length == vllm or (length > vllm and drafts and node.groups.step > 1)
                assert len(set(node.asked)) == len(node.asked), "a block was looked up twice"
                if not found.runs:
                    continue
                longer += 1
                said = [r for one in found.runs for r in unpack_records(one.records)]
                wanted = [(p.group, p.first + i) for p in found.parts for i in range(p.num_blocks)]
                assert [(r.group, r.block_id) for r in said] == wanted
                ahead = {
                    (g.number, length // g.scale + i)
                    for g in node.groups.all
                    for i in range(g.ahead)
                }
                kept = {*wanted, *ahead, *needed_locally(node, local)}
                if length == vllm:
                    assert node.hit(kept, tokens) >= length, "what it names is not enough"
            assert longer > CASES // 20, "hardly any case imports"


def needed_locally(node: Node, local: int) -> set[Key]:
    return {(g.number, i) for g in node.groups.all for i in range(local // g.scale)}
