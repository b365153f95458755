"""Whose each part of the memory is, and which blocks in it are free.  Pure.

All shelves lie in one memory, each with a grid of its own: block ``i`` of a shelf is the bytes from
``i * stride`` on.  The memory is divided into slabs.  A slab belongs to one shelf at a time, and a
shelf uses those blocks of its grid that lie in its slabs::

    slabs     |   of shelf 1   |   of shelf 1   |   of shelf 2   |      free      |
    shelf 1   |  0  |  1  |  2  |  3  |  4 ...               its block 5 is none: half of it is not
    shelf 2                                     |   (6)  |   7   |       its own
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import groupby

NUM_SLABS = 64


class Grid:
    """The blocks of one shelf."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.free: list[int] = []
        """Blocks in own slabs that may be filled; the last one is next."""
        self.used: set[int] = set()
        self.in_use = Counter[int]()
        """How many used blocks have a byte in each slab."""


class Room:
    """The memory of all shelves, which are named by numbers."""

    def __init__(self, nbytes: int, unit: int, num_slabs: int = NUM_SLABS) -> None:
        """``unit``: what every stride is a multiple of."""
        self.nbytes = nbytes
        self._slab = max(nbytes // num_slabs // unit, 1) * unit
        self._owners: list[int | None] = [None] * (nbytes // self._slab)
        self._grids: dict[int, Grid] = {}

    @property
    def usable(self) -> int:
        """Bytes of all slabs."""
        return self._slab * len(self._owners)

    def open(self, shelf: int, stride: int) -> None:
        """A shelf begins, with no slab."""
        self._grids[shelf] = Grid(stride)

    def close(self, shelf: int) -> None:
        """A shelf ends: its slabs are free."""
        del self._grids[shelf]
        self._owners = [None if owner == shelf else owner for owner in self._owners]

    def spare(self, shelf: int, giving_way: Collection[int] = ()) -> int:
        """Return how many more blocks a shelf may fill while no other block goes, but for those of
        shelves that are ``giving_way``."""
        stride, blocks = self._grids[shelf].stride, 0
        mine = (None, shelf, *giving_way)

        def may_be_its(slab: int) -> bool:
            return self._owners[slab] in mine or self._is_idle(slab)

        for its, run in groupby(range(len(self._owners)), may_be_its):
            slabs = list(run)
            first = -(-slabs[0] * self._slab // stride)
            blocks += max((slabs[-1] + 1) * self._slab // stride - first, 0) if its else 0
        return blocks - len(self._grids[shelf].used)

    def take(self, shelf: int) -> int | None:
        """Take a free block, with another slab if one is needed and free."""
        grid = self._grids[shelf]
        if not grid.free and not self._grow(shelf, grid):
            return None
        block = grid.free.pop()
        grid.used.add(block)
        grid.in_use.update(self._slabs_of(grid, block))
        return block

    def leave(self, shelf: int, block: int) -> None:
        """A block is free again."""
        grid = self._grids[shelf]
        grid.used.remove(block)
        grid.free.append(block)
        grid.in_use.subtract(self._slabs_of(grid, block))

    def idle(self, shelf: int) -> list[int]:
        """Return the slabs of other shelves in which no block is used."""
        owners = enumerate(self._owners)
        return [slab for slab, owner in owners if owner != shelf and self._is_idle(slab)]

    def owners(self, shelf: int, slabs: Collection[int]) -> Collection[int]:
        """Return the other shelves to which these slabs belong."""
        return self._others(shelf, slabs).keys()

    def can_take(self, shelf: int) -> bool:
        """Whether ``take`` would return a block."""
        grid = self._grids[shelf]
        return bool(grid.free) or self._next_slabs(shelf, grid) is not None

    def window(self, shelf: int, at: int) -> range:
        """Return the slabs that a shelf needs for its block around byte ``at``; for its last one if
        behind that there is no other."""
        grid = self._grids[shelf]
        return self._slabs_of(grid, min(at, self.usable - grid.stride) // grid.stride)

    def in_the_way(self, shelf: int, slabs: Collection[int]) -> dict[int, list[int]]:
        """Return the blocks that have to go if these slabs are to be a shelf's: by the number of
        their shelf, those in use with a byte in one of them."""
        found = dict[int, list[int]]()
        for owner, its in self._others(shelf, slabs).items():
            grid = self._grids[owner]
            found[owner] = [each for each in self._touching(grid, its) if each in grid.used]
        return found

    def give_up(self, shelf: int, slabs: Collection[int]) -> None:
        """These slabs are a shelf's to take, and those beside them that their owner now has no use
        for; no block of another shelf in them is in use."""
        for owner, its in self._others(shelf, slabs).items():
            grid = self._grids[owner]
            lost = self._touching(grid, its)
            around = {slab for block in lost for slab in self._slabs_of(grid, block)}
            for slab in around.union(its):
                if self._owners[slab] == owner and self._is_idle(slab):
                    self._owners[slab] = None
            grid.free = [each for each in grid.free if self._owns(owner, grid, each)]

    def _is_idle(self, slab: int) -> bool:
        """Whether no block of its owner's in it is used."""
        owner = self._owners[slab]
        return owner is not None and not self._grids[owner].in_use[slab]

    def _others(self, shelf: int, slabs: Collection[int]) -> dict[int, list[int]]:
        """Those of the slabs that follow each other which are other shelves', by owner."""
        found = dict[int, list[int]]()
        for slab in slabs:
            if (owner := self._owners[slab]) not in (None, shelf):
                found.setdefault(owner, []).append(slab)
        return found

    # -- grids

    def _grow(self, shelf: int, grid: Grid) -> bool:
        """Take slabs for at least one more block.  Whether there were such."""
        if (slabs := self._next_slabs(shelf, grid)) is None:
            return False
        self._take_slabs(shelf, grid, slabs)
        return True

    def _next_slabs(self, shelf: int, grid: Grid) -> range | None:
        """Slabs with one more block, not all of them its own yet."""
        for slab in range(len(self._owners)):
            if self._owners[slab] is None:
                for block in self._touching(grid, (slab,)):
                    wanted = self._slabs_of(grid, block)
                    if all(self._owners[each] in (None, shelf) for each in wanted):
                        return wanted
        return None

    def _take_slabs(self, shelf: int, grid: Grid, slabs: Collection[int]) -> None:
        fresh = [slab for slab in slabs if self._owners[slab] is None]
        for slab in fresh:
            self._owners[slab] = shelf
        grid.free += [
            block
            for block in sorted(self._touching(grid, fresh), reverse=True)
            if self._owns(shelf, grid, block)
        ]

    def _owns(self, shelf: int, grid: Grid, block: int) -> bool:
        return all(self._owners[each] == shelf for each in self._slabs_of(grid, block))

    def _touching(self, grid: Grid, slabs: Collection[int]) -> Iterator[int]:
        """The blocks with a byte in one of these slabs, which follow each other."""
        if not slabs:
            return iter(())
        first, end = min(slabs) * self._slab, (max(slabs) + 1) * self._slab
        last = min(-(-end // grid.stride), self.usable // grid.stride)
        return iter(range(first // grid.stride, last))

    def _slabs_of(self, grid: Grid, block: int) -> range:
        start, end = block * grid.stride, (block + 1) * grid.stride
        return range(start // self._slab, -(-end // self._slab))
