"""Small local models in the place of those that vLLM's tests name from a hub.

vLLM itself replaces the names: VLLM_MODEL_REDIRECT_PATH names a file with what stands for what.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tiny_model import write_model, write_tokenizer

from tests.vllm.families import write_qwen3_next

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "vocab_size": 51200,
}
LIKE_LLAMA = ("meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen1.5-7B")
"""Of these no more matters than that they have full attention."""
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TEXT}
LIKE_OPT = ("facebook/opt-125m", "facebook/opt-350m")
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LIKE_LLAMA, LLAMA),
    **dict.fromkeys(LIKE_OPT, OPT),
}


def write_models(directory: Path) -> Path:
    """Write them into ``directory``; return the file for VLLM_MODEL_REDIRECT_PATH."""
    write_model(directory / "llama")
    local = {}
    for name, config in CONFIGS.items():
        model = directory / name.split("/")[1]
        model.mkdir(exist_ok=True)
        write_tokenizer(model)
        (model / "config.json").write_text(json.dumps(config))
        local[name] = str(model.resolve())
    states = directory / "Qwen3-Next-80B-A3B-Instruct"
    states.mkdir(exist_ok=True)
    local[f"Qwen/{states.name}"] = str(write_qwen3_next(states).resolve())
    redirect = directory / "redirect.json"
    redirect.write_text(json.dumps(local))
    return redirect


if __name__ == "__main__":
    print(write_models(Path(sys.argv[1])))
