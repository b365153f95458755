"""Chains of blocks, rebuilt from the slots of a slot table.  Pure.

All blocks of a chain are of one group.  Chains with a common prefix share its slots.  A chain is
named by its tip: the block that has no successor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvshm._shm.slot_table import Slot

_Place = tuple[int, int, int]
"""A block's group, the tag of its hash, and its depth: all follow from a successor's slot."""


class Chain(NamedTuple):
    tip: int
    block_hash: str
    depth: int
    length: int
    """Number of consecutive blocks in use up to and including the tip."""
    complete: bool
    """Whether the chain starts at token 0."""
    group: int


def tag_of(block_hash: bytes) -> int:
    """The first 8 bytes of a hash: successors identify blocks of their group by them."""
    return int.from_bytes(block_hash[:8], "little")


def find_chains(
    slots: Mapping[int, Slot], wanted: Callable[[int, Slot], bool] = lambda block, slot: True
) -> list[Chain]:
    """Return the chains in which at least one block is ``wanted``, the longest first."""
    followed = {_parent(slot) for slot in slots.values()}
    lengths: dict[_Place, int] = {}
    touched: set[_Place] = set()
    found = []
    for block, slot in sorted(slots.items(), key=lambda item: item[1].depth):
        place, parent = (slot.group, tag_of(slot.block_hash), slot.depth), _parent(slot)
        lengths[place] = lengths.get(parent, 0) + 1
        if wanted(block, slot) or parent in touched:
            touched.add(place)
        if place not in followed and place in touched:
            length, block_hash = lengths[place], slot.block_hash.hex()
            complete = length == slot.depth + 1
            found.append(Chain(block, block_hash, slot.depth, length, complete, slot.group))
    return sorted(found, key=lambda chain: (-chain.length, chain.tip))


def _parent(slot: Slot) -> _Place:
    return slot.group, slot.parent_tag, slot.depth - 1
