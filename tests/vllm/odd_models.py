"""Tiny models that kvshm does not share: their configuration, for its refusals."""

from __future__ import annotations

from pathlib import Path


def write_states(directory: Path) -> Path:
    """Write the configuration alone of a Falcon H1, which has Mamba layers; returns
    ``directory``."""
    from transformers import FalconH1Config

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    mamba = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
    config = FalconH1Config(**shape, **heads, **mamba, vocab_size=3200, dtype="bfloat16")
    config.architectures = ["FalconH1ForCausalLM"]
    config.save_pretrained(directory)
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
