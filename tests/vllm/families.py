"""Tiny models of the families that vLLM keeps in several KV cache groups, or in one of windows.

Every weight is random, also those that transformers begins at zero or one (biases, sinks, norms):
an answer must depend on every layer, so that a wrong block shows whichever group owns it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_model import MAX_MODEL_LEN, SPECIAL_TOKENS, write_model, write_tokenizer

FULL, WINDOW, CHUNK = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
STATE = "MambaSpec"
SLIDING, GLOBAL = "sliding_attention", "full_attention"

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _write(directory: Path, config_class: str, **architecture: Any) -> Path:
    """Write a model of this configuration with its tokenizer; returns ``directory``."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    torch.manual_seed(0)
    ids = {"vocab_size": vocab_size, "eos_token_id": vocab_size - len(SPECIAL_TOKENS)}
    config = getattr(transformers, config_class)(**SHAPE | ids | architecture)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight += torch.randn_like(weight) * (1.0 if name.endswith("sinks") else 0.05)
            else:
                weight.copy_(torch.randn_like(weight) * SHAPE["initializer_range"])
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_llama_with_scales(directory: Path) -> Path:
    """The tiny Llama with scales for a cache in fp8, other ones for keys and values."""
    from safetensors.torch import load_file, save_file
    from torch import tensor

    weights = write_model(directory) / "model.safetensors"
    tensors = load_file(weights)
    for name in [name for name in tensors if name.endswith("self_attn.k_proj.weight")]:
        at = name.removesuffix("k_proj.weight")
        tensors |= {f"{at}k_scale": tensor([0.02]), f"{at}v_scale": tensor([0.03])}
    save_file(tensors, weights, {"format": "pt"})
    path = directory / "config.json"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    cache = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    cache["kv_cache_scheme"] = {**scheme, "dynamic": False}
    about = json.loads(path.read_text()) | {"quantization_config": cache}
    path.write_text(json.dumps(about))
    return directory


def write_gemma3(directory: Path) -> Path:
    """Five layers with a window to one without, as in the models of Google's."""
    layers = [SLIDING] * 5 + [GLOBAL]
    return _write(
        directory,
        "Gemma3TextConfig",
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=256,
        query_pre_attn_scalar=64,
    )


def write_gpt_oss(directory: Path) -> Path:
    """Windows of 128 tokens in every other layer, attention sinks, experts."""
    layers = [SLIDING, GLOBAL] * 2
    return _write(
        directory,
        "GptOssConfig",
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=128,
        **EXPERTS,
    )


def write_llama4(directory: Path) -> Path:
    """Chunks of 384 tokens, each fourth layer without positions and chunks, experts."""
    return _write(
        directory,
        "Llama4TextConfig",
        num_hidden_layers=4,
        attention_chunk_size=384,
        intermediate_size_mlp=512,
        **EXPERTS | {"num_experts_per_tok": 1},
    )


def write_mistral(directory: Path) -> Path:
    """The same window in every layer, no multiple of a block."""
    return _write(directory, "MistralConfig", num_hidden_layers=4, sliding_window=300)


def write_gemma4(directory: Path) -> Path:
    """Layers without a window have larger heads, so a block of theirs holds fewer tokens."""
    layers = ([SLIDING] * 2 + [GLOBAL]) * 2
    return _write(
        directory,
        "Gemma4TextConfig",
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=256,
        global_head_dim=128,
        hidden_size_per_layer_input=0,
    )


def write_qwen3_next(directory: Path) -> Path:
    """Three layers of linear attention (gated delta net) to one of full attention, experts."""
    return _write(
        directory,
        "Qwen3NextConfig",
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
    )


def write_lfm2(directory: Path) -> Path:
    """Short convolutions, whose state is their last two inputs."""
    return _write(
        directory,
        "Lfm2Config",
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_dim=SHAPE["hidden_size"],
        block_dim=SHAPE["hidden_size"],
        block_ff_dim=SHAPE["intermediate_size"],
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    )


def write_nemotron_h(directory: Path) -> Path:
    """Layers of Mamba 2, of attention, and of nothing but an MLP."""
    return _write(
        directory,
        "NemotronHConfig",
        num_hidden_layers=4,
        hybrid_override_pattern="M*-M",
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=32,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
    )


def write_falcon_h1(directory: Path) -> Path:
    """Mamba 2 and attention side by side in every layer."""
    return _write(
        directory,
        "FalconH1Config",
        num_hidden_layers=2,
        mamba_d_ssm=512,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=2,
        mamba_d_state=32,
        mamba_chunk_size=64,
    )


def write_jamba(directory: Path) -> Path:
    """Mamba 1 in all layers but one, experts in every second."""
    return _write(
        directory,
        "JambaConfig",
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=4,
        mamba_dt_rank=16,
        use_mamba_kernels=False,
    )


