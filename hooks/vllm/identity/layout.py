"""Where the KV blocks lie: describes vLLM's KV cache as regions, and places it in shared memory.

vLLM allocates one buffer per worker, and every layer is a view of it.  The page of layer ``l`` and
block ``b`` starts at ``offset + l * layer_stride + b * block_stride``.  There are two shapes::

    layer outermost (LBNHC ...)              block outermost (BLNHC ...)
    | l0: b0 b1 b2 .. | l1: b0 b1 b2 .. |    | b0: l0 l1 .. | b1: l0 l1 .. | ...
      one region per layer                     one region that holds all layers

Addresses come from the storage, which all layers share: a layer's view may be split into kernel
blocks or have its axes swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from kvshm.errors import KvshmError, TransportError
from kvshm.interfaces import Region


@dataclass(frozen=True)
class Placement:
    """A worker's KV cache: one allocation and the regions in it.  Worker only."""

    storage: torch.Tensor  # the whole allocation as flat int8; keeps the memory alive
    regions: list[Region]
    kernel_blocks: str
    """How many of the attention kernel's blocks one block has; in each group if they differ."""
    caches: tuple[torch.Tensor, ...]  # the layers' views, as registered

    @property
    def address(self) -> int:
        """The current address of the allocation's first byte."""
        return int(self.storage.untyped_storage().data_ptr())

    @property
    def nbytes(self) -> int:
        return int(self.storage.untyped_storage().nbytes())

    def holds_caches(self) -> bool:
        """Whether the model still reads and writes here: another connector may move the layers'
        views to memory of its own, as LMCache's does on a CPU (``lmcache_driven``)."""
        return all(c.untyped_storage().data_ptr() == self.address for c in self.caches)


def regions_of(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> Placement | str:
    """Return where the blocks lie, or one sentence why they cannot be shared.  ``kv_caches``: as
    vLLM hands them to ``register_kv_caches``."""
    if any(tensor.host_resident for tensor in kv_cache_config.kv_cache_tensors):
        return "part of the KV cache lies in host memory of its own"
    if not all(isinstance(cache, torch.Tensor) for cache in kv_caches.values()):
        return "the KV cache of some layer is not a single tensor"
    if len({cache.untyped_storage().data_ptr() for cache in kv_caches.values()}) != 1:
        return f"the KV caches of {len(kv_caches)} layers do not lie in one allocation"
    splits = [
        _split(group.layer_names, kv_cache_config.num_blocks, kv_caches)
        for group in kv_cache_config.kv_cache_groups
    ]
    if None in splits:
        return f"the layers do not split their {kv_cache_config.num_blocks} blocks alike"
    counts = [str(split) for split in splits]
    return _place(
        kv_cache_config, kv_caches, counts[0] if len(set(counts)) == 1 else ",".join(counts)
    )


def _split(
    layers: Sequence[str], num_blocks: int, kv_caches: Mapping[str, torch.Tensor]
) -> int | None:
    """How many of the attention kernel's blocks one block of these layers has; None: it differs."""
    splits = {kv_caches[name].shape[0] / num_blocks for name in layers if name in kv_caches}
    return int(min(splits)) if len(splits) == 1 and min(splits).is_integer() else None


def _place(
    config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor], kernel_blocks: str
) -> Placement | str:
    storage = _flat(next(iter(kv_caches.values())))
    regions: dict[Region, None] = {}  # an ordered set: packed tensors share one region
    for tensor in config.kv_cache_tensors:
        if (wrong := _contradiction(tensor, config.num_blocks, kv_caches)) is not None:
            return wrong
        regions |= dict.fromkeys(_regions(tensor, config.num_blocks))
    if (overlap := _overlap(list(regions))) is not None:
        return overlap
    for region in regions:
        end = region.offset + region.stride * (region.num_blocks - 1) + region.block_bytes
        if end > storage.numel():
            return f"{region} ends beyond the {storage.numel()} bytes of the KV cache"
    return Placement(storage, list(regions), kernel_blocks, tuple(kv_caches.values()))


