"""Why kvshm stays out of an engine: one sentence per reason, for the log.

These are the reasons that show in vLLM's configuration; what shows only in the cache and the
model themselves (several allocations, unknown weights) is refused where it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

OLDEST_VLLM = (0, 32)
SHAREABLE_DEVICES = ("cpu", "cuda")
"""vLLM's device types for which there is a transport."""


def version_refusal(version: tuple[int | str, ...]) -> str | None:
    """Return why this vLLM version cannot be used, or None.  Versions like (0, 0, "dev") of
    a development tree are taken as new enough."""
    if version[:2] == (0, 0) or version[:2] >= OLDEST_VLLM:
        return None
    found = ".".join(map(str, version))
    return f"vLLM {found} is too old, kvshm needs {OLDEST_VLLM[0]}.{OLDEST_VLLM[1]} or newer"


def config_refusal(vllm_config: VllmConfig, environ: Mapping[str, str]) -> str | None:
    """Return why an engine of this configuration cannot share its prefix cache, or None.

    Any process; reads only.  With a reason, a connector that vLLM was told to use anyway
    must neither publish nor import.
    """
    if vllm_config.model_config is None:
        return "there is no model"
    try:
        held = (reason for reason, holds in _REASONS.items() if holds(vllm_config))
        return next(held, None) or _allocator_refusal(vllm_config, environ)
    except AttributeError as exc:
        return f"in this vLLM {type(exc.obj).__name__} has no {exc.name}"


def touchpoint_refusal() -> str | None:
    """Return what of vLLM's interface for connectors is not as kvshm knows it, or None.

    Imports the connector.  It is not asked where vLLM was told to use the connector: then
    vLLM's own error says so.
    """
    try:
        from .connector import KvshmConnector
    except ImportError as exc:
        return f"this vLLM is not as kvshm knows it: {exc}"
    unknown = ", ".join(sorted(getattr(KvshmConnector, "__abstractmethods__", ())))
    return f"this vLLM wants connectors to have {unknown}" if unknown else None


def cache_refusal(kv_cache_config: KVCacheConfig) -> str | None:
    """Return why a KV cache of this shape cannot be shared, or None.

    A prefix is one chain of blocks only where every layer keeps every block of it.
    """
    try:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, iter_layer_specs
    except ImportError as exc:
        return f"this vLLM is not as kvshm knows it: {exc}"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups, kvshm shares caches with exactly one"
    for spec in iter_layer_specs(groups[0].kv_cache_spec):
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec) or spec.non_causal:
            return f"some layers have no full causal attention: {spec}"
    if kv_cache_config.hash_block_size is None:
        return "blocks are not hashed"
    return None


def export_refusal(vllm_config: VllmConfig) -> str | None:
    """Return why this engine may import but not export, or None."""
    if vllm_config.scheduler_config.policy == "priority":
        return "priority scheduling leaves hashed blocks behind that were never computed"
    return None


def _allocator_refusal(vllm_config: VllmConfig, environ: Mapping[str, str]) -> str | None:
    """vLLM itself stops with an error for any connector with this allocator setting."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if vllm_config.model_config.enable_cumem_allocator:
        return None
    for name in names:
        if "expandable_segments:True" in environ.get(name, ""):
            return f"{name} has expandable_segments:True, which may move the KV cache"
    return None


# The kind of model comes before what vLLM makes of it: without being told to, it turns prefix
# caching off for encoder-decoders and for some pooling models.
_REASONS: dict[str, Callable[[VllmConfig], bool]] = {
    "there is no transport for KV caches on this device": lambda c: (
        c.device_config.device_type not in SHAREABLE_DEVICES
    ),
    "Ray runs the workers, perhaps on other machines (--distributed-executor-backend ray)": (
        lambda c: c.parallel_config.use_ray
    ),
    "the model is an encoder-decoder": lambda c: c.model_config.is_encoder_decoder,
    "the model is a pooling model": lambda c: c.model_config.runner_type == "pooling",
    "the model is a diffusion model, whose blocks change after they are full": lambda c: (
        c.model_config.is_diffusion
    ),
    "prefix caching is off (--no-enable-prefix-caching)": lambda c: (
        not c.cache_config.enable_prefix_caching
    ),
    "ReplaySSM excludes KV connectors (--use-replayssm)": lambda c: c.cache_config.use_replayssm,
    "HiSparse keeps part of the KV cache elsewhere": lambda c: (
        c.attention_config.hisparse_config is not None
    ),
    "auxiliary outputs exist only for computed tokens (--enable-return-routed-experts)": lambda c: (
        c.aux_output_config.enabled
    ),
}
