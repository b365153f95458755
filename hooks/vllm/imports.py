"""One request's import, from the allocation of its blocks to the end of its load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from kvshm._ground.ids import BlockId
from kvshm.halves import LoadOrder, LoadReport, Part

Tables: TypeAlias = Sequence[Sequence[BlockId]]
"""A request's block tables, by group."""


class Way(Enum):
    """What waits for an import."""

    ASYNCHRONOUS = "vLLM holds the request back until every rank has reported the load"
    AT_ONCE = "the step that computes the request waits"


def ids_of(blocks: Any) -> list[list[BlockId]]:
    """The block tables of vLLM's KVCacheBlocks, by group."""
    return [[block.block_id for block in table] for table in blocks.blocks]


class LoadedBlocks(NamedTuple):
    """Consecutive blocks of one group that a load fills."""

    chain: list[bytes]
    """The request's block hashes; grows as the request does."""
    first: int
    """Index of the first block in the group's block table."""
    blocks: Sequence[BlockId]
    group: int = 0


def loaded_blocks(
    chain: list[bytes], parts: Iterable[Part], tables: Tables
) -> tuple[LoadedBlocks, ...]:
    """Return the blocks of the ``parts`` of a request."""
    return tuple(
        LoadedBlocks(chain, first, tuple(tables[group][first : first + count]), group)
        for group, first, count in parts
    )


@dataclass
class Import:
    """One request's import: its load, and what the ranks report of that load."""

    request_id: str
    way: Way
    load: LoadOrder
    chain: list[bytes]
    """The request's block hashes; grows as the request does."""
    start: int
    """Hashes of the local hit, behind which the load begins."""
    blocks: tuple[LoadedBlocks, ...]
    """The blocks that the load is to fill, by group."""
    reports: list[LoadReport] = field(default_factory=list)
    bad: set[BlockId] = field(default_factory=set)
    """Once the load has ended: the blocks that it did not fill."""

    @property
    def targets(self) -> tuple[BlockId, ...]:
        """All blocks that the load is to fill."""
        return tuple(block for part in self.blocks for block in part.blocks)

    @property
    def good(self) -> tuple[LoadedBlocks, ...]:
        """The imported blocks: those before the first bad block.  If a step waited for the load,
        no good block means failure."""
        if not self.bad:
            return self.blocks
        parts = []
        for part in self.blocks:
            filled = tuple(takewhile(lambda block: block not in self.bad, part.blocks))
            if filled:
                parts.append(part._replace(blocks=filled))
            if len(filled) < len(part.blocks):
                break
        return tuple(parts)
