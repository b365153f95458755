"""What a model computes with besides its tensors, in words that are equal in every process.

Classes and functions of transformers and torch are named, because both versions are compared; those
from elsewhere are refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from kvshm.api import KvshmError

from ..weights import digest_tensors

_PACKAGES = ("torch.nn.", "transformers.")
"""Packages whose classes may compute.  Not all of torch: others keep weights that are neither
parameters nor buffers, or hold code of others."""

_SOURCES = tuple(os.path.dirname(package.__file__) + os.sep for package in (torch, transformers))
_WRAPPERS = (contextlib.__file__, functools.__file__)

_USED_BY_ALL = (
    "torch.nn.functional",
    "transformers.integrations.moe",
    "transformers.masking_utils",
)
_COMPUTING = ("torch.nn.", "transformers.integrations.", "transformers.models.")
"""Further modules whose functions compute: these, and where they import functions from."""

_IMPORTED = {
    *sys.stdlib_module_names,
    "accelerate",  # a model that it has changed has a forward of its own
    "huggingface_hub",
    "safetensors",
    "tqdm",
    "typing_extensions",
}
"""Packages from which such modules import functions that compute nothing."""

_KNOWN_ATTRIBUTES = set(vars(torch.nn.Module())) - {"training"}
"""What each part has: tensors and other parts, which are compared, and hooks (refusals.py)."""

_NOT_COMPUTED_WITH = {
    "all_tied_weights_keys",
    "generation_config",
    "gradient_checkpointing",  # acts only while "training"
    "model_tags",
    "name_or_path",
    "warnings_issued",
    "_cached_continuous_batching_manager",
    "_compiled_call",
    "_gradient_checkpointing_func",
    "_is_hf_initialized",
    "_last_compile_config",
    "_require_grads_hook",
    "_require_grads_hooks",
    "_weight_conversions",
}
"""Attributes that change no byte of a block."""

_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "architectures"}
"""Entries of a configuration that change no byte of a block."""


class CannotCompareError(KvshmError):
    """Two engines cannot know whether they compute with the same."""


def words_of(model: torch.nn.Module) -> Iterator[object]:
    """Yield what a model computes with besides its tensors: classes, attributes, functions.  Reads
    tensors that are plain attributes.  Raises CannotCompareError and WeightsUnknown."""
    classes: set[type] = set()
    ways: set[str] = set()
    for name, part in model.named_modules():
        who = f"the model's part {name or type(part).__name__!r}"
        classes.update(_classes(who, type(part)))
        ways.update(chosen := _ways(part))
        attributes = {
            key: _word(f"{key!r} of {who}", value if value is not model.config else "the model's")
            for key, value in vars(part).items()
            if key not in _KNOWN_ATTRIBUTES and key not in _NOT_COMPUTED_WITH
        }
        yield (name, _name(type(part)), chosen, attributes)
    for owner in sorted(classes, key=_name):
        yield (_name(owner), list(_methods(owner)))
    yield from _functions_of({owner.__module__ for owner in classes} | {*_USED_BY_ALL}, ways)


def config_words(config: PreTrainedConfig) -> dict[str, object]:
    """The entries of a configuration that describe the computation."""
    entries = config.to_dict()
    return {name: value for name, value in entries.items() if name not in _NOT_THE_MODEL}


def _ways(part: Any) -> list[str]:
    """How a part computes attention and experts: its configuration need not be the model's."""
    config = getattr(part, "config", None)
    attention = str(getattr(config, "_attn_implementation", None))
    experts = str(getattr(config, "_experts_implementation", None))
    return [attention, f"paged|{attention}", experts]


def _classes(who: str, owner: type) -> Iterator[type]:
    """Yield a class and its bases, as far as they compute."""
    for base in owner.__mro__:
        if base.__module__.startswith(_PACKAGES) and _found(base) is base:
            yield base
        elif issubclass(base, torch.nn.Module):
            raise CannotCompareError(
                f"{who} is a {_name(base)}: neither transformers nor torch.nn has this class, and "
                "what it does cannot be compared"
            )


