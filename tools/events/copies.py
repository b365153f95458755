"""Which engines have which blocks, and what of that a node's stream says.  Pure.

A block is stored with its first copy and removed with its last.  An engine has a block or not,
however often it says so: vLLM says it again for a block that it has twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from . import wire
from .wire import Batch, BlockHash, Event, Place

MAX_BLOCKS = 1 << 22
"""Of one engine; more are left out, so that an engine which says too much costs no more."""
KEPT_MEDIUM = "GPU"
"""What vLLM calls the memory of its pool, which kvshm shares, on a CPU, too."""
_KEEPER = 1
"""In a mask: no engine has the block, but a keeper.  Each engine has another bit."""

KeptBlock = tuple[int, int]
"""A block's group and the last 64 bits of its hash."""


class Said(NamedTuple):
    """Events of one rank of the node's stream."""

    rank: int
    events: list[Event]


class NodeCopies:
    """The copies of all engines.  ``source``: a small number for each of them, from 0."""

    def __init__(self, apart: bool = False, max_blocks: int = MAX_BLOCKS) -> None:
        """``apart``: data-parallel ranks stay apart, each with counts of its own."""
        self._apart = apart
        self._max_blocks = max_blocks
        self._ranks: dict[int, _Copies] = {}
        self._counts: Counter[int] = Counter()
        self._kept: Container[KeptBlock] = frozenset()

    def apply(self, source: int, batch: Batch) -> Said:
        """Take in what an engine says; return what is news for the node."""
        rank = batch.rank if self._apart else 0
        copies = self._ranks.setdefault(rank, _Copies())
        said: list[Event] = []
        for event in batch.events:
            if event["type"] == wire.STORED:
                said += self._store(copies, source, event)
            elif event["type"] == wire.REMOVED:
                said += self._remove(copies, source, event)
            else:
                said += self._drop_all(copies, source)
        return Said(rank, said)

    def forget(self, source: int) -> list[Said]:
        """The engine has ended, or what it has is not known any more."""
        said = [Said(r, self._drop_all(copies, source)) for r, copies in self._ranks.items()]
        return [each for each in said if each.events]

    def keep(self, kept: Container[KeptBlock]) -> list[Said]:
        """These are all blocks that keepers have now: none of them is removed."""
        self._kept = kept
        said = [Said(r, copies.drop_kept(kept)) for r, copies in self._ranks.items()]
        return [each for each in said if each.events]

    def count(self, source: int) -> int:
        """Return how many blocks the engine has."""
        return self._counts[source]

    def _store(self, copies: _Copies, source: int, event: Event) -> list[Event]:
        masks = copies.masks.setdefault(wire.place_of(event), {})
        bit, new = 2 << source, []
        for block in event["block_hashes"]:
            mask = masks.get(block, 0)
            is_first = not mask & bit and self._counts[source] < self._max_blocks
            if is_first:
                masks[block] = mask & ~_KEEPER | bit
                self._counts[source] += 1
            new.append(is_first and not mask)
        return wire.stored_parts(event, new)

    def _remove(self, copies: _Copies, source: int, event: Event) -> list[Event]:
        place = wire.place_of(event)
        gone = self._let_go(copies, place, source, event["block_hashes"])
        return [event | {"block_hashes": gone}] if gone else []

    def _drop_all(self, copies: _Copies, source: int) -> list[Event]:
        bit, said = 2 << source, []
        for place, masks in copies.masks.items():
            held = [block for block, mask in masks.items() if mask & bit]
            if gone := self._let_go(copies, place, source, held):
                said.append(wire.removed(place, gone))
        return said

    def _let_go(
        self, copies: _Copies, place: Place, source: int, blocks: Sequence[BlockHash]
    ) -> list[BlockHash]:
        """Return those of the blocks that were the last copies."""
        masks, bit, gone = copies.masks.get(place, {}), 2 << source, []
        for block in blocks:
            mask = masks.get(block, 0)
            if not mask & bit:
                continue
            self._counts[source] -= 1
            masks[block] = mask & ~bit
            if mask == bit and kept_block(place, block) in self._kept:
                masks[block] = _KEEPER
                copies.only_kept.add((place, block))
            elif mask == bit:
                del masks[block]
                gone.append(block)
        return gone


class _Copies:
    """Of one rank of the node's stream."""

    def __init__(self) -> None:
        self.masks: dict[Place, dict[BlockHash, int]] = {}
        """Bits of who has a block; a block that nobody has is not there."""
        self.only_kept: set[tuple[Place, BlockHash]] = set()
        """Blocks that perhaps only a keeper has."""

    def drop_kept(self, kept: Container[KeptBlock]) -> list[Event]:
        """Forget the blocks that only keepers had, and that these have let go."""
        return [wire.removed(place, [block]) for place, block in self._lost(kept)]

    def _lost(self, kept: Container[KeptBlock]) -> Iterator[tuple[Place, BlockHash]]:
        for place, block in list(self.only_kept):
            masks = self.masks[place]
            if masks.get(block) == _KEEPER and kept_block(place, block) in kept:
                continue
            self.only_kept.discard((place, block))
            if masks.get(block) == _KEEPER:
                del masks[block]
                yield place, block


def kept_block(place: Place, block: BlockHash) -> KeptBlock | None:
    """Return by what a keeper would know the block; None if keepers have none of the kind."""
    if place.medium != KEPT_MEDIUM or place.locality or place.ownership:
        return None
    return place.group_idx or 0, last_bits(block)


def last_bits(block: BlockHash) -> int:
    """The last 64 bits, all of a hash that vLLM publishes by default."""
    whole = int.from_bytes(block, "big") if isinstance(block, bytes) else block
    return whole & ((1 << 64) - 1)
