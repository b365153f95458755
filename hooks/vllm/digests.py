"""Digests of tensors and of what holds them: equal ones mean equal contents.

By blake3, vLLM's own hash of images: nobody who sends some can find two with one digest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from blake3 import blake3


class UnknownContents(ValueError):
    """Something that cannot be digested."""


def digest_of(value: Any) -> bytes:
    """Return the digest of a value: tensors, numbers, texts, lists and dicts of them.  Raises
    UnknownContents for anything else, and what torch does."""
    digest = blake3()
    for part in _parts(value):
        digest.update(part)
    return bytes(digest.digest())


def _parts(value: Any) -> Iterator[Any]:
    """The bytes that stand for a value, and for no other."""
    kind = type(value).__name__
    if isinstance(value, dict):
        value = [[name, value[name]] for name in sorted(value)]
    if isinstance(value, list | tuple):
        yield f"{kind} {len(value)} ".encode()
        for one in value:
            yield from _parts(one)
    elif isinstance(value, torch.Tensor):
        data = _bytes_of(value)
        yield f"{value.dtype} {tuple(value.shape)} {data.nbytes} ".encode()
        yield data
    elif value is None or isinstance(value, bytes | str | bool | int | float):
        text = repr(value).encode()
        yield f"text {len(text)} ".encode()
        yield text
    else:
        raise UnknownContents(f"a {type(value).__name__}")


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
