"""The fingerprint's fields, read from vLLM: engines with equal fields can exchange block bytes.

Each rank contributes its weights, layers and kernels; the scheduler's process joins the ranks'
fields in rank order and adds those of the configuration.  Not among the fields: the tokenizer (keys
are token ids), the model's name and path, and the number of blocks.
"""

from __future__ import annotations

import inspect
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from hashlib import sha256
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvshm._base import fingerprint as names
from kvshm.halves import abi

from ...cpu_kernels import cpu_kernels
from .experts import held_experts, share_of, total, with_experts
from .weights import weights_digest

_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Entries of a Hugging Face configuration that do not describe the model, and its dtype."""


def with_none_hash(fields: dict[str, str]) -> dict[str, str] | None:
    """Return ``fields`` with NONE_HASH, the hash before the first block; None until vLLM has chosen
    it, after the connectors were made.  EngineCore process."""
    chosen = getattr(kv_cache_utils, "NONE_HASH", None)
    return None if chosen is None else {**fields, names.NONE_HASH: bytes(chosen).hex()}


def find_model(owners: Iterable[Any]) -> torch.nn.Module | None:
    """Return the worker's model, from the first owner that has one, or None."""
    models = (owner.get_model() for owner in owners)
    return next((model for model in models if isinstance(model, torch.nn.Module)), None)


def find_draft(owners: Iterable[Any]) -> torch.nn.Module | None:
    """Return the model that drafts for the worker's model, or None."""
    drafts = (owner.get_draft_model() for owner in owners if hasattr(owner, "get_draft_model"))
    return next((draft for draft in drafts if isinstance(draft, torch.nn.Module)), None)


def rank_fields(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    models: Sequence[torch.nn.Module],
    digests: dict[object, bytes] | None = None,
) -> dict[str, str]:
    """Return this rank's fields of the fingerprint.  ``models``: the worker's model and, if any,
    the model that drafts for it; ``digests`` gets one of every weight.  Worker only; blocks while
    it reads all weights once.  Raises WeightsUnknown."""
    model, dtype = models[0], vllm_config.model_config.dtype
    shares = (share_of(held_experts(m), str(i)) for i, m in enumerate(models))
    read = [weights_digest(model, digests, dtype) for model in models]
    unread = _unread_draft(vllm_config.speculative_config, models)
    return {
        names.EXPERTS: total(shares).hex(),
        names.WEIGHTS: " draft ".join([*read, *unread]),
        names.LAYERS: _short(_layers(kv_cache_config)),
        names.ATTENTION: _attention(vllm_config, kv_cache_config),
        names.HARDWARE: _hardware(),
        names.MAX_MODEL_LEN: _max_model_len(vllm_config.model_config, model),
    }


