"""Configurations of the architectures in vLLM's registry: the defaults of transformers' and vLLM's
classes with few layers, and what these classes leave to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from vllm.transformers_utils.config import _CONFIG_REGISTRY

LAYERS = 4
COUNTS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers",
    "decoder_layers",
)  # fmt: skip
"""Names of the number of layers."""

OTHER_TYPES = {
    "ChatGLMForConditionalGeneration": "chatglm",
    "ChatGLMModel": "chatglm",
    "ExaoneMoEForCausalLM": "exaone_moe",
    "BagelForConditionalGeneration": "bagel",
    "GPT2LMHeadModel": "gpt2",
    "Glm5NextForCausalLM": "glm5_next_text",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "LLaMAForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4_text",
    "MiMoV2ForCausalLM": "mimo_v2_flash",
    "MistralLarge3ForCausalLM": "deepseek_v3",
    "MossTranscribeDiarizeForConditionalGeneration": "moss_transcribe_diarize",
    "MuseGlimmerForCausalLM": "muse_glimmer",
    "OpenVLAForActionPrediction": "openvla",
    "PhiMoEForCausalLM": "phimoe",
    "Qwen2_5OmniModel": "qwen2_5_omni",
    "Qwen3ASRRealtimeGeneration": "qwen3_asr",
    "Qwen4ExpForCausalLM": "qwen4_exp_text",
}
"""The configuration's type of architectures that transformers knows under another one, or not."""

CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_hidden_layers": LAYERS,
}
MIMO: dict[str, Any] = {
    "hybrid_layer_pattern": [0, 1, 1, 0], "layernorm_epsilon": 1e-05, "swa_head_dim": 192,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "sliding_window_size": 128,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1,
    },
    "ChatGLMForConditionalGeneration": {"original_rope": True, "tie_word_embeddings": False},
    "ChatGLMModel": {"original_rope": True, "tie_word_embeddings": False},
    "CohereCompassForConditionalGeneration": {
        "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True},
    },
    "Gemma4ForConditionalGeneration": {
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 768},
    },
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128, "use_qk_norm": True}},
    "Glm5NextForCausalLM": {
        "mhc": False, "mla_use_nope": True, "indexer_rope_interleave": True,
        "topk_method": "greedy", "scoring_func": "sigmoid",
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1, "expert_hidden_dim": 512, "route_norm": True},
    "JambaForCausalLM": {"num_hidden_layers": 8},
    "KimiLinearForCausalLM": {
        "mla_use_nope": True, "full_attn_layers": [4], "qk_nope_head_dim": 128, "num_experts": 8,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    "Lfm2ForCausalLM": {**CONVOLUTIONS, "conv_dim": 2560, "block_dim": 2560},
    "Lfm2MoeForCausalLM": CONVOLUTIONS,
    "Lfm2VlForConditionalGeneration": {
        "text_config": {**CONVOLUTIONS, "conv_dim": 2560, "block_dim": 2560},
    },
    "LongcatFlashForCausalLM": {
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity",
    },
    "MiMoV2FlashForCausalLM": MIMO,
    "MiMoV2ForCausalLM": MIMO,
    "MiniMaxM2ForCausalLM": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "NemotronHForCausalLM": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "hybrid_override_pattern": "M-*M", "num_hidden_layers": LAYERS,
    },
    "Qwen3VLMoeForConditionalGeneration": {"text_config": {"norm_topk_prob": True}},
    "Qwen4ExpForCausalLM": {"output_gate_type": "sigmoid"},
    "Qwen4ExpForConditionalGeneration": {"text_config": {"output_gate_type": "sigmoid"}},
}  # fmt: skip
"""What the classes leave to a checkpoint, or what shows more kinds of layers than their default."""

LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "norm_topk_prob": True, "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "score_function": "sigmoid",
    "use_qk_norm": True, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0,
    "output_dropout": 0.0, "norm_head": False, "moe_router_enable_expert_bias": True,
}  # fmt: skip
LATENTS: dict[str, Any] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "rotary_dim": 64, "partial_rotary_factor": 0.5,
}  # fmt: skip
WRITTEN: dict[str, dict[str, Any]] = {
    "BailingMoeForCausalLM": {"model_type": "bailing_moe", **EXPERTS},
    "BailingMoeV2ForCausalLM": {"model_type": "bailing_moe", **EXPERTS},
    "BailingMoeV2_5ForCausalLM": {
        "model_type": "bailing_hybrid", **EXPERTS, **LATENTS, "layer_group_size": 4,
        "group_norm_size": 4, "linear_silu": False, "num_nextn_predict_layers": 0,
    },
    "DeepseekForCausalLM": {
        "model_type": "deepseek", **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1,
        "moe_layer_freq": 1,
    },
    "DeepseekV4ForCausalLM": {
        "model_type": "deepseek_v4", "num_hidden_layers": 5, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
        "o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128,
        "compress_ratios": [0, 4, 128, 4, 128], "index_n_heads": 64, "index_head_dim": 128,
        "index_topk": 512, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 512, "num_hash_layers": 1, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "swiglu_limit": 10.0, "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "compress_rope_theta": 160000, "expert_dtype": "fp8", "num_nextn_predict_layers": 0,
        "max_position_embeddings": 65536, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 4096},
    },
    "ExaoneForCausalLM": {
        "model_type": "exaone", "num_layers": LAYERS, "activation_function": "silu",
        "layer_norm_epsilon": 1e-5,
    },
    "InternLM2ForCausalLM": {"model_type": "internlm2", "bias": False},
    "InternLM3ForCausalLM": {"model_type": "internlm3"},
    "IQuestCoderForCausalLM": {"model_type": "iquestcoder"},
    "IQuestLoopCoderForCausalLM": {
        "model_type": "iquestloopcoder", "loop_num": 2, "loop_window_size": 64,
    },
    "MiniCPMForCausalLM": {
        "model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    },
    "MiMoForCausalLM": {"model_type": "mimo", "attention_bias": True},
    "OrionForCausalLM": {"model_type": "orion"},
    "PanguEmbeddedForCausalLM": {"model_type": "pangu", "bias": True},
    "Param2MoEForCausalLM": {"model_type": "param2moe", **EXPERTS, "rope_theta": 1e4},
    "SarvamMoEForCausalLM": {"model_type": "sarvam_moe", **EXPERTS},
    "SolarForCausalLM": {
        "model_type": "solar", "bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [3], "bskcn_4": [3],
        "bskcn_tv": [0.9, 0.8], "attention_bias": False, "mlp_bias": False,
    },
    "TeleChat2ForCausalLM": {
        "model_type": "telechat", "n_layer": LAYERS, "n_head": 32, "ffn_hidden_size": 11008,
        "layer_norm_epsilon": 1e-5,
    },
    "TeleChat3ForCausalLM": {"model_type": "telechat3"},
    "TeleFLMForCausalLM": {"model_type": "teleflm", "use_mup": False},
}  # fmt: skip
"""Of architectures without a configuration class here: what is other than in LLAMA."""


def configuration(architecture: str) -> dict[str, Any] | None:
    """Return a configuration of the architecture, None if no class of one is installed.  Raises
    whatever the class raises."""
    if architecture in WRITTEN:
        return {**LLAMA, **WRITTEN[architecture]}
    kind = OTHER_TYPES.get(architecture) or _TYPES.get(architecture)
    if kind is None:
        return None
    of_kind = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else _CONFIG_REGISTRY[kind]
    made = {**shrunk(of_kind().to_dict()), "model_type": kind}
    for key, value in MORE.get(architecture, {}).items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = made[key] | value if both else value
    return made


def _types() -> dict[str, str]:
    """The configuration's type of each architecture that transformers knows."""
    types: dict[str, str] = {}
    for name in dir(modeling_auto):
        if name.endswith("MAPPING_NAMES"):
            for kind, classes in getattr(modeling_auto, name).items():
                for one in [classes] if isinstance(classes, str) else classes:
                    types.setdefault(one, kind)
    return types


_TYPES = _types()


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with so few layers that each kind of layer is among them."""
    count = next((config[name] for name in COUNTS if isinstance(config.get(name), int)), 0)
    lists = [v for v in config.values() if isinstance(v, list) and count and len(v) == count]
    kept = max([min(count, LAYERS), *map(_until_each_was_there, lists)])
    small: dict[str, Any] = {}
    for key, value in config.items():
        if key == "per_layer_config":  # by number of the layer; the lists say the same
            continue
        if isinstance(value, dict):
            small[key] = shrunk(value)
        elif isinstance(value, list) and value and len(value) == count:
            small[key] = value[:kept]
        else:
            small[key] = kept if key in COUNTS and isinstance(value, int) else value
    return small


def _until_each_was_there(layers: list[Any]) -> int:
    kinds = list(map(str, layers))
    return max(map(kinds.index, set(kinds))) + 1
