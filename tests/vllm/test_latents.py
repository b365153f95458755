"""Latents (MLA) and what stands beside them: an indexer's keys, windows, compressed latents, in
vLLM's fp8 layouts too.  The caches are those that vLLM plans and allocates for DeepSeek V3, V3.2
and V4; CPUs of many machines cannot run these models with a prefix cache.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SparseCacheRole,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation
from kvshm._engine.load_plan import LoadOrder, Piece
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
from kvshm.config import Config
from kvshm.hooks.vllm import worker_side as worker_module
from kvshm.hooks.vllm.identity import rank_weights
from kvshm.hooks.vllm.identity.layout import Placement, regions_of
from kvshm.hooks.vllm.messages import StepMetadata
from kvshm.hooks.vllm.worker_side import WorkerSide

from ..sessions import new_namespace
from ..unit.served import Served
from .cuda_workers import finished, until
from .moved_names import moved
from .tiny_config import engine_config

SPAWN = multiprocessing.get_context("spawn")
Specs = dict[str, KVCacheSpec]


def latents(block_size: int, **more: Any) -> MLAAttentionSpec:
    shape = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, **more}
    return MLAAttentionSpec(block_size=block_size, **shape)


def keys_of_an_indexer(block_size: int, **more: Any) -> MLAAttentionSpec:
    return latents(block_size, head_size=132, dtype=torch.uint8, **more)


IN_FP8: dict[str, Any] = {
    "head_size": 512, "dtype": torch.uint8, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
    "cache_dtype_str": "fp8_ds_mla", "alignment": 576, "state_content_bytes": 584,
}  # fmt: skip


def window(block_size: int, tokens: int, **more: Any) -> SlidingWindowMLASpec:
    shape = {"num_kv_heads": 1, "sliding_window": tokens, "alignment": 576, **more}
    return SlidingWindowMLASpec(block_size=block_size, **shape)


def deepseek_v3() -> Specs:
    return {f"layers.{i}.attn": latents(64) for i in range(3)}


def deepseek_v3_in_fp8() -> Specs:
    spec = latents(64, **{**IN_FP8, "alignment": None, "state_content_bytes": 656})
    return {f"layers.{i}.attn": spec for i in range(3)}


def deepseek_v32() -> Specs:
    """Each layer has latents, and the keys by which an indexer chooses among them."""
    keys = keys_of_an_indexer(64, cache_role=SparseCacheRole.INDEXER)
    of_a_layer = {"attn": latents(64), "indexer.k_cache": keys}
    return {f"layers.{i}.{name}": spec for i in range(3) for name, spec in of_a_layer.items()}


def deepseek_v4() -> Specs:
    """Every layer has a window; most have latents of 4 or 128 tokens each, with a window of what is
    not compressed yet, and those of 4 an indexer's with its own."""
    made: Specs = {}
    for i, ratio in enumerate([0, 4, 128, 4, 128]):
        made[f"layers.{i}.swa_cache"] = window(64, 128, **IN_FP8, model_version="deepseek_v4")
        if ratio == 4:
            keys = keys_of_an_indexer(256, tokens_per_state=4, alignment=576)
            made[f"layers.{i}.indexer.k_cache"] = keys
            made[f"layers.{i}.indexer.state_cache"] = window(
                4, 8, head_size=512, dtype=torch.float32
            )
        if ratio:
            made[f"layers.{i}.attn"] = latents(256, tokens_per_state=ratio, **IN_FP8)
            size, tokens, heads = (4, 8, 2048) if ratio == 4 else (8, 128, 1024)
            state = window(size, tokens, head_size=heads, dtype=torch.float32)
            made[f"layers.{i}.state_cache"] = state
    return made


MODELS = {
    made.__name__: made for made in (deepseek_v3, deepseek_v3_in_fp8, deepseek_v32, deepseek_v4)
}
each = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return engine_config(tmp_path_factory.mktemp("model"), {})


