"""A type for each kind of number and bytes that crosses function boundaries (docs/glossary.md)."""

from __future__ import annotations

from typing import NewType, TypeAlias

BlockHash = NewType("BlockHash", bytes)
"""vLLM's hash of one full block and of everything before it, padded with zeros to 32 bytes."""

BlockId = NewType("BlockId", int)
"""Index of a block in an engine's paged KV cache; equal on all worker ranks of that engine."""

Epoch = NewType("Epoch", int)
"""Random non-zero 64-bit id of one epoch of an engine's cache, or of the coordinator."""

Fingerprint = NewType("Fingerprint", bytes)
"""32-byte digest of everything that must be equal for two engines to exchange raw blocks."""

Generation = NewType("Generation", int)
"""How often a slot has been reused, modulo 2**32."""

LeaseBit = NewType("LeaseBit", int)
"""Which of the 28 lease bits of every slot word belongs to an importing engine."""

NO_LEASE_BIT = LeaseBit(-1)
"""An engine without a lease bit (more than 28 engines): it imports on the re-check alone."""

LoadId: TypeAlias = str | int
"""Tells one load of an engine from its other loads.  The name under which the engine waits for it
(in vLLM the request's id, which clients choose: never look into it), else a number."""

Rank = NewType("Rank", int)
"""Index of a worker process within its engine: 0 <= rank < tp_size * pp_size."""

HASH_BYTES = 32


def block_hash(digest: bytes) -> BlockHash:
    """Return ``digest`` as a BlockHash, padded on the right to 32 bytes.  Raises ValueError."""
    if not 0 < len(digest) <= HASH_BYTES:
        raise ValueError(f"a block hash has 1 to {HASH_BYTES} bytes, not {len(digest)}")
    return BlockHash(digest.ljust(HASH_BYTES, b"\0"))