def _found(owner: type) -> object:
    """What stands in a Python module under the class's name."""
    found: Any = sys.modules.get(owner.__module__)
    for name in owner.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _methods(owner: type) -> Iterator[object]:
    for name, value in sorted(vars(owner).items()):
        if isinstance(value, property):
            inner: list[Any] = [value.fget, value.fset]
        else:
            inner = [getattr(value, "__func__", getattr(value, "func", value))]
        for function in inner:
            if callable(function) and not isinstance(function, type):
                yield (name, _function(f"{_name(owner)}.{name}", function))


def _functions_of(files: set[str], ways: set[str]) -> Iterator[object]:
    """Yield the functions of Python modules, and of those from which they import functions."""
    left, seen = sorted(files, reverse=True), set(files)
    while left:
        file = sys.modules.get(name := left.pop())
        if file is None:
            continue
        found = dict(_functions(file, ways))
        yield (name, found)
        homes = {truth.rpartition(" ")[0] for names in found.values() for truth in names}
        left += sorted(home for home in homes - seen if home.startswith(_COMPUTING))
        seen |= homes


def _functions(file: Any, ways: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the functions of a Python module, and those that it finds by the name of a way."""
    for name, value in sorted(vars(file).items()):
        who = f"{file.__name__}.{name}"
        if isinstance(value, MutableMapping):
            for way in sorted(ways & value.keys()):
                if not isinstance(value[way], type):
                    yield (f"{name} {way}", _function(f"{who}[{way!r}]", value[way]))
        elif callable(value) and not isinstance(value, type) and not _is_imported(value):
            yield (name, _function(who, value))


def _is_imported(function: Any) -> bool:
    """Whether it is a function of those packages, or an object of theirs or of torch's."""
    if isinstance(function, FunctionType):
        return _package(function.__globals__["__name__"]) in _IMPORTED
    known = {*_IMPORTED, "builtins", "torch", "transformers"}
    return not isinstance(function, functools.partial) and _package(type(function)) in known


def _function(who: str, function: Any) -> list[str]:
    """A function's true name, and the names of those that it is wrapped around."""
    names = []
    while function is not None:
        code: Any = getattr(function, "__code__", None)
        file = getattr(code, "co_filename", "")
        if not file.startswith(_SOURCES) and file not in _WRAPPERS:
            raise CannotCompareError(
                f"{who} is a function that is not from transformers or torch, and what it does "
                "cannot be compared"
            )
        if hasattr(function, "_torchdynamo_orig_callable") and not hasattr(
            function, "_torchdynamo_disable"
        ):
            raise CannotCompareError(
                f"{who} is compiled by torch, and what it was compiled to cannot be compared"
            )
        names.append(f"{function.__globals__['__name__']} {code.co_qualname}")
        function = getattr(function, "__wrapped__", None)
    return names


def _word(who: str, value: Any) -> object:
    """An attribute's value, in a form that has a JSON text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return [[_word(who, key), _word(who, inner)] for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [_word(who, inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_word(who, inner)) for inner in value)
    return _word_of_object(who, value)


def _word_of_object(who: str, value: Any) -> object:
    if isinstance(value, complex | bytes | Enum | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return digest_tensors([((value.shape, value.dtype), value.detach())])
    if isinstance(value, PreTrainedConfig):
        return [_name(type(value)), config_words(value)]
    if isinstance(value, functools.partial):
        return [_word(who, inner) for inner in (value.func, value.args, value.keywords)]
    if isinstance(value, FunctionType):
        return _function(who, value)
    if isinstance(value, BuiltinFunctionType | type) and _is_theirs(value):
        return _name(value)
    raise CannotCompareError(f"{who} is a {_name(type(value))}, and cannot be compared")


def _is_theirs(what: Any) -> bool:
    """Whether a class or a built-in function comes from transformers or torch."""
    owner = what if what.__module__ else type(what.__self__)
    return _package(owner) in ("builtins", "torch", "transformers")


def _package(what: Any) -> str:
    module = what if isinstance(what, str) else str(what.__module__)
    return module.partition(".")[0]


def _name(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}"
