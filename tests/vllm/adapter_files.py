"""Random LoRA adapters of the tiny Llama (tiny_model.py), as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES = {"q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128), "o_proj": (256, 256)}
"""Of what it adapts: inputs and outputs."""
RANK = 8


def write_adapter(directory: Path, seed: int, **config: Any) -> Path:
    """Write an adapter whose answers are others than the model's; returns ``directory``."""
    import torch
    from safetensors.torch import save_file

    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, (inputs, outputs) in SHAPES.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                weight = torch.randn(shape, generator=drawn) * 0.2
                tensors[f"{at}.lora_{half}.weight"] = weight.to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none", **config}
    about = {"target_modules": list(SHAPES), "task_type": "CAUSAL_LM", **about}
    (directory / "adapter_config.json").write_text(json.dumps(about))
    return directory
