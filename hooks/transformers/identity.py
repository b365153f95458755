"""What decides who may share with a transformers engine (docs/transformers.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
            "functions": _short(_functions(model)),
            "torch": str(torch.__version__),
            "execution": _execution(cb_config),
            "kernels": f"{torch.backends.cpu.get_cpu_capability()}, {_switches()}",
        },
    )


def _config(model: Any) -> dict[str, object]:
    config = model.config.to_dict()
    return {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}


_NOT_COMPUTED_WITH = {"name_or_path"}
"""Plain attributes of modules that change no byte of a block."""


def _modules(model: Any) -> Iterator[tuple[object, ...]]:
    """What computes: each part's class, its forward and its plain attributes, as scales are,
    and the functions of attention.  Hooks and other forwards are refused (refusals.py)."""
    for name, part in model.named_modules():
        plain = {
            name: value
            for name, value in vars(part).items()
            if isinstance(value, bool | int | float | str)
            and not name.startswith("_")
            and name not in _NOT_COMPUTED_WITH
        }
        yield (name, _named(type(part)), _code(type(part).forward), plain, *_ways(part))


def _ways(part: Any) -> Iterator[object]:
    """How a part computes attention and experts: its configuration need not be the model's."""
    config = getattr(part, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    yield str(getattr(config, "_experts_implementation", None))
    yield str(attention)
    for name in (attention, f"paged|{attention}"):
        if isinstance(name, str) and name in ALL_ATTENTION_FUNCTIONS:
            yield _code(ALL_ATTENTION_FUNCTIONS[name])


def _named(what: Any) -> str:
    """A class's or a function's name, never its address."""
    owner = what if hasattr(what, "__qualname__") else type(what)
    return f"{owner.__module__}.{owner.__qualname__}"


def _functions(model: Any) -> dict[str, str]:
    """The methods of the parts' classes and the functions that parts hold, what these call by a
    global name of their file, what that calls, and so on.  Read again each time, because a program
    may replace functions at run time."""
    owners: dict[str, Any] = dict(model.named_modules())
    owners |= {_named(type(part)): type(part) for part in owners.values()}
    held = {
        f"{owner} {name}": value
        for owner, holds in owners.items()
        for name, value in vars(holds).items()
        if isinstance(value, FunctionType)
    }
    found, left = {name: _code(function) for name, function in held.items()}, [*held.values()]
    while left:
        for function in _layers(left.pop()):
            names = getattr(function, "__globals__", {})
            for name in _names(getattr(function, "__code__", None)):
                called, key = names.get(name), f"{names.get('__name__')}.{name}"
                if key not in found and callable(called) and not isinstance(called, type):
                    found[key] = _code(called)
                    left.append(called)
    return found


def _layers(function: Any) -> Iterator[Any]:
    """A function and what it is wrapped around."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _names(code: Any) -> Iterator[str]:
    """The names that a function uses, and what is defined in it."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names(constant)


def _code(function: Any) -> str:
    """A function's name and a digest of its code, and of what it is wrapped around."""
    digest = sha256()
    for layer in _layers(function):
        if isinstance(code := getattr(layer, "__code__", None), CodeType):
            digest.update(_digest(code))
            digest.update(repr(list(_kept(layer))).encode())
    return f"{_named(function)} {digest.hexdigest()[:32]}"


@cache
def _digest(code: CodeType) -> bytes:
    return sha256(repr(list(_words(code))).encode()).digest()


def _kept(function: Any) -> Iterator[object]:
    """Plain values that a function keeps: its defaults, and those of what it was defined in."""
    yield from map(_plain, getattr(function, "__defaults__", None) or ())
    for name, value in sorted((getattr(function, "__kwdefaults__", None) or {}).items()):
        yield name, _plain(value)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield _plain(cell.cell_contents)
        except ValueError:  # it is not set yet
            yield None


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else type(value).__qualname__


def _words(code: CodeType) -> Iterator[object]:
    """What a function does, without addresses, and without where its source stands."""
    yield from (code.co_code, code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield list(_words(constant))
        else:
            yield sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _execution(cb_config: Any) -> str:
    """Eager or compiled.  Decoded tokens stand in blocks as well, so both ways count."""
    ways = (cb_config.varlen_compile_config, cb_config.decode_compile_config)
    if ways == (None, None):
        return "eager"
    return f"compiled {_short([way.to_dict() if way else None for way in ways])}"


def _switches() -> str:
    """Settings of torch that choose kernels on a CPU.  The number of threads is none: it changes
    last bits, as other batches do."""
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
    """The precision of products of float32, as both of torch's interfaces tell it."""
    mkldnn = torch.backends.mkldnn
    told = f"{torch.backends.fp32_precision} {mkldnn.fp32_precision} {mkldnn.matmul.fp32_precision}"
    try:
        return f"{torch.get_float32_matmul_precision()} {told}"
    except RuntimeError:  # it was set by the other interface, to what this one cannot tell
        return told


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()[:32]
