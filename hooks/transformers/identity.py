"""What decides who may share with a transformers engine (docs/transformers.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
import transformers

from kvshm.api import Identity

from ..weights import digest_tensors, model_tensors

_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "architectures"}
"""Entries of a model's configuration that change no byte of a block."""


def identity_of(model: Any, cb_config: Any) -> Identity:
    """Return who the engine is that serves ``model`` with these settings of its manager.

    Reads all weights, above 1 GB/s on one core.  Raises WeightsUnknown.
    """
    return Identity(
        engine=f"transformers {transformers.__version__}",
        model=type(model).__name__,
        weights=digest_tensors(model_tensors(model)),
        settings={
            "dtype": str(model.dtype),
            "attention": str(model.config._attn_implementation),
            "model_config": _short(_config(model)),
            "modules": _short(list(_modules(model))),
            "torch": str(torch.__version__),
            "execution": _execution(cb_config),
            "kernels": f"{torch.backends.cpu.get_cpu_capability()}, {_switches()}",
        },
    )


def _config(model: Any) -> dict[str, object]:
    config = model.config.to_dict()
    return {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}


def _modules(model: Any) -> Iterator[tuple[str, ...]]:
    """What computes: each part's class, and the functions that were put in its place or around
    it, as kernels, quantisation and adapters are."""
    for name, part in model.named_modules():
        forward = part.__dict__.get("forward", type(part).forward)
        hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
        yield (name, *map(_named, (type(part), forward, *hooks)))


def _named(what: Any) -> str:
    """A class's or a function's name, never its address."""
    plain = getattr(what, "__func__", getattr(what, "func", what))
    owner = plain if hasattr(plain, "__qualname__") else type(plain)
    return f"{owner.__module__}.{owner.__qualname__}"


def _execution(cb_config: Any) -> str:
    """Eager or compiled.  Decoded tokens stand in blocks as well, so both ways count."""
    ways = (cb_config.varlen_compile_config, cb_config.decode_compile_config)
    if ways == (None, None):
        return "eager"
    return f"compiled {_short([way.to_dict() if way else None for way in ways])}"


def _switches() -> str:
    """Settings of torch that choose kernels on a CPU.  The number of threads is none: it changes
    last bits, as other batches do."""
    mkldnn = torch.backends.mkldnn
    return (
        f"mkldnn {mkldnn.is_available() and mkldnn.enabled}, "
        f"matmul {torch.get_float32_matmul_precision()}, "
        f"deterministic {torch.are_deterministic_algorithms_enabled()}"
    )


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=_named)
    return sha256(text.encode()).hexdigest()[:32]
