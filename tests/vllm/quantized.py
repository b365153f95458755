"""Tiny quantized checkpoints, loaded by vLLM itself: prints each one's digest of weights, or why
there is none.  A program of its own, since vLLM's ranks begin once in a process.

    python -m tests.vllm.quantized FOLDER
    python -m tests.vllm.quantized FOLDER RANK RANKS  (one of several; tensor parallelism)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsMxfp4
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

from kvshm.hooks.vllm.identity.experts import held_experts, share_of
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


def compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **more}
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
    "wNa8o8": compressed(
        "pack-quantized",
        scheme(4, "int", "group", group_size=GROUP),
        scheme(8, "int", "tensor"),
        output_activations=scheme(8, "int", "tensor"),
    ),
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
    "mxfp4": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"],
    },
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": HIDDEN // HEADS,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
"""Of the kind mxfp4: only experts are quantized, in blocks of 32 numbers."""


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
    elif kind in ("w4a16", "wNa8o8"):
        for scale in ("input_scale", "output_scale") if kind == "wNa8o8" else ():
            yield f"{name}.{scale}", torch.tensor([0.03])
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


def of_gpt_oss(at: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one layer besides norms, at random."""
    for name, (out, width) in LINEAR.items():
        if name.startswith("self_attn"):
            yield f"{at}.{name}.weight", torch.randn(out, width).to(torch.bfloat16) * 0.05
            yield f"{at}.{name}.bias", torch.randn(out).to(torch.bfloat16)
    yield f"{at}.self_attn.sinks", torch.randn(HEADS).to(torch.bfloat16)
    experts = GPT_OSS["num_local_experts"]
    yield f"{at}.mlp.router.weight", torch.randn(experts, HIDDEN).to(torch.bfloat16)
    yield f"{at}.mlp.router.bias", torch.randn(experts).to(torch.bfloat16)
    for name, out, width in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        of = f"{at}.mlp.experts.{name}"
        shape = experts, out, width // 32
        yield f"{of}_blocks", torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        yield f"{of}_scales", torch.randint(118, 124, shape, dtype=torch.uint8)
        yield f"{of}_bias", torch.randn(experts, out).to(torch.bfloat16)


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
        if kind == "mxfp4":
            tensors |= dict(of_gpt_oss(at))
            continue
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
    "wNa8o8": ("mlp.down_proj.input_scale", "mlp.down_proj.output_scale"),
    "gptq": ("mlp.down_proj.scales", "mlp.down_proj.qweight"),
    "awq": ("mlp.down_proj.scales", "mlp.down_proj.qweight"),
    "fp8 cache": ("self_attn.v_scale", "mlp.down_proj.weight"),
    "mxfp4": ("mlp.experts.down_proj_scales", "mlp.experts.down_proj_blocks"),
}
"""A scale and a weight of each kind."""


def digest(folder: Path, kind: str, tensors: Tensors, rank: int = 0, ranks: int = 1) -> str:
    architecture = TINY_LLAMA | SHAPE | (GPT_OSS if kind == "mxfp4" else {})
    config = engine_config(
        folder,
        architecture | {"quantization_config": KINDS[kind]},
        load_format="auto",
        dtype="bfloat16",
        tensor_parallel_size=ranks,
        **({"kv_cache_dtype": "fp8"} if kind == "fp8 cache" else {}),
    )
    config.parallel_config.rank = rank
    save_file(tensors, folder / "model.safetensors")
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    try:
        experts = share_of(held_experts(model))
        return sha256(weights_digest(model, dtype=torch.bfloat16).encode() + experts).hexdigest()
    except WeightsUnknown as exc:
        return f"unknown: {exc}"


def changed(tensors: Tensors, suffix: str) -> Tensors:
    """The same with another last number in one tensor of the last layer."""
    name = f"model.layers.{LAYERS - 1}.{suffix}"
    other = tensors[name].clone()
    last = other.view(-1).view(torch.uint8)[-1:]
    last.bitwise_xor_(16)
    return {**tensors, name: other}


def begin(store: str, rank: int, ranks: int) -> None:
    os.environ["VLLM_DIST_IDENT"] = sha256(store.encode()).hexdigest()[:16]
    _set_torch_accelerator_to_noop()  # as vLLM's runner for CPUs does
    # vLLM multiplies by MXFP4 only with AMX; what it makes of the weights it can make without.
    experts: Any = CPUExpertsMxfp4
    experts._supports_current_device = staticmethod(lambda: True)
    # Its attention reads a cache in fp8 only with AVX-512; no cache is read here.
    CPUAttentionBackend.supports_kv_cache_dtype = classmethod(lambda *_: True)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(ranks, rank, f"file://{store}", rank, "gloo")
        parallel_state.initialize_model_parallel(ranks, 1)


def alone(folder: Path) -> dict[str, list[str]]:
    """Two loads of each checkpoint, and one each with another scale and another weight."""
    said: dict[str, list[str]] = {}
    for kind, (scale, weight) in CHANGES.items():
        if kind == "mxfp4" and not hasattr(torch.ops._C, "convert_weight_packed"):
            continue  # a build of vLLM's kernels for CPUs without AVX-512 has none for it
        tensors = checkpoint(kind)
        runs = (tensors, tensors, changed(tensors, scale), changed(tensors, weight))
        said[kind] = [digest(folder / kind, kind, one) for one in runs]
    return said


def one_of(folder: Path, rank: int, ranks: int) -> list[str]:
    """Two loads of a rank's part of a checkpoint, and one with another scale of the last rank's."""
    kind, own = "w4a16", folder / f"rank{rank}"
    tensors = checkpoint(kind)
    runs = (tensors, tensors, changed(tensors, "mlp.up_proj.weight_scale"))
    return [digest(own, kind, one, rank, ranks) for one in runs]


if __name__ == "__main__":
    folder, *which = sys.argv[1:]
    rank, ranks = map(int, which or (0, 1))
    begin(f"{folder}/store", rank, ranks)
    found = one_of(Path(folder), rank, ranks) if which else alone(Path(folder))
    print(json.dumps(found))
