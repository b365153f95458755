"""Single blocks of other engines: what is heard of them, found, and loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvshm._base.ids import BlockId
from kvshm._engine.load_plan import Plan

from .contents import BlockContent, BlockName
from .load import Load


class Change(NamedTuple):
    """A block of another engine has new contents, or none any more."""

    block_id: BlockId
    """In its engine's cache."""
    generation: int
    """Counts the contents that the block has had: the same contents may be heard of twice."""
    name: BlockName | None
    """Of the new contents; None: they are gone."""
    depth: int = 0
    """Index of the block in its prefix, in blocks."""


class News(NamedTuple):
    """What has been heard of one engine."""

    epoch: int
    """Of the engine.  0: all that was heard before holds no more, because this engine has begun an
    epoch of its own."""
    changes: tuple[Change, ...]
    """In order.  Some may come twice, after events were lost."""
    gone: bool = False
    """Whether the engine has gone, with all its blocks."""


class FoundBlocks:
    """Single blocks that other engines seem to hold: a hint, until they are loaded, as a Found.

    ``bool(found)``: whether there is anything to load.
    """

    def __init__(self, node: object, plan: Plan | None, contents: Sequence[BlockContent]) -> None:
        """Only ``BlockNode.lookup_blocks`` makes these."""
        self._node = node
        self._plan = plan
        self.contents: tuple[BlockContent, ...] = tuple(contents)
        """What was found, in the order in which it was asked for."""
        self.loaded: bool = False
        """Whether it was given to ``BlockNode.load_blocks``, which takes it once."""

    def __bool__(self) -> bool:
        return self._plan is not None

    @property
    def sources(self) -> tuple[int, ...]:
        """For each of ``contents``: the epoch of the engine from which it would be copied."""
        return tuple(int(run.peer.info.epoch) for run in self._plan.runs) if self._plan else ()

    @property
    def nbytes(self) -> int:
        """Bytes that a load copies, of one rank."""
        return self._plan.nbytes if self._plan is not None else 0

    def __repr__(self) -> str:
        return f"<FoundBlocks {len(self.contents)} blocks>"


class LoadOfBlocks(Load):
    """A load of single blocks: each is of use without the others.  ``good`` counts those that were
    filled, wherever they stand, and ``failed`` names the others."""

    _bad: frozenset[BlockId] = frozenset()

    @property
    def failed(self) -> tuple[BlockId, ...]:
        """After the end: the blocks that were not filled.  Raises MisuseError before."""
        missing = len(self.targets) - self.good  # raises before the end
        return tuple(block for block in self.targets if block in self._bad) if missing else ()

    def _end(self, good: int, bad: Collection[BlockId]) -> None:
        self._bad = frozenset(bad)
        super()._end(sum(block not in self._bad for block in self.targets), bad)
