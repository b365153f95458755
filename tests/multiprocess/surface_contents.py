"""What blocks hold, in each process alike: the bytes follow from the key."""

from __future__ import annotations

from functools import cache
from hashlib import sha256

from kvshm import prefix_keys

BLOCK, BLOCKS, TOKENS = 512, 24, 4
PROMPTS = (
    tuple(range(6 * TOKENS)),
    (*range(3 * TOKENS), *range(100, 100 + 3 * TOKENS)),
    tuple(range(500, 500 + 6 * TOKENS)),
)


@cache
def keys_of(prompt: int) -> list[bytes]:
    return list(prefix_keys(PROMPTS[prompt % len(PROMPTS)], TOKENS))


def content(key: bytes) -> bytes:
    return sha256(key).digest() * (BLOCK // 32)


def garbage(block: int) -> bytes:
    return bytes([block + 1]) * BLOCK