def scheduler_fields(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    ranks: Sequence[dict[str, str]],
    trusts_ids: bool = False,
) -> dict[str, str]:
    """Return all fields but NONE_HASH.  ``ranks``: the ranks' fields in rank order;
    ``trusts_ids``: KVSHM_TRUST_ITEM_IDS.  EngineCore process; reads only."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    own = {
        names.KVSHM_ABI: abi(),
        names.ENGINE: f"vllm {vllm.__version__}",
        names.MODEL: str(model.architecture),
        names.MODEL_CONFIG: _short(_model_config(model)),
        names.ROPE: _rope(model.hf_text_config),
        names.QUANTIZATION: _quantization(model),
        names.DTYPE: str(model.dtype),
        names.KV_DTYPE: _kv_dtype(cache, str(model.dtype)),
        names.LORA: _on_or_off(vllm_config.lora_config is not None),
        names.SPECULATIVE: _speculative(vllm_config.speculative_config),
        names.MULTIMODAL: _multimodal(model, trusts_ids),
        names.BLOCK_SIZE: f"{cache.block_size}, hashed {kv_cache_config.hash_block_size}",
        names.LAYOUT: str(kv_cache_config.kv_cache_layout),
        names.PARALLEL: _parallel(vllm_config.parallel_config),
        names.BATCH_INVARIANT: _on_or_off(envs.VLLM_BATCH_INVARIANT),
        names.EXECUTION: _execution(vllm_config) + _dispatch(vllm_config.parallel_config),
        names.HASH_ALGORITHM: str(cache.prefix_caching_hash_algo),
    }
    return own | _joined(ranks)


def _joined(ranks: Sequence[dict[str, str]]) -> dict[str, str]:
    """One value per field, joined in rank order; weights become one digest, and the shares of the
    experts their sum."""
    fields = sorted({name for rank in ranks for name in rank})
    joined = {name: [rank.get(name, "") for rank in ranks] for name in fields}
    shares = [bytes.fromhex(share) for share in joined.pop(names.EXPERTS, [])]
    return with_experts({}, shares) | {
        name: _short(values)
        if name == names.WEIGHTS
        else " | ".join(values if len(set(values)) > 1 else values[:1])
        for name, values in joined.items()
    }


def _on_or_off(on: bool) -> str:
    return "on" if on else "off"


def _model_config(model: Any) -> object:
    """The configuration after all overrides, from which the model was built."""
    return [_described(model.hf_config.to_dict()), bool(model.disable_sliding_window)]


def _described(config: Any) -> object:
    """A configuration's values, those of configurations within it, too."""
    if not isinstance(config, dict):
        return config
    return {k: _described(value) for k, value in config.items() if k not in _NOT_THE_MODEL}


def _rope(text_config: Any) -> str:
    keys = ("rope_parameters", "rope_scaling", "rope_theta")
    found = {key: getattr(text_config, key) for key in keys if getattr(text_config, key, None)}
    return _canonical(found) if found else "none"


def _quantization(model: Any) -> str:
    if model.quantization is None:
        return "none"
    return f"{model.quantization} {_short(getattr(model, 'quantization_config', None))}"


_SPELLINGS = {
    "half": "torch.float16",
    "float16": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "float": "torch.float32",
    "float32": "torch.float32",
    "fp8": "fp8_e4m3",
}


def _kv_dtype(cache: Any, model_dtype: str) -> str:
    """One name for each format; "auto" means the model's own dtype."""
    name = _SPELLINGS.get(cache.cache_dtype, str(cache.cache_dtype))
    name = "auto" if name == model_dtype else name
    skipped = list(cache.kv_cache_dtype_skip_layers)
    return f"{name}, not {' '.join(skipped)}" if skipped else name


_LENGTH_SCALED = ("dynamic", "longrope")


def _max_model_len(config: Any, model: torch.nn.Module) -> str:
    """The longest context if the model's code reads it, or cannot be read, or if it scales the
    positions; otherwise "any": it decides only when a request must end."""
    rope = _rope(config.hf_text_config)
    if any(kind in rope for kind in _LENGTH_SCALED):
        return str(config.max_model_len)
    modules = {type(part).__module__ for part in model.modules()}
    sources = [_source(name) for name in sorted(modules) if not name.startswith("torch.")]
    reads = any(source is None or "max_model_len" in source for source in sources)
    return str(config.max_model_len) if reads else "any"


def _source(module: str) -> str | None:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None


_WITHOUT_A_MODEL = {"ngram", "ngram_gpu", "suffix"}


def _speculative(config: Any) -> str:
    """Draft layers keep their KV in the same blocks, so the draft model counts."""
    if config is None or config.method in _WITHOUT_A_MODEL:
        return "off"
    draft = getattr(config, "draft_model_config", None)
    parts: list[object] = [_settings(config)]
    if draft is not None:
        # Of prompts that are longer it computes nothing.
        parts += [_model_config(draft), draft.max_model_len]
    return f"{config.method} {config.num_speculative_tokens} {_short(parts)}"


def _unread_draft(config: Any, models: Sequence[torch.nn.Module]) -> list[str]:
    """What stands for the weights of a draft model that vLLM does not show: where they are from."""
    shown = config is None or config.method in _WITHOUT_A_MODEL or len(models) > 1
    return [] if shown else [f"{config.model} {config.revision}"]