def _flat(cache: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int8, device=cache.device).set_(cache.untyped_storage())


def _regions(tensor: KVCacheTensor, num_blocks: int) -> list[Region]:
    """The regions of one set of layers.  Some layouts put heads before blocks and so have several
    regions per layer; each region is one run of all blocks."""
    stride = tensor.block_stride
    span = num_blocks * stride
    if tensor.layer_stride < span:
        return [Region(0, stride, stride, num_blocks)]
    count = len(tensor.layers) * tensor.layer_stride // span
    return [Region(tensor.offset + i * span, stride, stride, num_blocks) for i in range(count)]


def _overlap(regions: list[Region]) -> str | None:
    """Groups lie over each other, in equal regions: if regions overlap in part, the copy of a block
    would write to another block."""
    ordered = sorted(regions, key=lambda region: region.offset)
    for region, behind in pairwise(ordered):
        if behind.offset < region.offset + region.stride * region.num_blocks:
            return (
                f"the KV cache groups divide the memory of a block differently: {region}, {behind}"
            )
    return None


def _contradiction(
    tensor: KVCacheTensor, num_blocks: int, kv_caches: Mapping[str, torch.Tensor]
) -> str | None:
    """Compare the plan with the views that vLLM really made: every layer's first block must be
    where the plan puts it."""
    span = num_blocks * tensor.block_stride
    if tensor.layer_stride >= span and tensor.layer_stride % span:
        return f"layer stride {tensor.layer_stride} is not a multiple of {num_blocks} blocks"
    for index, name in enumerate(tensor.layers):
        if (cache := kv_caches.get(name)) is None:
            return f"the KV cache of layer {name} was not registered"
        planned = tensor.offset + index * tensor.layer_stride
        found = cache.data_ptr() - cache.untyped_storage().data_ptr()
        if found != planned:
            return f"layer {name} lies at byte {found} of the KV cache, not at {planned}"
    return None


class Memory(Protocol):
    """Memory that can be shared, such as that of the transport ``posix_shm``."""

    @property
    def buffer(self) -> memoryview: ...

    @property
    def address(self) -> int: ...


class shared_kv_memory:  # noqa: N801 - a context manager, used like a function
    """Context in which vLLM allocates its KV cache in memory from ``create``.

    For the connector's ``get_mem_pool_context``: the first call of the kind ``torch.zeros(nbytes,
    dtype=torch.int8, device=cpu)`` returns a tensor over ``create(nbytes).buffer``, which must be
    zeroed.  Afterwards ``memory`` is the created memory, or None, with the reason in ``failure``.
    """

    def __init__(self, create: Callable[[int], Memory]) -> None:
        self.memory: Memory | None = None
        self.failure = "vLLM did not allocate its KV cache in the known way"
        self._create = create

    def __enter__(self) -> shared_kv_memory:
        self._zeros = torch.zeros
        torch.zeros = self._allocate
        return self

    def __exit__(self, *_: object) -> None:
        torch.zeros = self._zeros

    def memory_of(self, placement: Placement) -> Memory:
        """Return the memory.  Raises TransportError if the KV cache does not really lie in it."""
        if self.memory is None:
            raise TransportError(self.failure)
        if self.memory.address != placement.address:
            raise TransportError("vLLM's KV cache is not what was allocated first")
        return self.memory

    def _allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.memory is None and _is_kv_cache(args, kwargs):
            try:
                self.memory = self._create(args[0])
                return torch.frombuffer(self.memory.buffer, dtype=torch.int8)
            except (KvshmError, OSError) as exc:
                self.failure = str(exc)
        return self._zeros(*args, **kwargs)


def _is_kv_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        len(args) == 1
        and type(args[0]) is int
        and kwargs.keys() == {"dtype", "device"}
        and kwargs["dtype"] is torch.int8
        and torch.device(kwargs["device"]).type == "cpu"
    )
