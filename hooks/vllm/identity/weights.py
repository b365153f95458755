"""A digest of all of a model's weights as this process holds them.

Names, paths and configurations do not show whether two engines compute the same KV.  So the digest
reads the weights themselves, on their device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import chain
from typing import Any

import torch

from ...weights import (
    Place,
    WeightsUnknown,
    digest_tensors,
    model_modules,
    model_places,
    model_tensors,
)
from .experts import LEAST_BITS, ROUTED_EXPERTS, held_experts, is_a, kernels, names_apart

_PRODUCT_BYTES = 64 << 20
"""Most bytes of unit vectors that a packed weight is multiplied with at a time."""

_WRITERS = (
    "load_weights",
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "sleep",
    "wake_up",
    "discard",
)
"""Methods of a model, its runner and its worker that write weights, or that unmap their memory:
then nothing may read them."""


_UNMAPPING = frozenset({"sleep", "discard"})
"""Those that unmap memory, the KV cache's too."""


def watch_weights(
    owners: Iterable[Any],
    changing: Callable[[], None],
    unmapping: Callable[[], None] = lambda: None,
) -> None:
    """Call ``changing`` before one of vLLM's methods writes weights, perhaps more than once, and
    then ``unmapping`` if it unmaps memory.

    ``owners``: the model, and vLLM's model runner and worker, which also write weights themselves.
    Calls from outside are announced before they arrive (rank_calls.py), and the witness notices
    what is not announced (../witness.py).  Worker only.
    """
    for owner in owners:
        for name in _WRITERS:
            if callable(write := getattr(owner, name, None)):
                then = [changing, unmapping] if name in _UNMAPPING else [changing]
                setattr(owner, name, _announced(write, then))


def _announced(write: Callable[..., Any], calls: list[Callable[[], None]]) -> Callable[..., Any]:
    @wraps(write)
    def announce(*args: Any, **kwargs: Any) -> Any:
        for call in calls:
            call()
        return write(*args, **kwargs)

    return announce


