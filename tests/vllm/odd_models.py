"""Tiny models that kvshm does not share: their configuration, for its refusals."""

from __future__ import annotations

from pathlib import Path


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
