"""KV cache groups: what each needs of a prefix, and the longest prefix that all can restore.

Pure.  A group is a set of layers with one block table (docs/kv-cache-groups.md).  The length of a
prefix is counted in hashes, one for every ``hash_block_size`` tokens; a block covers one hash, or
``scale`` of them.  A group needs its blocks from the first needed one to the end of the prefix, and
the first needed one never moves back when the prefix grows.  So no prefix that contains a needed
block which nobody holds can be restored, nor any longer one: the search lowers the length to the
first such block until there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvshm.node.peer import PlannedRun
from kvshm.shm.layout import RECORD_BYTES


@dataclass(frozen=True)
class Group:
    """One group.  Without ``window`` and ``chunk`` it has full attention."""

    number: int
    """As in the keys of its blocks."""
    block_size: int
    """Tokens per block."""
    scale: int = 1
    """Hashes per block."""
    window: int = 0
    """Tokens of its sliding window, the present token included."""
    chunk: int = 0
    """Tokens of a chunk of its chunked local attention."""
    ahead: int = 0
    """Blocks that must be held behind a prefix, although they are not restored: 1 if draft layers
    use the group (EAGLE)."""

    @property
    def is_full(self) -> bool:
        """Whether it has full attention."""
        return not (self.window or self.chunk)

    def first_needed(self, blocks: int) -> int:
        """Return the first block that a prefix of so many blocks needs."""
        if self.window:
            return max(0, blocks - -(-(self.window - 1) // self.block_size))
        if self.chunk:
            return blocks * self.block_size // self.chunk * self.chunk // self.block_size
        return 0


class Part(NamedTuple):
    """Consecutive blocks of one group."""

    group: int
    """The group's number."""
    first: int
    """Index of the first block in the group's block table."""
    num_blocks: int


Find = Callable[[Group, int, int], Sequence[PlannedRun]]
"""``(group, first, stop)``: the longest run of blocks from ``first`` on, before ``stop``, that
somebody holds, cut where the holder changes."""


class Groups:
    """All groups of an engine."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """``groups``: in the order of their numbers, which begin at 0."""
        self.all = tuple(groups)
        self.step = math.lcm(*(group.scale for group in groups))
        """Hashes between two lengths at which a prefix can end."""
        self.one_full = len(groups) == 1 and groups[0].is_full
        """Whether a prefix is one chain of blocks, of which every begin is of use too."""

    def blocks_at(self, length: int) -> int:
        """Return how many blocks a request keeps for a prefix of so many hashes."""
        ends = ((group, length // group.scale) for group in self.all)
        return sum(end - group.first_needed(end) for group, end in ends)

    def parts(self, start: int, length: int) -> list[Part]:
        """Return the blocks behind a local hit of ``start`` hashes that a prefix of ``length``
        hashes needs, group by group; groups that need none are left out."""
        needed = ((group, *_needed(group, start, length)) for group in self.all)
        return [Part(g.number, first, end - first) for g, first, end in needed if first < end]

    def longest(self, start: int, stop: int, hashes: int, find: Find) -> Restorable:
        """Find the longest prefix, of at most ``stop`` hashes, that every group can restore behind
        a local hit of ``start`` hashes.  ``hashes``: how many hashes there are.  Without ``runs``
        there is none.  Asks ``find`` for each block at most once."""
        if len(self.all) == 1:
            hashes = min(hashes, stop)  # as vLLM, where a draft layer's block must be in the hit
        covers = [_Cover(group, find) for group in self.all]
        full_first = sorted(covers, key=lambda cover: not cover.group.is_full)
        length, common, settled = stop - stop % self.step, 0, start % self.step != 0
        while length > start and not settled:
            settled = True
            for cover in full_first:
                common = common or length * (not cover.group.is_full)
                limit = cover.limit(start, length, hashes)
                if limit < length:
                    length, settled = limit - limit % self.step, False
                    break
        common = common if common > max(length, start) else 0
        if length <= start or start % self.step:
            return Restorable(start, common, (), ())
        runs = [run for cover in covers for run in cover.cut(start, length)]
        return Restorable(length, common, tuple(self.parts(start, length)), tuple(runs))


class Restorable(NamedTuple):
    """A prefix that can be restored."""

    length: int
    """In hashes, from the prompt's begin."""
    common: int
    """Hashes of the longest prefix that the groups of full attention alone can restore, if it is
    longer, else 0: the other groups keep blocks at some lengths only."""
    parts: tuple[Part, ...]
    runs: tuple[PlannedRun, ...]
    """Who holds the blocks of the parts, in their order."""


def _needed(group: Group, start: int, length: int) -> tuple[int, int]:
    """The blocks that a group needs of a prefix behind a local hit, as begin and end."""
    end = length // group.scale
    return max(group.first_needed(end), start // group.scale), end


@dataclass
class _Cover:
    """Consecutive blocks of one group that somebody holds, as far as they were looked for."""

    group: Group
    find: Find
    first: int = 0
    end: int = 0
    runs: list[PlannedRun] = field(default_factory=list)

    def limit(self, start: int, length: int, hashes: int) -> int:
        """Return the longest length up to ``length`` that the group's blocks do not rule out."""
        group, (first, end) = self.group, _needed(self.group, start, length)
        stop = end + group.ahead
        if stop * group.scale > hashes:
            return min(length, (hashes // group.scale - group.ahead) * group.scale)
        if first >= stop:
            return length
        self._look(first, stop)
        return length if self.end >= stop else (self.end - group.ahead) * group.scale

    def _look(self, first: int, stop: int) -> None:
        """Extend the cover to the blocks from ``first`` to ``stop``, or to the first of them that
        nobody holds.  Earlier calls had no smaller ``stop``."""
        if self.runs and self.first <= first:
            return
        unknown = min(self.first, stop) if self.runs else stop
        found = list(self.find(self.group, first, unknown))
        reached = first + sum(run.num_blocks for run in found)
        if self.runs and reached == self.first:
            found += self.runs
            reached = self.end
        self.first, self.end, self.runs = first, reached, found

    def cut(self, start: int, length: int) -> Iterator[PlannedRun]:
        """Yield the runs of what a prefix of ``length`` hashes needs."""
        first, end = _needed(self.group, start, length)
        at = self.first
        for run in self.runs:
            begin, stop = max(first, at), min(end, at + run.num_blocks)
            if begin < stop:
                cut = slice((begin - at) * RECORD_BYTES, (stop - at) * RECORD_BYTES)
                yield run._replace(records=run.records[cut])
            at += run.num_blocks
