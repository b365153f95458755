"""What decides which engines may share with one of transformers (docs/transformers.md)."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import torch
import transformers

from kvshm.api import Identity

from ..cpu_kernels import cpu_kernels
from ..weights import digest_tensors, model_tensors
from .parts import config_words, words_of


def identity_of(model: Any, cb_config: Any) -> Identity:
    """Return the identity of an engine that serves ``model`` with these settings of its manager.

    Reads all weights, above 1 GB/s on one core.  Raises WeightsUnknown and CannotCompareError.
    """
    return Identity(
        engine=f"transformers {transformers.__version__}",
        model=type(model).__name__,
        weights=digest_tensors(model_tensors(model)),
        settings={
            "dtype": str(model.dtype),
            "attention": str(model.config._attn_implementation),
            "model_config": _short(config_words(model.config)),
            "modules": _short(list(words_of(model))),
            "torch": str(torch.__version__),
            "execution": _execution(cb_config),
            "kernels": f"{cpu_kernels()}, {_switches()}",
        },
    )


def _execution(cb_config: Any) -> str:
    """Eager or compiled.  Decoded tokens stand in blocks as well, so both ways count."""
    ways = (cb_config.varlen_compile_config, cb_config.decode_compile_config)
    if ways == (None, None):
        return "eager"
    return f"compiled {_short([way.to_dict() if way else None for way in ways])}"


def _switches() -> str:
    """Settings of torch that choose kernels on a CPU."""
    mkldnn, cuda = torch.backends.mkldnn, torch.backends.cuda
    # These choose the kernel of scaled_dot_product_attention on every device.
    sdp = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    return (
        f"mkldnn {mkldnn.is_available() and mkldnn.enabled}, "
        f"matmul {_matmul_precision()}, "
        f"sdp {' '.join(map(str, sdp))}, "
        f"deterministic {torch.are_deterministic_algorithms_enabled()}"
    )


def _matmul_precision() -> str:
    """The precision of products of float32, by both of torch's interfaces."""
    mkldnn = torch.backends.mkldnn
    both = f"{torch.backends.fp32_precision} {mkldnn.fp32_precision} {mkldnn.matmul.fp32_precision}"
    try:
        return f"{torch.get_float32_matmul_precision()} {both}"
    except RuntimeError:  # the other interface has set what this one does not have
        return both


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()[:32]
