"""KV cache groups: what each needs of a prefix, and the longest prefix that all can restore.

Pure.  A group is a set of layers with one block table (docs/kv-cache-groups.md).  A prefix is
counted in hashes, one for every ``hash_block_size`` tokens; a block covers one, or ``scale`` of
them.  The first block that a group needs never moves back when the prefix grows, so the search
lowers the length to the first needed block that no engine holds until there is none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES


@dataclass(frozen=True)
class Group:
    """One KV cache group: layers that share one block table.  Without ``window``, ``chunk`` and
    ``state`` it has full attention."""

    number: int
    """Its index, from 0 on."""
    block_size: int
    """Tokens per block."""
    scale: int = 1
    """Hashes (keys) per block."""
    window: int = 0
    """Tokens of its sliding window, the present token included."""
    chunk: int = 0
    """Tokens of a chunk of its chunked local attention."""
    ahead: int = 0
    """Blocks that must be held behind a prefix, although they are not restored: 1 if draft layers
    use the group (EAGLE).  A lookup needs the keys of these, too.  A group that keeps states needs
    none."""
    state: bool = False
    """Whether a block holds the layers' state behind its last token (Mamba, linear attention):
    then a prefix needs its last block, and no other."""

    @property
    def is_full(self) -> bool:
        """Whether it has full attention."""
        return not (self.window or self.chunk or self.state)

    def first_needed(self, blocks: int) -> int:
        """Return the first block that a prefix of ``blocks`` blocks needs."""
        if self.state:
            return max(0, blocks - 1)
        if self.window:
            return max(0, blocks - -(-(self.window - 1) // self.block_size))
        if self.chunk:
            return blocks * self.block_size // self.chunk * self.chunk // self.block_size
        return 0

    def needed(self, start: int, length: int) -> tuple[int, int]:
        """Return the blocks that a prefix of ``length`` hashes needs behind a local hit of
        ``start`` hashes, as first and end; there are none if the first is not before the end."""
        end = length // self.scale
        return max(self.first_needed(end), start // self.scale), end


class Part(NamedTuple):
    """Consecutive blocks of one group."""

    group: int
    """The group's number."""
    first: int
    """Index of the first block in the group's block table."""
    num_blocks: int
    """How many blocks."""


class Find(Protocol):
    """Finds blocks of one prompt."""

    def __call__(self, group: Group, first: int, stop: int, /) -> tuple[list[PlannedRun], int]:
        """The longest run of blocks from ``first`` on, before ``stop``, that somebody holds, cut
        where the holder changes; and the index behind its last block."""

    def last(self, group: Group, start: int, stop: int, /) -> int:
        """The index behind the last of these blocks that somebody seems to hold; or ``start``."""


