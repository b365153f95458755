"""Which blocks a prompt needs of a store: the longest prefix that can be had.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvshm._base.ids import BlockHash
from kvshm._engine.groups import Group, Groups
from kvshm._engine.store_asks import Wanted
from kvshm.api import BlockName


class Prompt:
    """The blocks of a prompt that an engine has asked for."""

    def __init__(self, wanted: Wanted) -> None:
        self._hashes = wanted.hashes
        self._groups = Groups(wanted.groups)
        start, _, stop = wanted.lacking
        self._start, self._stop = start, min(stop, len(self._hashes))
        if len(self._groups.all) == 1:  # a draft layer's block is within the hit
            self._hashes = self._hashes[: self._stop]

    def names(self) -> list[BlockName]:
        """Return all blocks that some prefix may need, by group."""
        found = list[BlockName]()
        for group in self._groups.all:
            first = max(0, group.first_needed(self._start // group.scale))
            found += self._names(group, first, len(self._hashes) // group.scale)
        return found

    def longest(self, has: Callable[[BlockName], bool]) -> int:
        """Return the longest prefix of which all blocks can be had, in hashes; not longer than the
        local hit: there is none."""
        step, groups = self._groups.step, self._groups.all
        others = [group for group in groups if not group.is_full]
        length = min([self._stop, *(self._most(group, has) for group in groups if group.is_full)])
        length -= length % step
        while length > self._start:
            if self._reaches(length) and all(map(has, self._needed(others, length))):
                return length if self.needed(length) else self._start  # chunks end there
            length -= step
        return self._start

    def needed(self, length: int) -> list[BlockName]:
        """Return the blocks that a prefix needs behind the local hit."""
        return self._needed(self._groups.all, length)

    def _needed(self, groups: Sequence[Group], length: int) -> list[BlockName]:
        found = list[BlockName]()
        for group in groups:
            first, end = group.needed(self._start, length)
            ahead = 0 if group.state else group.ahead
            found += self._names(group, first, end + ahead if first < end else end)
        return found

    def _reaches(self, length: int) -> bool:
        ends = ((g, length // g.scale + (0 if g.state else g.ahead)) for g in self._groups.all)
        return all(end * group.scale <= len(self._hashes) for group, end in ends)

    def _most(self, group: Group, has: Callable[[BlockName], bool]) -> int:
        """The longest prefix that a group of full attention allows."""
        end = first = self._start // group.scale
        for name in self._names(group, first, len(self._hashes) // group.scale):
            if not has(name):
                break
            end += 1
        return (end - group.ahead) * group.scale

    def _names(self, group: Group, first: int, end: int) -> Iterator[BlockName]:
        scale = group.scale
        for own in self._hashes[(first + 1) * scale - 1 : end * scale : scale]:
            yield BlockName(BlockHash(own), group.number)
