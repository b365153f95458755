"""vLLM's KV cache groups as kvshm's, and why some of them cannot be shared.

A group is shared if its full blocks do not change, and if kvshm knows which of them a prefix needs
(docs/kv-cache-groups.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvshm.halves import Group, Groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

ONE_GROUP = "--disable-hybrid-kv-cache-manager"
STATE = (
    "some layers keep a state instead of blocks (Mamba, linear attention); to share them, the "
    "states at the ends of prefixes would have to be published"
)


def group_refusal(config: KVCacheConfig) -> str | None:
    """Return why one of the groups cannot be shared, or None."""
    try:
        from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, iter_layer_specs

        groups = config.kv_cache_groups
        specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
        if any(isinstance(spec, MambaSpec) for spec in specs):
            return STATE
        for group in groups:
            if (wrong := _spec_refusal(group.kv_cache_spec)) is not None:
                return wrong
        if any(isinstance(spec, AttentionSpec) for spec in specs) and config.needs_kv_cache_zeroing:
            return "vLLM zeroes new blocks of this KV cache, because its layers differ in precision"
    except (ImportError, AttributeError) as exc:
        return f"this vLLM is not as kvshm knows it: {exc}"
    return None


def _spec_refusal(group_spec: Any) -> str | None:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    rules = set()
    for spec in iter_layer_specs(group_spec):
        rule = _window_and_chunk(spec)
        if not spec.prefix_cacheable:
            return f"vLLM keeps no prefixes of some layers ({type(spec).__name__})"
        if rule is None:
            return f"it is not known which blocks a prefix needs in a {type(spec).__name__}"
        if getattr(spec, "non_causal", False):
            return "some layers have no causal attention"
        if getattr(spec, "extra_retained_tokens", 0):
            return (
                "speculative decoding with several draft layers keeps blocks behind the sliding "
                f"window; {ONE_GROUP} makes one group that is shared"
            )
        rules.add(rule)
    if len(rules) > 1:
        return f"the layers of one KV cache group need different blocks: {sorted(rules)}"
    return None


def _window_and_chunk(spec: Any) -> tuple[int, int] | None:
    """Tokens of one layer's window and chunk, 0 if it has none; None for an unknown kind."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return 0, 0  # also of windowed layers, if vLLM keeps all of their blocks
    if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        return int(spec.sliding_window), 0
    if type(spec) is ChunkedLocalAttentionSpec:
        return 0, int(spec.attention_chunk_size)
    return None


def is_single_full_attention(config: KVCacheConfig) -> bool:
    """Whether the cache has one group, of full attention.  Only for a cache that is not refused."""
    first, *others = config.kv_cache_groups
    return not others and _rule(first.kv_cache_spec) == (0, 0)


def _rule(group_spec: Any) -> tuple[int, int]:
    """``_window_and_chunk`` of a group whose layers need the same blocks."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return _window_and_chunk(next(iter(iter_layer_specs(group_spec)))) or (0, 0)


def groups_of(config: KVCacheConfig, manager: Any) -> Groups | str:
    """Return the groups of vLLM's KV cache manager, or one sentence why they cannot be known.  Only
    for a cache that is not refused."""
    hash_size = int(config.hash_block_size or 0)
    groups = []
    try:
        managers = manager.coordinator.single_type_managers
        for number, (group, one) in enumerate(zip(config.kv_cache_groups, managers, strict=True)):
            size, ahead = int(one.block_size), int(one.use_eagle)
            rule = _rule(group.kv_cache_spec)
            groups.append(Group(number, size, size // hash_size, *rule, ahead=ahead))
    except (AttributeError, ValueError, ZeroDivisionError) as exc:
        return f"the block manager of this vLLM is not as kvshm knows it: {exc}"
    return Groups(groups)