def weights_digest(
    model: torch.nn.Module,
    digests: dict[object, bytes] | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """Return a digest (64 hex digits) of all parameters and buffers but those of a mixture's
    experts (experts.py), with names, shapes and types, of the weights that vLLM's CPU kernels have
    packed away, of scales that a method of quantization keeps, of the modules' classes and floats,
    and of the names of the experts' kernels.
    ``digests`` gets one of every tensor.  ``dtype``: in which the model computes; buffers that it
    converts in its first run have equal digests before and after.

    Worker only; blocks while it reads all weights (above 1 GB/s on one core).  Equal weights on
    equal hardware have equal digests.  Raises WeightsUnknown.
    """
    tensors = chain(_tensors(model, dtype), _packed_tensors(model), _method_tensors(model))
    named = [((*chosen, "experts"), torch.empty(0)) for chosen in kernels(model)]
    return digest_tensors(chain(model_modules(model), named, tensors), digests)


def _tensors(
    model: torch.nn.Module, dtype: torch.dtype | None
) -> Iterator[tuple[object, torch.Tensor]]:
    converted = {place.name for place in weight_places(model) if place.converts}
    apart = names_apart(held_experts(model))
    for about, tensor in model_tensors(model):
        match about:
            case (str(name), *_) if name in apart:
                pass
            case (str(name), *_) if dtype is not None and name in converted:
                yield (name, "converted", tensor.shape), tensor.to(dtype)
            case _:
                yield about, tensor


def _converts(module: torch.nn.Module, key: str) -> bool:
    """Whether the module exchanges a buffer for the same numbers in the format of its input, as
    vLLM's rotary embeddings do in the first call."""
    return key == "cos_sin_cache" and hasattr(module, "_match_cos_sin_cache_dtype")


def weight_places(model: torch.nn.Module) -> Iterator[Place]:
    """Yield where the model keeps its weights: parameters, buffers, what methods of quantization
    hold and, where a CPU kernel has packed a weight away, the function that multiplies by it and
    the packed tensors that it holds.  oneDNN's cannot be reached, nor written: new weights are a
    new function."""
    yield from model_places(model, _converts)
    for name, holder, key, tensor in _kept_by_methods(model):
        yield Place(name, holder, key, tensor)
    for name, module in sorted(model.named_modules()):
        if (multiply := module.__dict__.get("cpu_linear")) is not None:
            yield Place(f"{name}.weight", module.__dict__, "cpu_linear", multiply)
            for cell in getattr(multiply, "__closure__", None) or ():
                yield Place(f"{name}.weight", None, "", cell.cell_contents)


def _kept_by_methods(
    model: torch.nn.Module,
) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield the tensors that the layers' methods of quantization keep themselves, each with its
    name and what holds it under which key: vLLM's wNa8o8 takes the scales of activations off the
    layer."""
    for name, module in sorted(model.named_modules()):
        for method in ("quant_method", "scheme"):
            held = getattr(getattr(module, method, None), "__dict__", {})
            for key, value in sorted(held.items()):
                if isinstance(value, torch.Tensor):
                    yield f"{name}.{method}.{key}", held, key, value


def _method_tensors(model: torch.nn.Module) -> Iterator[tuple[object, torch.Tensor]]:
    for name, _, _, tensor in _kept_by_methods(model):
        plain = tensor.detach()
        yield (name, plain.shape, plain.stride(), plain.dtype), plain


def _packed_tensors(model: torch.nn.Module) -> Iterator[tuple[object, torch.Tensor]]:
    for name, layer in _packed_layers(model):
        for product in _products(name, layer):
            yield (name, "packed", product.shape), product


def _packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers whose weights only vLLM's CPU kernels still hold: it gives weights to
    a kernel library in its own format and empties the parameter.  Raises WeightsUnknown for a layer
    whose kernel cannot be asked for its weight."""
    for name, module in sorted(model.named_modules()):
        multiply = getattr(module, "cpu_linear", None)
        # torch's own holds no weight: with AMX latents' attention has taken it.
        if multiply not in (None, torch.nn.functional.linear) and _is_emptied(module, "weight"):
            yield name, module
        elif key := _unreadable(module):
            raise WeightsUnknown(f"vLLM keeps {name}.{key} where it cannot be read")


def _is_emptied(module: torch.nn.Module, key: str) -> bool:
    if (parameter := module._parameters.get(key)) is None:
        return key == "weight" and key in module._parameters and hasattr(module, "quant_method")
    return bool(parameter.numel() == 0)


def _unreadable(module: torch.nn.Module) -> str:
    """Return which parameter a module computes with but does not hold, on any device; empty if it
    holds all.  Kernels put weights elsewhere and empty the parameter, leave None, or have none."""
    if (needed := _numbers(module)) is None:
        return next((key for key in module._parameters if _is_emptied(module, key)), "")
    # Kernels of quantized layers also empty what they have no use for, such as an order of rows.
    sizes = (each.nbytes for each in module._parameters.values() if each is not None)
    return "" if max(sizes, default=0) * 8 >= needed * LEAST_BITS else "weight"


def _numbers(module: Any) -> int | None:
    """How many numbers the weight of a layer of vLLM's has; None if it is of another kind."""
    if is_a("LinearBase", module):
        width = getattr(module, "input_size_per_partition", module.input_size)
        return int(width * getattr(module, "output_size_per_partition", module.output_size))
    if is_a("VocabParallelEmbedding", module):
        return int(module.num_embeddings_per_partition * module.embedding_dim)
    return 0 if is_a(ROUTED_EXPERTS, module) else None  # held_experts looks at these


def _products(name: str, layer: Any) -> Iterator[torch.Tensor]:
    """Yield the weight of a packed layer, transposed, some rows at a time: as products with unit
    vectors, which are exact."""
    dtype = layer.weight.dtype
    width = getattr(layer, "input_size_per_partition", None) or layer.input_size
    rows = max(1, min(256, _PRODUCT_BYTES // (width * dtype.itemsize)))
    try:
        for start in range(0, width, rows):
            unit = torch.zeros(min(rows, width - start), width, dtype=dtype)
            unit.diagonal(start).fill_(1)
            yield layer.cpu_linear(unit, layer.weight, None).contiguous()
    except (RuntimeError, TypeError) as exc:
        raise WeightsUnknown(f"the packed weight of {name} cannot be read: {exc}") from exc
