"""Tiny models with random weights that see or hear: one of images, positions in three dimensions
(M-RoPE), with a processor that needs nothing but Pillow; and one of sounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_model import MAX_MODEL_LEN, SPECIAL_TOKENS, write_tokenizer

SIDE = 336
"""Pixels of an image in each direction."""
PATCHES = SIDE // 28
"""Patches of an image in each direction, four of the encoder's in one."""
IMAGE_TOKENS = PATCHES**2
IMAGE_TOKEN = SPECIAL_TOKENS[1]


def _text(vocab_size: int) -> dict[str, Any]:
    """The part that reads and answers."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": vocab_size - len(SPECIAL_TOKENS),
    }


def _draw(model: Any) -> None:
    """Random weights; an answer must depend on what was seen or heard."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.05 if "language_model" in name else 0.2
            weight.copy_(torch.randn_like(weight) * scale + (weight.ndim == 1))


def write_vision(directory: Path) -> Path:
    """Write the model, its tokenizer and its processor; returns ``directory``."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    _write_processor(directory)
    torch.manual_seed(0)
    text = {
        **_text(vocab_size),
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
    }
    config = transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image_token(vocab_size),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    _draw(model)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


SOUND_TOKENS = 5 * 25
"""Of five seconds; the rest of half a minute is padded."""


def write_hearing(directory: Path) -> Path:
    """Write a model of sounds, its tokenizer and its processor; returns ``directory``.  The
    placeholder is that of images."""
    import torch
    import transformers
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    _name_placeholder(directory, "audio_token")
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 32}
    about = {**extractor, "processor_class": "Qwen2AudioProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(about))
    torch.manual_seed(0)
    sound = {
        "num_mel_bins": 32,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
    }
    config = transformers.Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        text_config={
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            **_text(vocab_size),
        },
        audio_config={"model_type": "qwen2_audio_encoder", **sound},
        audio_token_index=image_token(vocab_size),
        dtype="bfloat16",
    )
    model: Any = transformers.Qwen2AudioForConditionalGeneration(config)
    _draw(model)
    names = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    tensors = {}
    for name, tensor in model.to(torch.bfloat16).state_dict().items():
        for ours, on_disk in names.items():  # as in the models that there are
            name = name.replace(ours, on_disk)
        tensors[name.removeprefix("model.")] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config.save_pretrained(directory)
    return directory


def image_token(vocab_size: int) -> int:
    """The id of the placeholder."""
    return vocab_size - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(IMAGE_TOKEN)


def _name_placeholder(directory: Path, kind: str) -> None:
    path = directory / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["extra_special_tokens"] = {kind: IMAGE_TOKEN}
    path.write_text(json.dumps(tokenizer))


def _write_processor(directory: Path) -> None:
    _name_placeholder(directory, "image_token")
    (directory / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
            "size": {"shortest_edge": 28**2, "longest_edge": SIDE**2},
        })
    )  # fmt: skip