def planned(config: VllmConfig, specs: Specs, num_blocks: int) -> KVCacheConfig:
    """The cache that vLLM plans for these layers."""
    register_all_kvcache_specs(config)
    several = len({type(spec) for spec in specs.values()}) > 1
    config.cache_config.kv_cache_layout = layout = "BLNHC" if several else "LBNHC"
    groups = moved("get_kv_cache_groups")(config, specs)
    made_of = moved("get_kv_cache_config_from_groups")
    of_one = made_of(config, groups, 1 << 30)
    size = of_one.kv_cache_tensors[0].size // of_one.num_blocks
    plan: KVCacheConfig = made_of(config, groups, num_blocks * size)
    assert plan.num_blocks == num_blocks
    plan.kv_cache_layout, plan.hash_block_size = layout, 4
    return plan


def allocated(plan: KVCacheConfig) -> dict[str, torch.Tensor]:
    sizes = [group.kv_cache_spec.block_size for group in plan.kv_cache_groups]
    layout = KVCacheLayout[str(plan.kv_cache_layout)]
    return allocate_kv_cache(plan, torch.device("cpu"), layout, sizes)


def block_bytes(placement: Placement, block: int) -> list[torch.Tensor]:
    """A block's bytes in each region, as views."""
    starts = [(r, r.offset + block * r.stride) for r in placement.regions]
    return [placement.storage[start : start + r.block_bytes] for r, start in starts]


def test_vllm_plans_the_groups_of_these_models(config: VllmConfig) -> None:
    """One group of layers of several sizes; in V4 several of blocks of 4 to 256 tokens."""
    one = planned(config, deepseek_v32(), 7)
    assert [len(group.layer_names) for group in one.kv_cache_groups] == [6]
    several = planned(config, deepseek_v4(), 7)
    sizes = [group.kv_cache_spec.block_size for group in several.kv_cache_groups]
    assert sorted(sizes) == [4, 8, 64, 64, 64, 256]


@each
def test_a_block_carried_over_its_regions_is_the_same_block_in_every_layer(
    config: VllmConfig, model: str
) -> None:
    """From a cache of 7 blocks into one of 11, whose strides and offsets are others.  Layers whose
    page is smaller than a block's have something else behind it, which is carried, too."""
    ours, theirs = (planned(config, MODELS[model](), n) for n in (7, 11))
    source, target = allocated(ours), allocated(theirs)
    here, there = regions_of(ours, source), regions_of(theirs, target)
    assert isinstance(here, Placement), here
    assert isinstance(there, Placement), there
    here.storage.random_(-128, 127)
    there.storage.fill_(99)
    untouched = {name: cache.clone() for name, cache in target.items()}
    for mine, other in zip(block_bytes(here, 2), block_bytes(there, 9), strict=True):
        other.copy_(mine)
    for name, cache in target.items():
        assert torch.equal(raw(source[name][2]), raw(cache[9]))
        assert torch.equal(raw(cache[:9]), raw(untouched[name][:9]))
        assert torch.equal(raw(cache[10:]), raw(untouched[name][10:]))


def raw(cache: torch.Tensor) -> torch.Tensor:
    """Bytes, since a NaN equals nothing."""
    return cache.contiguous().view(torch.uint8)


# -- a pair of workers


class Worker:
    """One rank with its cache in memory that can be shared, and its engine's table."""

    def __init__(
        self, config: VllmConfig, plan: KVCacheConfig, where: Path, space: str, epoch: int
    ):
        self.side = WorkerSide(Config(namespace=space), where, config, plan)
        assert self.side.allocation is not None
        with self.side.allocation:
            self.caches = allocated(plan)
        self.side.register(self.caches)
        table = TableSpec(space, f"e{epoch}", plan.num_blocks, 4, 1, Fingerprint(bytes(32)), "m")
        self.served = Served(where, OwnSlotTable.create(table, Epoch(epoch)), space)

    def begin(self, metadata: StepMetadata) -> None:
        self.side.begin_step(metadata)
        self.side.begin_loads(metadata)

    def close(self) -> None:
        self.side.close()
        self.served.close()


