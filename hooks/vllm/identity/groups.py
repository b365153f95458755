"""vLLM's KV cache groups as kvshm's, and why some of them cannot be shared.

A group is shared if its full blocks do not change, and if kvshm knows which of them a prefix needs
(docs/kv-cache-groups.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvshm.halves import Group, Groups

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

ONE_GROUP = "--disable-hybrid-kv-cache-manager"
AT_BOUNDARIES = "align"
"""vLLM's mode in which the state in a block is the one behind the block's last token."""


class Rule(NamedTuple):
    """Which blocks a prefix needs in a group: the fields of ``Group`` that say so."""

    window: int = 0
    chunk: int = 0
    state: bool = False


def group_refusal(config: KVCacheConfig) -> str | None:
    """Return why one of the groups cannot be shared, or None."""
    try:
        for group in config.kv_cache_groups:
            if (wrong := _spec_refusal(group.kv_cache_spec)) is not None:
                return wrong
    except (ImportError, AttributeError) as exc:
        return f"this vLLM is not as kvshm knows it: {exc}"
    return None


def _spec_refusal(group_spec: Any) -> str | None:
    from vllm.v1.kv_cache_interface import iter_layer_specs

    rules = set()
    for spec in iter_layer_specs(group_spec):
        rule = _rule_of(spec)
        if not spec.prefix_cacheable:
            return f"vLLM keeps no prefixes of some layers ({type(spec).__name__})"
        if rule is None:
            return f"it is not known which blocks a prefix needs in a {type(spec).__name__}"
        if rule.state and spec.mamba_cache_mode != AT_BOUNDARIES:
            return f"states are not kept at the ends of blocks: the mode is {spec.mamba_cache_mode}"
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


def _rule_of(spec: Any) -> Rule | None:
    """The rule of one layer; None for an unknown kind."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return Rule()  # also of windowed layers, if vLLM keeps all of their blocks
    if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        return Rule(window=int(spec.sliding_window))
    if type(spec) is ChunkedLocalAttentionSpec:
        return Rule(chunk=int(spec.attention_chunk_size))
    return Rule(state=True) if type(spec) is MambaSpec else None


def is_single_full_attention(config: KVCacheConfig) -> bool:
    """Whether the cache has one group, of full attention.  Only for a cache that is not refused."""
    first, *others = config.kv_cache_groups
    return not others and _rule(first.kv_cache_spec) == Rule()


def _rule(group_spec: Any) -> Rule:
    """The rule of a group whose layers need the same blocks."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    return _rule_of(next(iter(iter_layer_specs(group_spec)))) or Rule()


def groups_of(config: KVCacheConfig, manager: Any) -> Groups | str:
    """Return the groups of vLLM's KV cache manager, or one sentence why they cannot be known.  Only
    for a cache that is not refused."""
    hash_size = int(config.hash_block_size or 0)
    groups = []
    try:
        managers = manager.coordinator.single_type_managers
        for number, (group, one) in enumerate(zip(config.kv_cache_groups, managers, strict=True)):
            size, rule = int(one.block_size), _rule(group.kv_cache_spec)
            ahead = 0 if rule.state else int(one.use_eagle)  # draft layers keep no states
            scale = size // hash_size
            groups.append(Group(number, size, scale, ahead=ahead, **rule._asdict()))
    except (AttributeError, ValueError, ZeroDivisionError) as exc:
        return f"the block manager of this vLLM is not as kvshm knows it: {exc}"
    return Groups(groups)
