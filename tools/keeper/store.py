"""A store beyond the node, as a keeper uses it: what it has to do, and how blocks lie in it.

Each block is a value of its own.  Its key names everything on which its bytes depend: the
fingerprint (weights, layout, types, groups, the first hash), the group, and the block's own key,
which covers all tokens before it, their salt and other inputs.  Keys have a generation besides: a
withdrawal makes all that was written before it unreachable, on every node.

::

    kvshm/1/<fingerprint>/generation                 a number
    kvshm/1/<fingerprint>/<generation>/<group>/<key> magic | digest | parent | depth | bytes of the
                                                     block's regions, rank by rank
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

import xxhash

from kvshm.api import BlockContent, BlockName, KvshmError

MAGIC = b"kvshm/1\0"
_HEADER = struct.Struct("<8s16s8sI4x")
HEADER_BYTES = _HEADER.size


class StoreError(KvshmError):
    """A store does not do what it was asked."""


class Store(Protocol):
    """A key-value store that keepers of several machines share.  Any thread may call; each call
    but ``buffer`` may block, and raises StoreError if the store cannot be reached."""

    def buffer(self, nbytes: int) -> memoryview:
        """Return memory that ``put`` reads from, and ``get`` writes to, for as long as the store is
        used.  Before ``connect`` or after it; raises StoreError if there is none."""
        ...

    def connect(self) -> None:
        """Before all other calls; may be tried again."""
        ...

    def has(self, keys: Sequence[str]) -> list[bool]: ...

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[bool]:
        """Write values, which are parts of ``buffer``; a key that is there keeps its value.
        Returns which keys are there now."""
        ...

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[bool]:
        """Read values of known size into parts of ``buffer``.  Returns which ones were read."""
        ...

    def number(self, key: str) -> int:
        """Return the number at a key; 0 if there is none."""
        ...

    def first_number(self, key: str, number: int) -> int:
        """Write a number unless there is one.  Returns the one that is there.  As for
        ``set_number``."""
        ...

    def set_number(self, key: str, number: int) -> None:
        """Write a number, which the store must not drop for lack of room."""
        ...

    def close(self) -> None: ...


def generation_key(fingerprint: str) -> str:
    return f"kvshm/1/{fingerprint}/generation"


def block_keys(fingerprint: str, generation: int, names: Iterable[BlockName]) -> list[str]:
    before = f"kvshm/1/{fingerprint}/{generation}"
    return [f"{before}/{name.group}/{bytes(name.key).hex()}" for name in names]


def write_value(
    value: memoryview, fingerprint: str, content: BlockContent, parts: Iterable[memoryview]
) -> None:
    """Fill a value with a block, of which these are the bytes."""
    at = HEADER_BYTES
    for part in parts:
        value[at : at + len(part)] = part
        at += len(part)
    digest = _digest(fingerprint, content, value)
    _HEADER.pack_into(value, 0, MAGIC, digest, content.parent, content.depth)


def read_value(value: memoryview, fingerprint: str, name: BlockName) -> BlockContent | None:
    """Return what a value says of its block; None if it is not what was written for this name."""
    magic, digest, parent, depth = _HEADER.unpack_from(value)
    content = BlockContent(name.key, parent, depth, name.group)
    good = magic == MAGIC and digest == _digest(fingerprint, content, value)
    return content if good else None


def _digest(fingerprint: str, content: BlockContent, value: memoryview) -> bytes:
    """Of all that a value says, and of what its key says."""
    about = struct.pack("<IH", content.depth, content.group)
    digest = xxhash.xxh3_128(bytes.fromhex(fingerprint) + content.key + content.parent + about)
    digest.update(value[HEADER_BYTES:])
    return digest.digest()
