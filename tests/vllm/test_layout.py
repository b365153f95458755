"""Regions and shared memory, on KV caches that vLLM itself plans and allocates."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvshm.errors import TransportError
from kvshm.hooks.vllm.identity.layout import Placement, regions_of, shared_kv_memory
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport

from .tiny_config import cache_config, engine_config, spec

CPU = torch.device("cpu")
EQUAL = {f"layer.{i}": spec() for i in range(3)}
MIXED = {"layer.0": spec(), "layer.1": spec(head_size=32), "layer.2": spec()}
STATE = MambaSpec(
    32, ((3, 8), (2, 4, 4)), (torch.bfloat16, torch.float32), spec().page_size_bytes,
    mamba_cache_mode="align",
)  # fmt: skip
Caches = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return engine_config(tmp_path_factory.mktemp("model"), {})


def allocated(config: KVCacheConfig, *kernel_block_sizes: int) -> Caches:
    layout = KVCacheLayout[str(config.kv_cache_layout)]
    sizes = kernel_block_sizes or [32] * len(config.kv_cache_groups)
    return allocate_kv_cache(config, CPU, layout, list(sizes))


def placed(config: KVCacheConfig, caches: Caches) -> Placement:
    placement = regions_of(config, caches)
    assert isinstance(placement, Placement), placement
    return placement


def block_bytes(placement: Placement, block: int) -> list[torch.Tensor]:
    """A block's bytes in each region, as views."""
    starts = [(r, r.offset + block * r.stride) for r in placement.regions]
    return [placement.storage[start : start + r.block_bytes] for r, start in starts]


SHAPES = [
    *((layout.name, EQUAL) for layout in KVCacheLayout),
    *((layout.name, {"layer.0": spec()}) for layout in KVCacheLayout),
    *((layout, MIXED) for layout in ("LBNHC", "LBHNC", "BLNHC", "BLHNC")),  # others vLLM refuses
]


@pytest.mark.parametrize(("layout", "specs"), SHAPES)
def test_a_block_carried_over_its_regions_is_the_same_block_in_every_layer(
    config: VllmConfig, layout: str, specs: dict[str, object]
) -> None:
    """From a cache of 7 blocks into one of 11, whose strides and offsets are others."""
    ours, theirs = (cache_config(config, layout, n, specs) for n in (7, 11))  # type: ignore[arg-type]
    source, target = allocated(ours), allocated(theirs)
    here, there = placed(ours, source), placed(theirs, target)
    here.storage.random_(0, 64)  # as bfloat16 never NaN, which equals nothing
    there.storage.fill_(99)
    untouched = {name: cache.clone() for name, cache in target.items()}
    assert len(here.regions) == len(there.regions)
    for mine, other in zip(block_bytes(here, 2), block_bytes(there, 9), strict=True):
        other.copy_(mine)
    for name in specs:
        assert torch.equal(source[name][2], target[name][9])
        assert torch.equal(target[name][:9], untouched[name][:9])
        assert torch.equal(target[name][10:], untouched[name][10:])


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
def test_a_block_is_the_same_bytes_in_every_group(config: VllmConfig, layout: str) -> None:
    """Groups lie over each other: who copies a block need not know whose it is."""
    shape: dict[str, Any] = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
    window = SlidingWindowSpec(32, sliding_window=64, **shape)
    groups = EQUAL, {f"window.{i}": window for i in range(3)}
    plan = cache_config(config, layout, 7, *groups)
    caches = allocated(plan)
    alone = cache_config(config, layout, 7, EQUAL)
    one = placed(alone, allocated(alone))
    here = placed(plan, caches)
    assert here.regions == one.regions
    here.storage.random_(0, 64)
    before = {name: cache.clone() for name, cache in caches.items()}
    for source, target in zip(block_bytes(here, 2), block_bytes(here, 5), strict=True):
        target.copy_(source)
    for name, cache in caches.items():
        assert torch.equal(cache[5], before[name][2])
        assert torch.equal(cache[:5], before[name][:5])
        assert torch.equal(cache[6], before[name][6])


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_a_block_of_states_is_the_whole_state_of_each_layer(
    config: VllmConfig, layout: str
) -> None:
    """All parts of it: vLLM's layers divide their part of a block themselves."""
    plan = cache_config(config, layout, 7, EQUAL, {f"state.{i}": STATE for i in range(3)})
    caches = allocated(plan)
    here = placed(plan, caches)
    states = [cache for name, cache in caches.items() if "state" in name]
    here.storage.random_(0, 64)
    before = [state.clone() for state in states]
    assert {state[0].numel() * state.itemsize for state in states} == {
        STATE.state_content_size_bytes
    }
    for source, target in zip(block_bytes(here, 2), block_bytes(here, 5), strict=True):
        target.copy_(source)
    for state, was in zip(states, before, strict=True):
        assert torch.equal(state[5], was[2])
        assert torch.equal(state[:5], was[:5])
        assert torch.equal(state[6], was[6])


