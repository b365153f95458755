"""A digest of all of a model's weights as this process holds them.

Model names, paths and configurations do not show whether two engines compute the same KV:
weights may be random, fine-tuned or updated in place.  So the digest reads the weights themselves,
on their device, with integer arithmetic that wraps around as in C.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from hashlib import sha256
from typing import Any

import torch

from kvshm.errors import KvshmError

_CHUNK_WORDS = {"cpu": 3 << 13}
_CHUNK_WORDS_ELSEWHERE = 1 << 21
"""Words mixed at a time.  On a CPU they fit a core's cache and are fewer than 32768, from which on
torch starts threads (a hundred times slower on a busy machine); elsewhere they fill a GPU, with
three buffers of 16 MB."""

_COPY_BYTES = 64 << 20
"""Most bytes copied at a time of tensors that are not contiguous."""


_WRITERS = (
    "load_weights",
    "reload_weights",
    "reset_weights",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
)
"""Methods of a model, its runner and its worker that write weights."""


class WeightsUnknown(KvshmError):
    """Some weights cannot be read, so two engines' weights cannot be compared."""


def watch_weights(owners: Iterable[Any], changing: Callable[[], None]) -> None:
    """Call ``changing`` before weights are written again, perhaps more than once.

    Worker only.  ``owners``: the model, and vLLM's model runner and worker, which also write
    without the model's ``load_weights`` (weights in the kernels' format, transfers from a
    trainer).  vLLM announces new weights to a connector only by a reset of the cache, which may
    come after the weights, or not at all.  Writes by any other method go unnoticed.
    """
    for owner in owners:
        for name in _WRITERS:
            if callable(write := getattr(owner, name, None)):
                setattr(owner, name, _announced(write, changing))


def _announced(write: Callable[..., Any], changing: Callable[[], None]) -> Callable[..., Any]:
    @wraps(write)
    def announce(*args: Any, **kwargs: Any) -> Any:
        changing()
        return write(*args, **kwargs)

    return announce


def weights_digest(model: torch.nn.Module) -> str:
    """Return a digest (64 hex digits) of all parameters and buffers, with their names, shapes
    and types, and of the weights that vLLM's CPU kernels have packed away.

    Worker only; blocks while it reads all weights (above 1 GB/s on one core).  Changes nothing.
    Any two processes with equal weights on equal hardware get equal digests.  Raises
    WeightsUnknown.
    """
    digest = sha256()
    mixers: dict[torch.device, _Mixer] = {}

    def add(header: object, tensor: torch.Tensor) -> None:
        digest.update(repr(header).encode())
        for piece in _pieces(tensor):
            if piece.device not in mixers:
                mixers[piece.device] = _Mixer(piece.device)
            digest.update(mixers[piece.device].mix(piece))

    for name, tensor in sorted(_tensors(model).items()):
        add((name, tensor.shape, tensor.stride(), tensor.dtype), tensor)
    for name, layer in _packed_layers(model):
        for product in _products(name, layer):
            add((name, "packed", product.shape), product)
    return digest.hexdigest()


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; a tensor that several modules share counts once."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in named.items()}


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's bytes as flat uint8 tensors: without a copy if the tensor is contiguous in
    some order of its dimensions; otherwise copied, some rows at a time."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise WeightsUnknown(f"a weight of layout {tensor.layout} on {tensor.device}")
    outermost_first = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    ordered = tensor.permute(outermost_first)
    size = ordered.numel() * ordered.element_size()
    if ordered.is_contiguous() or size <= _COPY_BYTES:
        yield ordered.contiguous().reshape(-1).view(torch.uint8)
        return
    rows = max(1, len(ordered) * _COPY_BYTES // size)
    for part in ordered.split(rows) if len(ordered) > 1 else ordered:
        yield from _pieces(part)


class _Mixer:
    """Mixes bytes on one device; its buffers are all the extra memory."""

    def __init__(self, device: torch.device) -> None:
        size = _CHUNK_WORDS.get(device.type, _CHUNK_WORDS_ELSEWHERE)
        self._keys = _keys(size, device)
        self._word = torch.empty_like(self._keys)
        self._upper = torch.empty_like(self._keys)

    def mix(self, piece: torch.Tensor) -> bytes:
        """Return 8 bytes per chunk of a flat uint8 tensor, and its length."""
        sums = [self._sum(words) for words in _chunks(piece, len(self._keys))]
        found = torch.stack(sums).tolist() if sums else []
        return struct.pack(f"<{len(found)}qQ", *found, piece.numel())

    def _sum(self, words: torch.Tensor) -> torch.Tensor:
        """Combine each word with the key of its place, multiply it by its own upper half, so that
        swapped words change the sum, and add up modulo 2**64."""
        size = len(words)
        word, upper = self._word[:size], self._upper[:size]
        torch.bitwise_xor(words, self._keys[:size], out=word)
        torch.bitwise_right_shift(word, 32, out=upper)
        return upper.bitwise_or_(1).mul_(word).sum()


def _chunks(piece: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield the piece as chunks of ``size`` int64 words; zeros pad the last word."""
    whole = piece.numel() // 8 * 8
    for start in range(0, whole, size * 8):
        chunk = piece[start : min(start + size * 8, whole)]
        # A view of words must begin at a multiple of their size.
        aligned = chunk.storage_offset() % 8 == 0
        yield (chunk if aligned else chunk.clone()).view(torch.int64)
    if whole < piece.numel():
        end = torch.zeros(8, dtype=torch.uint8, device=piece.device)
        end[: piece.numel() - whole] = piece[whole:]
        yield end.view(torch.int64)


def _keys(size: int, device: torch.device) -> torch.Tensor:
    """One random-looking word per place (the finaliser of splitmix64 over a counter)."""
    word = torch.arange(1, size + 1, dtype=torch.int64, device=device)
    word *= -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        word ^= word >> shift
        word *= factor
    return word ^ (word >> 31)


def _packed_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers whose weights only vLLM's CPU kernels still hold.

    On CPUs vLLM gives weights to a kernel library in the library's own format and empties the
    parameter.  Raises WeightsUnknown for a layer whose kernel cannot be asked for its weight.
    """
    for name, module in sorted(model.named_modules()):
        for key, parameter in module._parameters.items():
            if not _is_emptied(module, key, parameter):
                continue
            if key != "weight" or not hasattr(module, "cpu_linear"):
                raise WeightsUnknown(f"vLLM keeps {name}.{key} where it cannot be read")
            yield name, module


def _is_emptied(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter | None) -> bool:
    if parameter is None:  # int8 kernels leave None behind
        return key == "weight" and hasattr(module, "quant_method")
    return bool(parameter.numel() == 0 and parameter.device.type == "cpu")


def _products(name: str, layer: Any) -> Iterator[torch.Tensor]:
    """Yield the weight of a packed layer, transposed, some rows at a time: as products with unit
    vectors, which are exact, because each sum has only one term other than zero."""
    dtype = layer.weight.dtype
    width = getattr(layer, "input_size_per_partition", None) or layer.input_size
    rows = max(1, min(256, _COPY_BYTES // (width * dtype.itemsize)))
    try:
        for start in range(0, width, rows):
            unit = torch.zeros(min(rows, width - start), width, dtype=dtype)
            unit.diagonal(start).fill_(1)
            yield layer.cpu_linear(unit, layer.weight, None).contiguous()
    except (RuntimeError, TypeError) as exc:
        raise WeightsUnknown(f"the packed weight of {name} cannot be read: {exc}") from exc