def fill(caches: dict[str, torch.Tensor], seed: int) -> None:
    """All bytes of the allocation, other ones in each block."""
    storage = torch.empty(0, dtype=torch.int8)
    storage.set_(next(iter(caches.values())).untyped_storage())
    storage.random_(-128, 127, generator=torch.Generator().manual_seed(seed))


def play_a_model(patch: pytest.MonkeyPatch) -> None:
    """There are no weights to digest."""
    model = torch.nn.Module()
    patch.setattr(rank_weights, "find_model", lambda _: model)
    patch.setattr(worker_module, "rank_fields", lambda *_: {"weights": "w"})


BLOCKS = {2: 5, 9: 1, 4: 6}
"""Blocks of the one worker by those of the other."""


def export(where: Path, space: str, pipe: Connection) -> None:
    """Workers of other engines, one of each model: they have blocks until they are told to end."""
    play_a_model(pytest.MonkeyPatch())
    config = engine_config(where / "model", {})
    workers = []
    for epoch, made in enumerate(MODELS.values(), 11):
        worker = Worker(config, planned(config, made(), 11), where, space, epoch)
        workers.append(worker)
        fill(worker.caches, epoch)
        described = worker.side.describe()
        assert described.info is not None, described.refusal
        worker.begin(StepMetadata(step=1, open_epoch=Epoch(epoch)))
        records = [
            BlockRecord(BlockHash(bytes([b]) * 32), BlockId(b), Generation(0), 0) for b in BLOCKS
        ]
        shown = worker.served.table.publish(pack_records(records), bytes(8 * len(records)))
        pipe.send((msgspec.structs.replace(described.info.memory, epoch=Epoch(epoch)), shown))
    pipe.recv()
    for worker in workers:
        worker.close()


@pytest.fixture
def where() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kv-"))
    yield folder
    shutil.rmtree(folder)


def test_a_block_of_another_process_is_the_same_in_every_layer(
    config: VllmConfig,
    where: Path,
    monkeypatch: pytest.MonkeyPatch,
    subtests: pytest.Subtests,
) -> None:
    """Every byte of both caches is compared; the exporter's has more blocks than the importer's."""
    play_a_model(monkeypatch)
    space = new_namespace()
    ours, theirs = multiprocessing.Pipe()
    process = SPAWN.Process(target=export, args=(where, space, theirs))
    process.start()
    theirs.close()
    for epoch, (name, made) in enumerate(MODELS.items(), 11):
        with subtests.test(model=name):
            importer = Worker(config, planned(config, made(), 7), where, space, epoch - 10)
            fill(importer.caches, 1)
            expected = {name: raw(cache).clone() for name, cache in importer.caches.items()}
            assert ours.poll(300), "the exporter does not answer"
            load_from(importer, epoch, *ours.recv())
            there = allocated(planned(config, made(), 11))
            fill(there, epoch)
            for layer, cache in importer.caches.items():
                for block, target in BLOCKS.items():
                    expected[layer][target] = raw(there[layer])[block]
                assert torch.equal(raw(cache), expected[layer]), layer
            importer.close()
    ours.send("end")
    process.join(60)
    assert process.exitcode == 0


def load_from(importer: Worker, exporter: int, memory: Any, shown: bytes) -> None:
    targets = tuple(BlockId(target) for target in BLOCKS.values())
    piece = Piece(Epoch(exporter), (memory,), shown, bytes(len(targets)), targets, 8)
    own = importer.served.table.epoch
    importer.begin(StepMetadata(step=1, open_epoch=own))
    ticket = importer.served.table.take_ticket(1)
    assert ticket is not None
    load = LoadOrder("request", own, ticket, 0, (piece,), ())
    importer.begin(StepMetadata(step=2, loads=[load]))
    until(lambda: "request" in finished(importer.side))
    (report,) = importer.side.take_report().loads
    assert not report.bad, report.failures