@pytest.mark.parametrize(("layout", "regions"), [("LBNHC", 3), ("LBHNC", 3), ("BLNHC", 1)])
def test_layers_or_blocks_outermost(config: VllmConfig, layout: str, regions: int) -> None:
    plan = cache_config(config, layout, 7, EQUAL)
    placement = placed(plan, allocated(plan))
    assert len(placement.regions) == regions
    assert {r.num_blocks for r in placement.regions} == {7}
    assert sum(r.block_bytes for r in placement.regions) * 7 == placement.nbytes
    assert placement.kernel_blocks == "1"


def test_kernel_blocks_are_counted_and_copied_with_their_block(config: VllmConfig) -> None:
    plan = cache_config(config, "LBNHC", 7, EQUAL)
    whole = placed(plan, allocated(plan))
    split = placed(plan, allocated(plan, 8))
    assert split.kernel_blocks == "4"
    assert split.regions == whole.regions


def other_regions(plan: KVCacheConfig, caches: Caches) -> None:
    """Another group divides the same memory into other strides."""
    first = plan.kv_cache_tensors[0]
    stride = first.block_stride * 3 // 2
    other = dataclasses.replace(first, layers=["other"], block_stride=stride, layer_stride=0)
    plan.kv_cache_tensors.append(other)
    plan.kv_cache_groups.append(KVCacheGroupSpec(["other"], spec()))
    caches["other"] = caches["layer.0"]


def split_otherwise(plan: KVCacheConfig, caches: Caches) -> None:
    caches["layer.1"] = caches["layer.1"].repeat_interleave(2, 0)
    one = caches["layer.0"].untyped_storage()
    caches["layer.1"].set_(one, 0, caches["layer.1"].shape)


def own_allocation(plan: KVCacheConfig, caches: Caches) -> None:
    caches["layer.1"] = caches["layer.1"].clone()


def moved(plan: KVCacheConfig, caches: Caches) -> None:
    caches["layer.1"], caches["layer.2"] = caches["layer.2"], caches["layer.1"]


def missing(plan: KVCacheConfig, caches: Caches) -> None:
    del caches["layer.1"]


def no_tensor(plan: KVCacheConfig, caches: Caches) -> None:
    caches["layer.1"] = [caches["layer.1"]]  # type: ignore[assignment]


def host_part(plan: KVCacheConfig, caches: Caches) -> None:
    plan.kv_cache_tensors[0].host_resident = True


def too_long(plan: KVCacheConfig, caches: Caches) -> None:
    plan.kv_cache_tensors[0].layers = plan.kv_cache_tensors[0].layers[:1]
    plan.kv_cache_tensors[0].layer_stride *= 4


