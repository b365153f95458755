"""One request's import, from the first match of its request to the end of its load.

::

    MATCHING    vLLM asks what can be imported, in one step or in many
    ALLOCATED   its blocks are allocated; the step being built hands its load to the ranks
    LOADING     the ranks copy
    LOADED      they have reported; vLLM has not scheduled the request since
    ENDED       it has, or the load was one that a step waited for

A request that is matched again later, because it was preempted, has another import then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import takewhile
from typing import Any, NamedTuple, Self, TypeAlias

from kvshm._base.ids import BlockId
from kvshm.halves import LoadOrder, LoadReport, Part, Plan

Tables: TypeAlias = Sequence[Sequence[BlockId]]
"""A request's block tables, by group."""
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of vLLM's that is put off."""


class Way(Enum):
    """What waits for an import."""

    ASYNCHRONOUS = "vLLM holds the request back until every rank has reported the load"
    AT_ONCE = "the step that computes the request waits"


class Stage(IntEnum):
    """How far an import has come; never goes back."""

    MATCHING = 0
    ALLOCATED = 1
    LOADING = 2
    LOADED = 3
    ENDED = 4


def ids_of(blocks: Any) -> list[list[BlockId]]:
    """The block tables of vLLM's KVCacheBlocks, by group."""
    return [[block.block_id for block in table] for table in blocks.blocks]


class Answer(NamedTuple):
    """What a request's last search has found."""

    until: float  # when it may be used again
    asked: tuple[int, int, bytes]  # ``start`` and ``stop`` of the search, its last hash
    plan: Plan | None
    common: int  # tokens where windows are to be kept although nothing is imported


class Decision(NamedTuple):
    """Whether an import is worth it."""

    until: float  # when it is decided again
    about: tuple[int, int, bool, bool]
    """Start and length of the plan, whether time is lost besides the copy, whether costs are known.
    """
    worth: bool


class NoRoom(NamedTuple):
    """An import found no room.  Its request is looked up again when more than ``free`` blocks are
    free, or at the time ``until``."""

    free: int
    until: float


class LoadedBlocks(NamedTuple):
    """Consecutive blocks of one group that a load fills."""

    chain: list[bytes]  # the request's block hashes; grows as the request does
    first: int  # index of the first block in the group's block table
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


class Span(NamedTuple):
    """The hashes of a request that a load brings, from ``start`` to ``stop``."""

    start: int
    stop: int
    first_hash: bytes | None

    @classmethod
    def of(cls, chain: Sequence[bytes], start: int, stop: int) -> Self:
        return cls(start, stop, next(iter(chain[start : start + 1]), None))

    @property
    def length(self) -> int:
        return self.stop - self.start

    def common(self, own: Sequence[bytes], other: Sequence[bytes]) -> int:
        """How many of them two chains of hashes have in common.  A hash is of all before it, too:
        chains that have parted do not meet again."""
        stop = min(self.stop, len(own), len(other))
        return bisect_left(range(self.start, stop), True, key=lambda i: own[i] != other[i])


@dataclass(slots=True)
class Load:
    """The load of an import, and what the ranks report of it."""

    order: LoadOrder
    span: Span
    blocks: tuple[LoadedBlocks, ...]  # what the load is to fill, by group
    reports: list[LoadReport] = field(default_factory=list)
    bad: set[BlockId] = field(default_factory=set)  # once it has ended: what it did not fill

    @property
    def targets(self) -> tuple[BlockId, ...]:
        """All blocks that the load is to fill."""
        return tuple(block for part in self.blocks for block in part.blocks)

    @property
    def good(self) -> tuple[LoadedBlocks, ...]:
        """The imported blocks: those before the first bad one.  None: failed, if a step waited."""
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


@dataclass(slots=True, eq=False)
class RequestImport:
    """One request's import.  RequestImporter and RunningLoads move it on; the fields behind
    ``stage`` belong to the class that their comment names.  Scheduler's thread."""

    request: Any
    may_import: bool = True  # False: an import of this request has lost blocks, so it is computed
    stage: Stage = Stage.MATCHING
    # RequestImporter
    plan: Plan | None = None  # what the last match has found
    way: Way = Way.ASYNCHRONOUS
    load: Load = field(init=False)  # from ALLOCATED on
    no_room: NoRoom | None = None
    # Receipts and Twins, one after the other
    waits_for: Any = None  # a receipt, or another request's import of the same prefix
    waits_until: float | None = None
    waits: int = 0  # for how many of them in turn, of which none has ended
    # Lookups
    answer: Answer | None = None
    decision: Decision | None = None
    # AtOnce
    withheld: list[Call] | None = None
    """vLLM's calls that would give the request's blocks their hashes; None: they get them."""
    # PromptTokens
    first_step: Any = None
    # ImportTracer
    trace: Any = None

    @property
    def has_load(self) -> bool:
        return self.stage > Stage.MATCHING

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def can_roll_back(self) -> bool:
        """Whether a step waits for its load, or the step's output was not handled yet."""
        return self.withheld is not None or self.first_step is not None

    def forget_match(self) -> None:
        """Drop what was found before vLLM allocated blocks."""
        self.plan = self.answer = self.decision = self.no_room = None

    def move_to(self, stage: Stage) -> None:
        """Raises ValueError for a step back."""
        if stage < self.stage:
            raise ValueError(f"an import cannot go back from {self.stage.name} to {stage.name}")
        self.stage = stage
