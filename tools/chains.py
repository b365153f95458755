"""Chains of blocks, put together again from what each slot says of itself.  Pure.

A slot knows its own hash, the first 8 bytes of its predecessor's and its depth; chains that
share a prefix share the slots of it.  A chain is told by its tip, the block nobody follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvshm.shm.slot_table import Slot

_Place = tuple[int, int]
"""Tag of a block's hash, and its depth: what a successor says of it."""


@dataclass(frozen=True)
class Chain:
    """One chain, by its last block."""

    tip: int
    """Block id of the last block."""
    slot: Slot
    length: int
    """Consecutive blocks in use that end with the tip."""

    @property
    def complete(self) -> bool:
        """Whether it begins at token 0: all others can hit nothing from its start."""
        return self.length == self.slot.depth + 1


def tag_of(block_hash: bytes) -> int:
    """The 8 bytes by which a successor and the replica index know a block."""
    return int.from_bytes(block_hash[:8], "little")


def find_chains(
    slots: Mapping[int, Slot], wanted: Callable[[int, Slot], bool] = lambda block, slot: True
) -> list[Chain]:
    """Return the chains in which at least one block is ``wanted``, the longest first."""
    followed = {(slot.parent_tag, slot.depth - 1) for slot in slots.values()}
    lengths: dict[_Place, int] = {}
    touched: set[_Place] = set()
    found = []
    for block, slot in sorted(slots.items(), key=lambda item: item[1].depth):
        place, parent = (tag_of(slot.block_hash), slot.depth), (slot.parent_tag, slot.depth - 1)
        lengths[place] = lengths.get(parent, 0) + 1
        if wanted(block, slot) or parent in touched:
            touched.add(place)
        if place not in followed and place in touched:
            found.append(Chain(block, slot, lengths[place]))
    return sorted(found, key=lambda chain: (-chain.length, chain.tip))