class Groups:
    """All groups of an engine."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """``groups``: in the order of their numbers, which begin at 0."""
        self.all = tuple(groups)
        self.step = math.lcm(*(group.scale for group in groups))
        """Hashes between two lengths at which a prefix can end."""
        one = groups[0]
        self.is_single_full_attention = len(groups) == 1 and one.is_full and not one.ahead
        """Whether a prefix is one chain of blocks, of which every shorter one is of use too."""
        # Full attention first: it bounds the others best, and its blocks are looked up only once.
        self._in_turn = sorted(range(len(groups)), key=lambda number: not groups[number].is_full)
        self._num_full = sum(group.is_full for group in groups)
        self.leading = groups[self._in_turn[0]]

    def reach(self, start: int, hashes: int) -> int:
        """Return the length, in hashes, of the longest prefix that ``hashes`` hashes can cover
        beyond a local hit of ``start``.  Returns ``start`` if none can be restored."""
        if self.is_single_full_attention:
            return hashes
        most = min((hashes // group.scale - group.ahead) * group.scale for group in self.all)
        most -= most % self.step
        return start if start % self.step or not self.parts(start, most) else most

    def blocks_at(self, length: int) -> int:
        """Return how many blocks a request keeps for a prefix of ``length`` hashes."""
        ends = ((group, length // group.scale) for group in self.all)
        return sum(end - group.first_needed(end) for group, end in ends)

    def parts(self, start: int, length: int) -> list[Part]:
        """Return the blocks behind a local hit of ``start`` hashes that a prefix of ``length``
        hashes needs, group by group; groups that need none are left out."""
        needed = ((group.number, *group.needed(start, length)) for group in self.all)
        return [Part(group, first, end - first) for group, first, end in needed if first < end]

    def longest(self, start: int, stop: int, hashes: int, find: Find) -> Restorable:
        """Find the longest prefix of at most ``stop`` of ``hashes`` hashes that every group can
        restore behind a local hit of ``start``; without ``runs`` there is none."""
        if len(self.all) == 1:
            hashes = min(hashes, stop)  # as vLLM, where a draft layer's block must be in the hit
        covers = [_Cover(group) for group in self.all]
        in_turn = [covers[number] for number in self._in_turn]
        length, full, at = stop - stop % self.step, 0, 0
        if start % self.step:
            length = start
        while length > start and at < len(in_turn):
            if at == self._num_full > 0:
                full = full or length
            limit = in_turn[at].limit(start, length, hashes, find)
            at = at + 1 if limit == length else 0  # all look again at a shorter length
            length = limit - limit % self.step
        common = full if full > length else 0
        if length <= start:
            return Restorable(start, common, (), ())
        parts, runs = list[Part](), list[PlannedRun]()
        for cover in covers:
            first, end = cover.wanted
            if first < end:
                parts.append(Part(cover.group.number, first, end - first))
                runs += cover.cut(first, end)
        return Restorable(length, common, tuple(parts), tuple(runs))


class Restorable(NamedTuple):
    """A prefix that can be restored."""

    length: int
    """In hashes, from the start of the prompt; without ``runs`` it says nothing."""
    common: int
    """Hashes of the longer prefix that the groups of full attention alone can restore, else 0."""
    parts: tuple[Part, ...]
    runs: tuple[PlannedRun, ...]
    """Who holds the blocks of the parts, in their order."""


class _Cover:
    """Consecutive blocks of one group that somebody holds, as far as they were looked for."""

    __slots__ = ("end", "first", "group", "runs", "wanted")

    def __init__(self, group: Group) -> None:
        self.group = group
        self.wanted = (0, 0)
        """The blocks that the length of the last ``limit`` needs, as first and end."""
        self.first = self.end = 0
        self.runs: deque[PlannedRun] = deque()

    def limit(self, start: int, length: int, hashes: int, find: Find) -> int:
        """Return the longest length up to ``length`` that the group's blocks do not rule out."""
        group = self.group
        self.wanted = first, end = group.needed(start, length)
        if group.state:
            return self._last_state(start // group.scale, end, find) * group.scale
        stop = end + group.ahead
        if stop * group.scale > hashes:
            return (hashes // group.scale - group.ahead) * group.scale
        if first >= stop:
            return length
        if not (self.runs and self.first <= first):
            self._look(first, stop, find)
        return length if self.end >= stop else (self.end - group.ahead) * group.scale

    def _last_state(self, start: int, stop: int, find: Find) -> int:
        """Look for the last state of a prefix of at most ``stop`` blocks; returns the blocks of
        that prefix, ``start`` if there is no state behind it.  One state says nothing of the next,
        so there is no run to follow."""
        if self.runs and self.end == stop:
            return stop
        while stop > start and (reached := find.last(self.group, start, stop)) > start:
            stop = reached - 1
            if found := find(self.group, stop, reached)[0]:
                self.first, self.end, self.runs = stop, reached, deque(found)
                return reached
        return start

    def _look(self, first: int, stop: int, find: Find) -> None:
        """Extend the cover to the blocks from ``first`` to ``stop``, or to the first of them that
        no engine holds.  Earlier calls had no smaller ``stop``."""
        unknown = min(self.first, stop) if self.runs else stop
        found, reached = find(self.group, first, unknown)
        if self.runs and reached == self.first:
            self.runs.extendleft(reversed(found))
        else:
            self.runs = deque(found)
            self.end = reached
        self.first = first

    def cut(self, first: int, end: int) -> Iterable[PlannedRun]:
        if (first, end) == (self.first, self.end):
            return self.runs
        at, parts = self.first, []
        for run in self.runs:
            start, stop = max(first, at), min(end, at + run.num_blocks)
            if start < stop:
                cut = slice((start - at) * RECORD_BYTES, (stop - at) * RECORD_BYTES)
                parts.append(run._replace(records=run.records[cut]))
            at += run.num_blocks
        return parts
