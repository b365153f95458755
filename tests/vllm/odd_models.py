"""Tiny models that kvshm does not share: real engines, or their configuration, for its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_model import MAX_MODEL_LEN, SPECIAL_TOKENS, write_tokenizer


def write_hybrid(directory: Path) -> Path:
    """Write a Gemma 3 that alternates sliding windows with full attention, which vLLM keeps in
    two KV cache groups; returns ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=vocab_size - len(SPECIAL_TOKENS),
        pad_token_id=0,
        dtype="bfloat16",
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_encoder_decoder(directory: Path) -> Path:
    """Write the configuration alone of a Whisper; returns ``directory``."""
    from transformers import WhisperConfig

    shape = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 3200}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = WhisperConfig(**shape, **heads, **special, decoder_start_token_id=1, dtype="bfloat16")
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(directory)
    return directory
