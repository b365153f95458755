"""Tiny models with something that drafts for them, random weights all over.

A drafter with layers keeps its own KV beside the model's.  What it drafts depends on that KV, so
that drafts show a wrong block of a drafter although the model's answer stays right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_model import write_model

from .families import ONE, SHAPE, WINDOW, Family, _write, write_gemma3, write_mistral

DRAFTS = 3
TARGET: dict[str, Any] = {**SHAPE}
RANDOM = TARGET["initializer_range"]
HIDDEN, INNER, HEADS = TARGET["hidden_size"], TARGET["intermediate_size"], TARGET["head_dim"]
QUERIES = TARGET["num_attention_heads"] * HEADS
KEYS = TARGET["num_key_value_heads"] * HEADS


def _layer(inputs: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    """The shapes of a Llama layer's weights."""
    return {
        "self_attn.q_proj.weight": (QUERIES, inputs),
        "self_attn.k_proj.weight": (KEYS, inputs),
        "self_attn.v_proj.weight": (KEYS, inputs),
        "self_attn.o_proj.weight": (HIDDEN, QUERIES),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }


def _tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    import torch

    torch.manual_seed(1)
    return {
        name: (torch.randn(shape) * RANDOM + (len(shape) == 1)).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def _write_head(
    directory: Path, target: Path, shapes: Mapping[str, tuple[int, ...]], **config: Any
) -> Path:
    """Write a model that drafts from the hidden states of ``target``."""
    from safetensors.torch import save_file

    directory.mkdir()
    of_target = json.loads((target / "config.json").read_text())
    common = ("vocab_size", "eos_token_id", "rms_norm_eps")
    llama = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
    said = {**TARGET, **llama, **{name: of_target[name] for name in common}, **config}
    (directory / "config.json").write_text(json.dumps(said))
    save_file(_tensors(shapes), directory / "model.safetensors", {"format": "pt"})
    return directory


def write_eagle(directory: Path, target: Path) -> Path:
    """Takes its embedding and its output from the model."""
    layer = {f"layers.0.{name}": shape for name, shape in _layer().items()}
    del layer["layers.0.input_layernorm.weight"]
    shapes = {**layer, "fc.weight": (HIDDEN, 2 * HIDDEN)}
    return _write_head(directory, target, shapes, architectures=["LlamaForCausalLM"])


def write_eagle3(directory: Path, target: Path) -> Path:
    """Reads three layers of the model, and has an output of its own."""
    vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
    layer = {f"midlayer.{name}": shape for name, shape in _layer(2 * HIDDEN).items()}
    shapes = {
        **layer,
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (vocabulary, HIDDEN),
    }
    architectures = ["LlamaForCausalLMEagle3"]
    reads = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    return _write_head(
        directory, target, shapes, architectures=architectures, draft_vocab_size=vocabulary, **reads
    )


def write_mimo(directory: Path) -> Path:
    """A model with a layer that predicts one token more, in the same checkpoint: MiMo 7B, which is
    a Qwen 2 otherwise."""
    from safetensors.torch import load_file, save_file

    _write(directory, "Qwen2Config", num_hidden_layers=3)
    shapes = {
        **_layer(),
        "self_attn.q_proj.bias": (QUERIES,),
        "self_attn.k_proj.bias": (KEYS,),
        "self_attn.v_proj.bias": (KEYS,),
        "token_layernorm.weight": (HIDDEN,),
        "hidden_layernorm.weight": (HIDDEN,),
        "input_proj.weight": (HIDDEN, 2 * HIDDEN),
        "final_layernorm.weight": (HIDDEN,),
    }
    more = _tensors({f"model.mtp_layers.0.{name}": shape for name, shape in shapes.items()})
    for name in ("v_proj.weight", "o_proj.weight"):  # else it drafts from the last token alone
        more[f"model.mtp_layers.0.self_attn.{name}"] *= 4
    weights = directory / "model.safetensors"
    save_file({**load_file(weights), **more}, weights, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@dataclass(frozen=True)
class Drafter:
    """What drafts for the model of a family."""

    family: Family
    method: str
    write: Callable[[Path, Path], Path] | None = None
    """Writes what drafts into a folder, for the model in another one."""
    more: Mapping[str, Any] = field(default_factory=dict)
    has_layers: bool = True
    nightly: bool = False

    def arguments(self, directory: Path) -> dict[str, Any]:
        """Write everything into a folder; returns what an engine is started with."""
        model = self.family.write(directory / "model")
        drafts: dict[str, Any] = {
            "method": self.method,
            "num_speculative_tokens": DRAFTS,
            **self.more,
        }
        if self.write is not None:
            drafts["model"] = str(self.write(directory / "drafter", model))
        return {"model": str(model), "speculative_config": drafts, **self.family.arguments}


def _target(directory: Path, target: Path) -> Path:
    return target


LLAMA = Family("llama", write_model, ONE)
# The last one loads numba, after which vLLM 0.32 makes no other engine with draft layers in that
# process: it searches all modules for kernels to replace, and fails at one of numba's objects.
DRAFTERS = (
    Drafter(LLAMA, "draft_model", _target),
    Drafter(LLAMA, "eagle", write_eagle),
    Drafter(LLAMA, "eagle3", write_eagle3, nightly=True),
    Drafter(Family("mimo", write_mimo, ONE), "mtp", None, {"num_speculative_tokens": 1}),
    Drafter(
        Family("gemma3", write_gemma3, ((WINDOW, 128),) * 3 + ONE),
        "eagle",
        write_eagle,
        nightly=True,
    ),
    Drafter(Family("mistral", write_mistral, ((WINDOW, 128),)), "eagle", write_eagle, nightly=True),
    Drafter(
        LLAMA,
        "ngram",
        more={"prompt_lookup_max": 2, "prompt_lookup_min": 1},
        has_layers=False,
        nightly=True,
    ),
)
