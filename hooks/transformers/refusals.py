"""Why a manager's cache is not shared."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    BlockLedger,
    CacheAllocator,
)

_KNOWN = {
    (PagedAttentionCache, "search_prefix_match"): ("request_id", "prompt_ids"),
    (PagedAttentionCache, "mark_complete_blocks"): ("state", "complete_blocks"),
    (PagedAttentionCache, "free_blocks"): ("request_id", "no_cache"),
    (PagedAttentionCache, "free_all_requests"): ("clear_ledgers",),
    (PagedAttentionCache, "evict_cached_blocks"): (),
    (PagedAttentionCache, "reset"): (),
    (CacheAllocator, "match_prefix_blocks"): ("prompt_ids",),
    (CacheAllocator, "acquire_prefix_blocks"): ("request_id", "prefix_len", "block_ids"),
    (BlockLedger, "release"): ("block_id", "no_cache"),
    (BlockLedger, "register_new_hash"): ("block_id", "block_hash"),
    (BlockLedger, "evict_cached_blocks"): (),
    (BlockLedger, "reset"): (),
}
"""What kvshm overrides or calls, with the names of its parameters: no part of it is public."""


_WANTED = (
    "_create_batch_processor",
    "_fail_all_remaining_requests",
    "_generation_thread",
    "pause",
    "stop",
    "destroy",
    "num_return_sequences",
)
"""What kvshm uses of a manager."""


def interface_refusal() -> str | None:
    """Return what is not as kvshm knows it in this version of transformers, or None."""
    for (owner, name), wanted in _KNOWN.items():
        if (method := getattr(owner, name, None)) is None:
            return f"this transformers is not as kvshm knows it: {owner.__name__} has no {name}"
        found = tuple(inspect.signature(method).parameters)[1:]
        if found != wanted:
            call = f"{name}({', '.join(found)})"
            return f"this transformers is not as kvshm knows it: {owner.__name__}.{call}"
    return None


def manager_refusal(manager: Any) -> str | None:
    """Return why kvshm cannot get at the cache that a manager will make, or None."""
    if manager.batch_processor is not None:
        return made_already(manager)
    for name in _WANTED:
        if not hasattr(manager, name):
            return f"this transformers is not as kvshm knows it: its managers have no {name}"
    return None


def made_already(manager: Any) -> str:
    """Return why the cache of a manager that was made without kvshm is not shared."""
    model = getattr(manager, "model", None)
    if getattr(model, "_cached_continuous_batching_manager", None) is manager:
        return (
            "the manager was kept by its model, with a cache that is not shared; call the model's "
            "destroy_cached_continuous_batching_manager(), and share() its next manager"
        )
    return "the manager has made its cache already; call share() before it starts or warms up"


def cache_refusal(processor: Any, model: Any) -> str | None:
    """Return why the cache of a batch processor cannot be shared, or None."""
    cache, kinds = processor.cache, sorted(processor.cache.cache_allocators)
    device = getattr(cache.device, "type", str(cache.device))
    if device != "cpu":
        return f"the cache is on {device}; of transformers' caches only those on CPUs are shared"
    if processor.distributed_helper.tp_size > 1:
        return "tensor parallelism: one process has only a part of each block"
    if kinds != [FULL_ATTENTION]:
        return f"the model has layers of {', '.join(kinds)}; only full_attention is shared"
    if not cache.use_prefix_sharing:
        return "allow_block_sharing is off, so transformers keeps no prefixes"
    if processor.use_async_batching:
        return "use_async_batching is on: blocks are marked as complete before they are written"
    return model_refusal(model)


def model_refusal(model: Any) -> str | None:
    """Return why blocks would depend on more than what identity.py reads of the model, or None."""
    parts = dict(model.named_modules())
    loaded = getattr(model, "_hf_peft_config_loaded", False)
    if loaded or any(type(part).__module__.startswith("peft.") for part in parts.values()):
        return "the model has adapters, and blocks do not say with which they were computed"
    if _global_forward_hooks or _global_forward_pre_hooks:
        return "global module hooks of torch may change what is computed, and cannot be compared"
    for name, part in parts.items():
        who = f"the model's part {name or type(part).__name__!r}"
        if part._forward_hooks or part._forward_pre_hooks:
            return f"{who} has forward hooks, and what they do cannot be compared"
        if "forward" in vars(part):
            return f"{who} has a forward of its own, and what it does cannot be compared"
        if part._compiled_call_impl is not None:
            return f"{who} is compiled by torch, and what it was compiled to cannot be compared"
    if reason := _tensors_refusal(model):
        return reason
    for kind in _rope_types(model, parts.values()):
        if "dynamic" in kind or kind == "longrope":
            return f"the model's RoPE is {kind}: its frequencies depend on the requests' lengths"
    return None


def _tensors_refusal(model: Any) -> str | None:
    """Why the digest of parameters and buffers would not cover all that the model stores."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    for name in model.state_dict(keep_vars=True):
        if name not in named:
            return f"the model stores {name!r}, which is no parameter or buffer (is it quantized?)"
    for name, tensor in named.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            return f"the tensor {name!r} is a {kind}, whose contents cannot be compared"
    return None


def _rope_types(model: Any, parts: Iterable[Any]) -> Iterator[str]:
    """The kinds of rotary embedding in the configuration and the modules."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    for kinds in (parameters, *(getattr(part, "rope_type", None) for part in parts)):
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            kind = kind.get("rope_type") if isinstance(kind, dict) else kind
            if isinstance(kind, str):
                yield kind