_GRAPH = "a graph replays the kernels that run without it; batches of any size occur anyway"
_NOTES = "says where something is stored or recorded, not what is computed"
_LAYERS = "the layers themselves, a field of their own"
_CACHE = "how processed inputs travel, and where they are kept"
_ELSEWHERE = "counts elsewhere: weights and configurations, whatever they are called"
_NO_MODEL = "of drafting without a model"
_DRAFTS = "which drafts there are, and which are accepted: only accepted tokens are published"

_LEFT_OUT = {
    "CompilationConfig": {
        "mode": "stands in the field in words",
        "custom_ops": "stand in the field in words, and count without a mode too",
        "inductor_compile_config": "counted without its functions, which inductor_passes names",
        "debug_dump_path": _NOTES,
        "cache_dir": _NOTES,
        "local_cache_dir": _NOTES,
        "compile_cache_save_format": _NOTES,
        "enabled_custom_ops": _NOTES,
        "disabled_custom_ops": _NOTES,
        "traced_files": _NOTES,
        "compilation_time": _NOTES,
        "encoder_compilation_time": _NOTES,
        "static_forward_context": _LAYERS,
        "static_all_moe_layers": _LAYERS,
        "fast_moe_cold_start": "how a layer is found while compiling",
        "cudagraph_mode": _GRAPH,
        "cudagraph_num_of_warmups": _GRAPH,
        "cudagraph_capture_sizes": _GRAPH,
        "cudagraph_copy_inputs": _GRAPH,
        "cudagraph_specialize_lora": _GRAPH,
        "cudagraph_mm_encoder": _GRAPH,
        "max_cudagraph_capture_size": _GRAPH,
        "encoder_cudagraph_token_budgets": _GRAPH,
        "encoder_cudagraph_max_vision_items_per_batch": _GRAPH,
        "encoder_cudagraph_max_frames_per_batch": _GRAPH,
        "decoder_replay_cudagraph_capture_sizes": _GRAPH,
        "compile_ranges_endpoints": "follows the largest batch, as the capture sizes do",
    },
    "KernelConfig": {
        "enable_cutedsl_warmup": "compiles sooner what is compiled on first use",
        "enable_jit_warmup": "compiles sooner what is compiled on first use",
    },
    "AttentionConfig": {
        "backend": "what was chosen is a field of its own",
        "backend_per_kind": "what was chosen is a field of its own",
    },
    "LoRAConfig": {
        "max_cpu_loras": "how many adapters are kept",
    },
    "SpeculativeConfig": {
        "model": _ELSEWHERE,
        "revision": _ELSEWHERE,
        "draft_model_config": _ELSEWHERE,
        "draft_load_config": _ELSEWHERE,
        "max_model_len": "what follows from it counts",
        "draft_parallel_config": "its size counts, by another name",
        "target_model_config": _ELSEWHERE,
        "target_parallel_config": _ELSEWHERE,
        "enforce_eager": _GRAPH,
        "prompt_lookup_max": _NO_MODEL,
        "prompt_lookup_min": _NO_MODEL,
        "suffix_decoding_max_tree_depth": _NO_MODEL,
        "suffix_decoding_max_cached_requests": _NO_MODEL,
        "suffix_decoding_max_spec_factor": _NO_MODEL,
        "suffix_decoding_min_token_prob": _NO_MODEL,
        "rejection_sample_method": _DRAFTS,
        "synthetic_acceptance_rates": _DRAFTS,
        "synthetic_acceptance_length": _DRAFTS,
        "draft_sample_method": _DRAFTS,
        "enable_adaptive_verification": _DRAFTS,
    },
    "MultiModalConfig": {
        "limit_per_prompt": "how many inputs a prompt may have",
        "mm_processor_cache_gb": _CACHE,
        "mm_processor_cache_type": _CACHE,
        "mm_shm_cache_max_object_size_mb": _CACHE,
        "mm_hasher_algorithm": _CACHE,
        "mm_tensor_ipc": _CACHE,
        "mm_ipc_gpu_memory_gb": _CACHE,
        "skip_mm_profiling": "how memory is measured at the start",
    },
}
"""Values that change no block, and why, by configuration.  All others count, new ones too."""


