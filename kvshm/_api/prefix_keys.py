"""Keys of blocks: a 256-bit chain over the tokens, so that equal keys mean equal prefixes.

::

    seed   = sha256("kvshm keys 1", block size, salt, extra of the whole prompt)
    key 0  = sha256(seed,  tokens of block 0, extras that begin in block 0)
    key i  = sha256(key i-1, tokens of block i, extras that begin in block i)

Every variable part stands behind its length, so that no two inputs give the same bytes.  Pure.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import cast

from kvshm._base.ids import BlockHash
from kvshm.errors import MisuseError

from .arguments import checked_block_size, listed, whole

KEYS_VERSION = "kvshm keys 1"
"""Names this way of making keys; a part of the fingerprint."""
_TOKEN_BYTES = 4

Extra = bytes | Mapping[int, bytes]
"""What decides a prefix besides its tokens: one value for the whole prompt (an adapter), or values
by the index of the token from whose block on they count (an image)."""


def prefix_keys(
    tokens: Sequence[int],
    block_size: int,
    *,
    salt: bytes = b"",
    extra: Extra = b"",
    known: Sequence[bytes] = (),
) -> list[BlockHash]:
    """Return the keys of a prompt's full blocks: 32 bytes for each, one for every ``block_size``
    tokens; a last block that is not full has none.

    ``tokens``: token ids, 0 to 2**32 - 1.  ``salt``: prompts with different salts share nothing.
    ``known``: keys of the first blocks, from an earlier call for a shorter part of these tokens
    with the same salt and extra; they are not computed again, nor checked, nor are these blocks'
    tokens looked at.  Any thread; nothing blocks.  Raises MisuseError for a block size below 1, for
    other tokens, and for an extra outside of the prompt.
    """
    block_size = checked_block_size(block_size)
    keys = list[BlockHash]()
    if known:
        keys = cast(list[BlockHash], listed("known", known)[: len(tokens) // block_size])
    first = len(keys)
    packed = _pack(tokens[first * block_size :] if first else tokens)
    num_tokens = first * block_size + len(packed) // _TOKEN_BYTES
    inside = _by_block(extra, num_tokens, block_size)
    everywhere = b"" if isinstance(extra, Mapping) else _bytes("extra", extra)
    start = KEYS_VERSION.encode(), struct.pack("<Q", block_size), _bytes("salt", salt), everywhere
    key = _digest(*start)
    key, step = keys[-1] if keys else key, _TOKEN_BYTES * block_size
    before_key, before_part = _length(len(key)), _length(step)
    for index in range(first, num_tokens // block_size):
        part = packed[(index - first) * step : (index - first + 1) * step]
        if index in inside:
            key = _digest(key, part, *inside[index])
        else:  # the same bytes in one go: this is what making keys costs
            key = sha256(before_key + key + before_part + part).digest()
        keys.append(BlockHash(key))
    return keys


def _length(nbytes: int) -> bytes:
    return struct.pack("<Q", nbytes)


def _digest(*parts: bytes) -> bytes:
    digest = sha256()
    for part in parts:
        digest.update(_length(len(part)))
        digest.update(part)
    return digest.digest()


def _pack(tokens: Sequence[int]) -> bytes:
    try:
        return array("I", list(tokens)).tobytes()  # a list: array would take bytes apart
    except (OverflowError, TypeError) as exc:
        raise MisuseError(f"tokens are whole numbers from 0 to {2**32 - 1}: {exc}") from exc


def _by_block(extra: Extra, num_tokens: int, block_size: int) -> dict[int, tuple[bytes, ...]]:
    """The extras that begin in each block, each behind its place in the block."""
    found: dict[int, tuple[bytes, ...]] = {}
    if isinstance(extra, Mapping):
        for token in extra:
            if not 0 <= whole("a token of extra", token) < num_tokens:
                raise MisuseError(f"extra at token {token!r}, the prompt has {num_tokens} tokens")
        for token in sorted(extra):
            block, place = divmod(token, block_size)
            value = struct.pack("<Q", place), _bytes("extra", extra[token])
            found[block] = found.get(block, ()) + value
    return found


def _bytes(what: str, value: object) -> bytes:
    if not isinstance(value, bytes):
        raise MisuseError(f"{what} is bytes, not {type(value).__name__}; encode it")
    return value