def odd_stride(plan: KVCacheConfig, caches: Caches) -> None:
    plan.kv_cache_tensors[0].layer_stride += 32


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (other_regions, "divide the memory of a block differently"),
        (split_otherwise, "do not split their 7 blocks alike"),
        (own_allocation, "one allocation"),
        (moved, "layer.1 lies at byte"),
        (missing, "layer.1 was not registered"),
        (no_tensor, "is not a single tensor"),
        (host_part, "host memory"),
        (too_long, "ends beyond"),
        (odd_stride, "is not a multiple"),
    ],
)
def test_a_cache_that_cannot_be_shared_is_refused_with_the_reason(
    config: VllmConfig, spoil: Callable[[KVCacheConfig, Caches], None], reason: str
) -> None:
    plan = cache_config(config, "LBNHC", 7, EQUAL)
    caches = allocated(plan)
    spoil(plan, caches)
    answer = regions_of(plan, caches)
    assert isinstance(answer, str)
    assert reason in answer


def test_the_cache_lands_in_shared_memory(config: VllmConfig) -> None:
    zeros = torch.zeros
    plan = cache_config(config, "LBNHC", 7, EQUAL)
    context = shared_kv_memory(PosixShmTransport.allocate)
    with context:
        other = torch.zeros(3)
        caches = allocated(plan)
        more = torch.zeros(64, dtype=torch.int8, device=CPU)
    assert torch.zeros is zeros
    assert other.tolist() == [0, 0, 0]
    placement = placed(plan, caches)
    memory: KVMemory = context.memory_of(placement)
    assert (memory.address, memory.nbytes) == (placement.address, placement.nbytes)
    assert more.data_ptr() != placement.address
    assert not placement.storage.any()
    placement.storage[-1] = 5
    reader = os.dup(memory.read_only_fd())
    with mmap.mmap(reader, memory.nbytes, prot=mmap.PROT_READ) as seen:
        assert seen[-1] == 5
    os.close(reader)
    memory.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros(64, dtype=torch.int32, device=CPU),
        lambda: torch.zeros(64, dtype=torch.int8),
        lambda: torch.zeros(8, 8, dtype=torch.int8, device=CPU),
        lambda: torch.zeros((64,), dtype=torch.int8, device=CPU),
        lambda: torch.zeros(64, dtype=torch.int8, device="meta"),
        lambda: torch.zeros(64, dtype=torch.int8, device=CPU, requires_grad=False),
    ],
)
def test_other_allocations_are_torchs_own(call: Callable[[], torch.Tensor]) -> None:
    context = shared_kv_memory(PosixShmTransport.allocate)
    expected = call()
    with context:
        made = call()
    assert (made.shape, made.dtype, made.device) == (
        expected.shape,
        expected.dtype,
        expected.device,
    )
    assert context.memory is None
    assert "known way" in context.failure


def test_a_failure_restores_torch() -> None:
    zeros = torch.zeros
    with pytest.raises(RuntimeError, match="boom"), shared_kv_memory(bytearray):  # type: ignore[arg-type]
        raise RuntimeError("boom")
    assert torch.zeros is zeros


def test_without_room_the_cache_lies_in_ordinary_memory(config: VllmConfig) -> None:
    def no_room(nbytes: int) -> None:
        raise TransportError(f"no room for {nbytes} bytes")

    context = shared_kv_memory(no_room)  # type: ignore[arg-type]
    plan = cache_config(config, "LBNHC", 7, EQUAL)
    with context:
        caches = allocated(plan)
    with pytest.raises(TransportError, match="no room"):
        context.memory_of(placed(plan, caches))


def test_memory_that_vllm_did_not_take_for_its_cache_is_not_mistaken_for_it(
    config: VllmConfig,
) -> None:
    context = shared_kv_memory(PosixShmTransport.allocate)
    plan = cache_config(config, "LBNHC", 7, EQUAL)
    with context:
        decoy = torch.zeros(64, dtype=torch.int8, device=CPU)
        caches = allocated(plan)
    memory: KVMemory | None = context.memory
    assert memory is not None
    assert memory.address == decoy.data_ptr()
    with pytest.raises(TransportError, match="allocated first"):
        context.memory_of(placed(plan, caches))
    memory.close()