def _execution(vllm_config: VllmConfig) -> str:
    """How the model's operators become kernels; sizes of graphs and batches do not count."""
    compilation = vllm_config.compilation_config
    mode = str(getattr(compilation.mode, "name", compilation.mode)).lower()
    custom = sorted(set(compilation.custom_ops))
    parts: list[object] = [custom]
    parts += [_settings(vllm_config.kernel_config), _settings(vllm_config.attention_config)]
    # How states are computed and rounded: some of it stands in vLLM's additional_config.
    parts += [_settings(vllm_config.mamba_config), vllm_config.additional_config]
    if mode != "none":
        inductor = {k: v for k, v in compilation.inductor_compile_config.items() if not callable(v)}
        parts += [_settings(compilation), inductor]
    return f"{mode}, custom ops {' '.join(custom)[:80]}, {_short(parts)}"


_EXACT_DISPATCH = "allgather_reducescatter"


def _dispatch(config: Any) -> str:
    """How tokens travel to experts of other ranks, if some rounding may come with it."""
    travels = config.enable_expert_parallel and config.data_parallel_size > 1
    backend = str(config.all2all_backend)
    return f", experts by {backend}" if travels and backend != _EXACT_DISPATCH else ""


def _settings(config: Any) -> dict[str, object]:
    """A configuration's values, without those in _LEFT_OUT."""
    left_out = _LEFT_OUT.get(type(config).__name__, {})
    return {n: getattr(config, n) for n in config.__dataclass_fields__ if n not in left_out}


def _multimodal(model: Any, trusts_ids: bool) -> str:
    """How the model's other inputs are encoded.  Digests of what it gets cover how they were
    processed; identifiers do not: with these the model's path and revision count."""
    if not model.is_multimodal_model:
        return "none"
    encoding = _settings(model.multimodal_config)
    if trusts_ids:
        return f"by identifier {_short([str(model.model), str(model.revision), encoding])}"
    return f"by contents {_short(encoding)}"


def adapter_kernels(lora_config: Any) -> str:
    """How an engine computes with adapters: requests without one do not depend on it."""
    return _short(_settings(lora_config))


def _parallel(config: Any) -> str:
    return (
        f"tp {config.tensor_parallel_size}, pp {config.pipeline_parallel_size}, "
        f"dcp {config.decode_context_parallel_size}, "
        f"pcp {config.prefill_context_parallel_size}, "
        f"interleave {config.cp_kv_cache_interleave_size}"
    )


def _layers(kv_cache_config: KVCacheConfig) -> object:
    """What a block holds, in order: layers, page sizes and the shape of a page."""
    return [
        [list(group.layer_names) for group in kv_cache_config.kv_cache_groups],
        [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups],
        [list(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors],
    ]


def _attention(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The kernels that write the blocks, with the instruction set, which decides on CPUs how keys
    are packed."""
    layers = vllm_config.compilation_config.static_forward_context
    found = set()
    for group in kv_cache_config.kv_cache_groups:
        for layer in (layers[name] for name in group.layer_names if name in layers):
            backend = layer.get_attn_backend().__qualname__
            found.add(f"{backend}/{isa}" if (isa := getattr(layer, "isa", None)) else backend)
    return " ".join(sorted(found))


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
    return f"{platform.machine()} {cpu_kernels()}"


def _short(value: object) -> str:
    return sha256(_canonical(value).encode()).hexdigest()[:32]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> object:
    """Turn a value that JSON does not know into text that is equal in every process."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "__dataclass_fields__"):
        return [
            type(value).__qualname__,
            {n: getattr(value, n) for n in value.__dataclass_fields__},
        ]
    if isinstance(value, set | frozenset):
        return sorted(_canonical(item) for item in value)
    if isinstance(value, torch.dtype | Enum):
        return str(value)
    return [type(value).__qualname__, vars(value) if hasattr(value, "__dict__") else []]
