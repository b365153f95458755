"""Tiny quantized checkpoints, loaded by vLLM itself: prints each one's digest of weights, or why
there is none.  A program of its own, since vLLM's ranks begin once in a process.

    python -m tests.vllm.quantized FOLDER
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from kvshm.hooks.vllm.identity.weights import weights_digest
from kvshm.hooks.weights import WeightsUnknown

from .tiny_config import TINY_LLAMA, engine_config

Tensors = dict[str, torch.Tensor]
HIDDEN, HEADS, INNER, VOCABULARY, LAYERS = 256, 4, 512, 128, 2
GROUP = 128
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
SHAPE = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": VOCABULARY,
}  # fmt: skip


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


def scheme(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    given = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    return {**given, "dynamic": False, **more}


KINDS: dict[str, dict[str, Any]] = {
    "int8": compressed(
        "int-quantized", scheme(8, "int", "channel"), scheme(8, "int", "token", dynamic=True)
    ),
    "fp8": compressed(
        "float-quantized", scheme(8, "float", "channel"), scheme(8, "float", "token", dynamic=True)
    ),
    "w4a16": compressed("pack-quantized", scheme(4, "int", "group", group_size=GROUP), None),
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
    },
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
        "version": "gemm",
    },
    "fp8 cache": {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {},
        "kv_cache_scheme": scheme(8, "float", "tensor"),
    },
}  # fmt: skip


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def of_linear(kind: str, name: str, out: int, width: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one linear layer, at random."""
    bf16 = torch.bfloat16
    if kind in ("int8", "fp8"):
        drawn = torch.randint(-100, 100, (out, width)).to(
            torch.int8 if kind == "int8" else torch.float8_e4m3fn
        )
        yield f"{name}.weight", drawn
        yield f"{name}.weight_scale", torch.rand(out, 1).to(bf16) * 0.01 + 0.001
    elif kind == "w4a16":
        yield f"{name}.weight_packed", words(out, width // 8)
        yield f"{name}.weight_scale", torch.rand(out, width // GROUP).to(bf16) * 0.01 + 0.001
        yield f"{name}.weight_shape", torch.tensor([out, width])
    elif kind == "gptq":
        yield f"{name}.qweight", words(width // 8, out)
        yield (
            f"{name}.qzeros",
            torch.full((width // GROUP, out // 8), 0x77777777, dtype=torch.int32),
        )
        yield f"{name}.scales", torch.rand(width // GROUP, out).to(bf16) * 0.01 + 0.001
        yield f"{name}.g_idx", (torch.arange(width) // GROUP).to(torch.int32)
    elif kind == "awq":
        yield f"{name}.qweight", words(width, out // 8)
        yield f"{name}.qzeros", words(width // GROUP, out // 8)
        yield f"{name}.scales", torch.rand(width // GROUP, out).to(bf16) * 0.01 + 0.001
    else:
        yield f"{name}.weight", torch.randn(out, width).to(bf16) * 0.05


def checkpoint(kind: str) -> Tensors:
    """A whole model at random, always the same."""
    torch.manual_seed(0)
    tensors: Tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).to(torch.bfloat16),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN).to(torch.bfloat16),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name, (out, width) in LINEAR.items():
            tensors |= dict(of_linear(kind, f"{at}.{name}", out, width))
        if kind == "fp8 cache":
            for scale in ("k_scale", "v_scale"):
                tensors[f"{at}.self_attn.{scale}"] = torch.tensor([0.5])
    return tensors


CHANGES = {
    "int8": ("mlp.down_proj.weight_scale", "mlp.down_proj.weight"),
    "fp8": ("mlp.down_proj.weight_scale", "mlp.down_proj.weight"),
    "w4a16": ("mlp.down_proj.weight_scale", "mlp.down_proj.weight_packed"),
    "gptq": ("mlp.down_proj.scales", "mlp.down_proj.qweight"),
    "awq": ("mlp.down_proj.scales", "mlp.down_proj.qweight"),
    "fp8 cache": ("self_attn.v_scale", "mlp.down_proj.weight"),
}
"""A scale and a weight of each kind."""


def digest(folder: Path, kind: str, tensors: Tensors) -> str:
    config = engine_config(
        folder,
        TINY_LLAMA | SHAPE | {"quantization_config": KINDS[kind]},
        load_format="auto",
        dtype="bfloat16",
        **({"kv_cache_dtype": "fp8"} if kind == "fp8 cache" else {}),
    )
    save_file(tensors, folder / "model.safetensors")
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    try:
        return weights_digest(model, dtype=torch.bfloat16)
    except WeightsUnknown as exc:
        return f"unknown: {exc}"


def changed(tensors: Tensors, suffix: str) -> Tensors:
    """The same with another last number in one tensor of the last layer."""
    name = f"model.layers.{LAYERS - 1}.{suffix}"
    other = tensors[name].clone()
    last = other.view(-1).view(torch.uint8)[-1:]
    last.bitwise_xor_(16)
    return {**tensors, name: other}


def main(folder: Path) -> None:
    """Two loads of each checkpoint, and one each with another scale and another weight."""
    _set_torch_accelerator_to_noop()  # as vLLM's runner for CPUs does
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as store:
        parallel_state.init_distributed_environment(1, 0, f"file://{store}/s", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    said: dict[str, list[str]] = {}
    for kind, (scale, weight) in CHANGES.items():
        tensors = checkpoint(kind)
        runs = (tensors, tensors, changed(tensors, scale), changed(tensors, weight))
        said[kind] = [digest(folder / kind, kind, one) for one in runs]
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
