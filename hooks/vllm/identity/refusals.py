"""Why an engine cannot share its cache: one sentence per reason, for the log.

Here are the reasons that vLLM's configuration shows.  Other modules refuse what only the cache and
the model show (several allocations, unknown weights), and an unknown vLLM (admission.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvshm.config import Auto
from kvshm.errors import TransportError
from kvshm.interfaces import AUTO_TRANSPORTS, choose_transport

from .groups import group_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ROCM = "rocm"


def config_refusal(
    vllm_config: VllmConfig, environ: Mapping[str, str], transport: str = Auto.AUTO
) -> str | None:
    """Return why an engine of this configuration can neither publish nor import, or None.

    ``transport``: the setting KVSHM_TRANSPORT.  Any process; reads only.  Raises ConfigError if the
    transport is not installed.
    """
    if vllm_config.model_config is None:
        return "there is no model"
    try:
        if refusal := _transport_refusal(cache_device(vllm_config), transport):
            return refusal
        held = (reason for reason, holds in _REASONS.items() if holds(vllm_config))
        return next(held, None) or _allocator_refusal(vllm_config, environ)
    except AttributeError as exc:
        return f"in this vLLM {type(exc.obj).__name__} has no {exc.name}"


def cache_device(vllm_config: VllmConfig) -> str:
    """Return the type of the device that holds the KV cache, as transports name it."""
    from vllm.platforms import current_platform

    device = str(vllm_config.device_config.device_type)
    # On ROCm too vLLM's device type is "cuda".
    return ROCM if device == "cuda" and current_platform.is_rocm() else device


def _transport_refusal(device: str, wanted: str) -> str | None:
    """Return why this transport does not work for KV caches on ``device``, or None."""
    if wanted == Auto.AUTO and device == ROCM:
        return "there is no transport for KV caches on AMD GPUs (ROCm)"
    if wanted == Auto.AUTO:
        known = device in AUTO_TRANSPORTS
        return None if known else "there is no transport for KV caches on this device"
    try:
        choose_transport(wanted, device)
    except TransportError as exc:
        return str(exc)
    return None


def cache_refusal(kv_cache_config: KVCacheConfig) -> str | None:
    """Return why a KV cache of this shape cannot be shared, or None."""
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    if (refusal := group_refusal(kv_cache_config)) is not None:
        return refusal
    return None if kv_cache_config.hash_block_size else "blocks are not hashed"


def _allocator_refusal(vllm_config: VllmConfig, environ: Mapping[str, str]) -> str | None:
    """vLLM itself stops with an error for any connector with this allocator setting."""
    if vllm_config.model_config.enable_cumem_allocator:
        return None
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in environ.get(name, ""):
            return f"{name} has expandable_segments:True, which may move the KV cache"
    return None


# The kind of model comes before prefix caching: vLLM itself turns prefix caching off for
# encoder-decoders and for some pooling models, and the log must name the model as the reason.
_REASONS: dict[str, Callable[[VllmConfig], bool]] = {
    "Ray runs the workers, perhaps on other machines (--distributed-executor-backend ray)": (
        lambda c: c.parallel_config.use_ray
    ),
    "another program launched the workers (--distributed-executor-backend external_launcher)": (
        lambda c: c.parallel_config.distributed_executor_backend == "external_launcher"
    ),
    "what a failed rank has reported is counted in a later step (--enable-fault-tolerance)": (
        lambda c: c.parallel_config.enable_fault_tolerance
    ),
    "experts move between ranks while the engine runs (--enable-eplb)": lambda c: (
        c.parallel_config.enable_eplb
    ),
    "prefill context parallelism divides prefixes over ranks "
    "(--prefill-context-parallel-size)": lambda c: (
        c.parallel_config.prefill_context_parallel_size > 1
    ),
    "the engine's workers run on several machines (--nnodes)": lambda c: (
        c.parallel_config.nnodes_within_dp > 1
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