def write_qwen3_moe(directory: Path, **architecture: Any) -> Path:
    """Six experts in every layer, of which each token takes two."""
    shape = {"num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 2}
    experts = {"moe_intermediate_size": 128, "norm_topk_prob": True}
    return _write(directory, "Qwen3MoeConfig", **shape | experts | architecture)


def write_qwen2_moe(directory: Path) -> Path:
    """Also an expert that every token takes, of which each rank has its own copy."""
    shape = {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2}
    experts = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    return _write(directory, "Qwen2MoeConfig", **shape | experts)


def write_deepseek(directory: Path) -> Path:
    """Groups of experts, a bias of the router, one dense layer, a shared expert, latents."""
    return _write(
        directory,
        "DeepseekV3Config",
        num_hidden_layers=2,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        n_shared_experts=1,
        moe_intermediate_size=128,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        num_key_value_heads=4,
        head_dim=32,
    )


MIXTURES = {
    "qwen3": write_qwen3_moe,
    "qwen2": write_qwen2_moe,
    "llama4": write_llama4,
    "deepseek": write_deepseek,
}
"""Mixtures of experts; only the first runs on several ranks of CPUs here."""

FEW_TOKENS = 24 * 128


@dataclass(frozen=True)
class Family:
    """A tiny model and how its engine is started."""

    name: str
    write: Callable[[Path], Path]
    groups: tuple[tuple[str, int], ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    nightly: bool = False

    @property
    def step(self) -> int:
        """The length of every hit is a multiple of this: vLLM's scheduler's block size."""
        return math.lcm(*(tokens for _, tokens in self.groups))

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.groups}

    @property
    def unit(self) -> int:
        """Tokens between two places at which another group may be in another block: states are
        kept at no others."""
        return self.step if STATE in self.kinds else 128

    @property
    def tail(self) -> int:
        """Tokens behind a block, after which a wrong block still shows: short convolutions forget
        their state in a few tokens."""
        return 2 if STATE in self.kinds else 40

    @property
    def few_blocks(self) -> int:
        """Little more than the longest prompt needs, so that blocks are reused all the time.  Of
        each group's states a request keeps two or three."""
        return sum(4 if kind == STATE else FEW_TOKENS // tokens for kind, tokens in self.groups)

    def published(self, prompt: Sequence[int]) -> int:
        """Return how many blocks of a prompt are published at least.  All that are published of a
        step are at once, and a step computes the whole prompt."""
        return len(self.groups)

    def shareable(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt a cache can give, never the last one."""
        return (len(prompt) - 1) // self.step * self.step


ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
UNCHUNKED = {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "0"}
UNSPLIT = {"VLLM_CPU_ATTN_SPLIT_KV": "0"}
"""In one group with layers that have none, vLLM 0.32's CPU kernel answers the same prompt with
other tokens each time where sinks meet a window, unless it splits no head's work."""

GDN = 384 if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else 256
"""Tokens in a block beside gated delta nets: vLLM's faster kernel for them keeps larger states."""
ONE = ((FULL, 128),)
SEVERAL_GROUPS = (
    Family("gemma3", write_gemma3, ((WINDOW, 128),) * 5 + ONE),
    Family("gpt-oss", write_gpt_oss, ((WINDOW, 128), *ONE), nightly=True),
    Family("llama4", write_llama4, ((CHUNK, 128),) * 3 + ONE),
    Family("mistral", write_mistral, ((WINDOW, 128),), nightly=True),
    Family("gemma4", write_gemma4, ((WINDOW, 256), (WINDOW, 256), *ONE)),
    Family("qwen3-next", write_qwen3_next, ((STATE, GDN),) * 3 + ((FULL, GDN),)),
    Family("lfm2", write_lfm2, ((STATE, 128),) * 3 + ONE, nightly=True),
    Family("nemotron-h", write_nemotron_h, ((STATE, 256),) * 2 + ((FULL, 256),)),
    Family("jamba", write_jamba, ((STATE, 128),) * 3 + ONE, nightly=True),
    Family("falcon-h1", write_falcon_h1, ((FULL, 256), (STATE, 256)), nightly=True),
)
MADE_ONE_GROUP = (
    Family("llama", write_model, ONE, nightly=True),
    Family("llama-fp8", write_llama_with_scales, ONE, {"kv_cache_dtype": "fp8"}),
    Family("gemma3-one-group", write_gemma3, ONE, ONE_GROUP, nightly=True),
    Family("gpt-oss-one-group", write_gpt_oss, ONE, ONE_GROUP, UNSPLIT, nightly=True),
    Family("llama4-one-group", write_llama4, ONE, {}, UNCHUNKED, nightly=True),
    Family("gemma4-one-group", write_gemma4, ONE, ONE_GROUP, nightly=True),
)
