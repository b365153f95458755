"""A tiny vision model with random weights: images of noise, positions in three dimensions (M-RoPE),
and a processor that needs nothing but Pillow."""

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


def write_vision(directory: Path) -> Path:
    """Write the model, its tokenizer and its processor; returns ``directory``."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    _write_processor(directory)
    torch.manual_seed(0)
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": vocab_size - len(SPECIAL_TOKENS),
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
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.05 if "language_model" in name else 0.2  # an answer must depend on the image
            weight.copy_(torch.randn_like(weight) * scale + (weight.ndim == 1))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def image_token(vocab_size: int) -> int:
    """The id of the placeholder."""
    return vocab_size - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(IMAGE_TOKEN)


def _write_processor(directory: Path) -> None:
    path = directory / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["extra_special_tokens"] = {"image_token": IMAGE_TOKEN}
    path.write_text(json.dumps(tokenizer))
    (directory / "preprocessor_config.json").write_text(
        json.dumps({
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
            "size": {"shortest_edge": 28**2, "longest_edge": SIDE**2},
        })
    )  # fmt: skip
