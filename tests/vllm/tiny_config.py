"""vLLM's real configuration objects for a tiny local Llama without weights; no engine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from .moved_names import moved

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
"""What of TINY_LLAMA is other in a Gemma 3, half of whose layers have a window."""

MAMBA = {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}
"""What is other in a Falcon H1, which has attention and Mamba in every layer."""


def engine_config(directory: Path, architecture: dict[str, Any], **given: Any) -> VllmConfig:
    """Return the configuration of an engine for a Llama written to ``directory``.

    Plugins stay out: a test calls ours itself.
    """
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA | architecture))
    arguments = {"skip_tokenizer_init": True, "load_format": "dummy", "block_size": 32, **given}
    with mock.patch.dict(os.environ, {"VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}):
        return EngineArgs(model=str(directory), **arguments).create_engine_config()


def spec(head_size: int = 16, num_kv_heads: int = 2, **more: Any) -> FullAttentionSpec:
    """Return the KV cache format of one layer."""
    shape = {"block_size": 32, "num_kv_heads": num_kv_heads, "head_size": head_size, **more}
    return FullAttentionSpec(dtype=torch.bfloat16, **shape)


def cache_config(
    config: VllmConfig,
    layout: str,
    num_blocks: int,
    *groups: Mapping[str, FullAttentionSpec | SlidingWindowSpec],
) -> KVCacheConfig:
    """Return how vLLM lays out a cache of ``num_blocks`` for groups of these layers."""
    made_of = []
    for specs in groups:
        same = len(set(specs.values())) == 1
        whole = next(iter(specs.values())) if same else UniformTypeKVCacheSpecs(32, dict(specs))
        made_of.append(KVCacheGroupSpec(list(specs), whole))
    config.cache_config.kv_cache_layout = layout
    block = max(sum(s.page_size_bytes for s in specs.values()) for specs in groups)
    made = moved("get_kv_cache_config_from_groups")(config, made_of, num_blocks * block)
    made.kv_cache_layout = layout
    made.hash_block_size = 32
    return made
