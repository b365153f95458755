"""A digest of tensors as this process holds them, computed where they lie: equal on every device
of one kind, on any number of threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from hashlib import sha256
from typing import Any, NamedTuple

import torch
import xxhash
from torch.nn.modules import module as torch_modules

from kvshm.errors import KvshmError

_CHUNK_WORDS = 1 << 21
"""Words mixed at a time: they fill a GPU, with three buffers of 16 MB."""

_HASHED_IN_PLACE = "cpu"
"""Devices whose memory this process reads itself."""

_COPY_BYTES = 64 << 20
"""Most bytes copied at a time of tensors that are not contiguous."""


class WeightsUnknown(KvshmError):
    """Some weights cannot be read, so two engines' weights cannot be compared."""


def digest_tensors(
    named: Iterable[tuple[object, torch.Tensor]], digests: dict[object, bytes] | None = None
) -> str:
    """Return a digest (64 hex digits) of all ``named`` tensors, and of their names, which must have
    the same ``repr`` in every process.  ``digests`` gets one of every tensor, under its ``where``.

    Blocks while it reads all of them, on a CPU about as fast as one core reads memory.  Equal
    tensors on equal hardware have equal digests.  Raises WeightsUnknown.
    """
    digest = sha256()
    mixers: dict[torch.device, _Mixer] = {}
    for name, tensor in named:
        digest.update(repr(name).encode())
        own = sha256()
        for piece in _pieces(tensor):
            read = _read(piece, mixers)
            digest.update(read)
            own.update(read)
        if digests is not None:
            digests[where(tensor)] = own.digest()
    return digest.hexdigest()


class Place(NamedTuple):
    """Where a model keeps a weight: a parameter, a buffer or what a kernel computes with."""

    name: str
    holder: Mapping[str, Any] | None  # the dict that holds it; None if it is reached another way
    key: str
    value: object  # mostly a tensor
    converts: bool = False
    """Whether the model may exchange it for the same numbers in another format: no write."""


def model_places(
    model: torch.nn.Module, converts: Callable[[torch.nn.Module, str], bool] = lambda *_: False
) -> Iterator[Place]:
    """Yield where the model keeps its parameters and buffers, shared ones once for each module, its
    modules, their own ``forward`` or that there is none, and the tables of these.  ``converts``:
    whether a module converts what it has under a name."""
    for name, module in sorted(model.named_modules()):
        prefix = f"{name}." if name else ""
        own = module.__dict__
        for table in ("_parameters", "_buffers", "_modules"):
            yield Place(prefix + table, own, table, own[table])
            for key, value in own[table].items():
                yield Place(prefix + key, own[table], key, value, converts(module, key))
        yield Place(f"{prefix}forward", own, "forward", own.get("forward"))


def hook_tables(model: torch.nn.Module) -> list[Sized]:
    """Return the tables of forward hooks of a model's modules, and torch's global ones."""
    of_all = torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks
    tables: list[Sized] = [*of_all]
    for module in model.modules():
        tables += [module._forward_hooks, module._forward_pre_hooks]
    return tables


def model_code(model: torch.nn.Module) -> list[object]:
    """Return what decides, besides tensors and numbers, what a model's modules compute: how many
    forward hooks they have, their classes, and their own ``forward`` if they have one."""
    modules = list(model.modules())
    own = [module.__dict__.get("forward") for module in modules]
    return [*map(len, hook_tables(model)), *map(type, modules), *own]


def model_modules(model: torch.nn.Module) -> Iterator[tuple[object, torch.Tensor]]:
    """Yield for ``digest_tensors`` each module's name, class and floats, such as an epsilon or a
    scale, with a tensor without elements."""
    for name, module in sorted(model.named_modules()):
        floats = sorted((k, v) for k, v in vars(module).items() if type(v) is float)
        yield (name, type(module).__qualname__, floats), torch.empty(0)


def model_tensors(model: torch.nn.Module) -> Iterator[tuple[object, torch.Tensor]]:
    """Yield all parameters and buffers, each once, with name, shape, strides and type."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(named.items()):
        plain = tensor.detach()
        yield (name, plain.shape, plain.stride(), plain.dtype), plain


def where(tensor: torch.Tensor) -> object:
    """Which memory a tensor is of; as long as it lives no other tensor has the same."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's bytes as flat uint8 tensors, copied, some rows at a time, unless it is
    contiguous in some order of its dimensions."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise WeightsUnknown(f"a weight of layout {tensor.layout} on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():  # then its memory holds other numbers
        raise WeightsUnknown("a weight that is a conjugate or a negative view of another tensor")
    ordered = outermost_first(tensor)
    size = ordered.numel() * ordered.element_size()
    if ordered.is_contiguous() or size <= _COPY_BYTES:
        yield ordered.contiguous().reshape(-1).view(torch.uint8)
        return
    rows = max(1, len(ordered) * _COPY_BYTES // size)
    for part in ordered.split(rows) if len(ordered) > 1 else ordered:
        yield from _pieces(part)


def outermost_first(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions in the order of memory: contiguous, unless there are holes."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _read(piece: torch.Tensor, mixers: dict[torch.device, _Mixer]) -> bytes:
    """Return what stands for a flat uint8 tensor, and its length."""
    if piece.device.type != _HASHED_IN_PLACE:
        if piece.device not in mixers:
            mixers[piece.device] = _Mixer(piece.device)
        return mixers[piece.device].mix(piece)
    size = piece.numel()
    memory = (ctypes.c_char * size).from_address(piece.data_ptr()) if size else b""
    return xxhash.xxh3_128_digest(memory) + struct.pack("<Q", size)


class _Mixer:
    """Mixes bytes on the device where they lie; its buffers are all the extra memory there."""

    def __init__(self, device: torch.device) -> None:
        self._keys = _keys(_CHUNK_WORDS, device)
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
