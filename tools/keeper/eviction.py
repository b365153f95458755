"""Which kept block goes next: SIEVE among the blocks behind which none is kept.  Pure.

A block is of use only with all blocks before it in its prefix.  So a block with a kept successor
never goes before that; the others stand in a queue, the newest at its head, and a hand goes from
the tail to the head (SIEVE, Zhang et al., NSDI 2024)::

    tail   o   o*  o   o*  o   head      *: used since the hand was here last
               ^ hand: takes the mark off a used block and goes on; the first other one goes

When a block goes, the one before it in its prefix may have become the last: it takes that place,
under the hand.  So a cold prompt goes from its end to its beginning, in one piece, and a beginning
that others share stays as long as one of them does.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Place(NamedTuple):
    """Where a block stands among all: what its successors name as the block before them."""

    shelf: int
    group: int
    tag: bytes
    """The first 8 bytes of its key; zeros, of which no block is the parent, before a prefix."""


class _Kept(Generic[Name]):
    __slots__ = ("at", "before", "name", "newer", "older", "queued", "used")

    def __init__(self, name: Name, at: Place, before: Place) -> None:
        self.name, self.at, self.before = name, at, before
        self.used = self.queued = False
        self.older: _Kept[Name] | None = None
        self.newer: _Kept[Name] | None = None


class Eviction(Generic[Name]):
    """The kept blocks of all shelves.  Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[Name, _Kept[Name]] = {}
        self._at: dict[Place, _Kept[Name]] = {}
        self._successors: dict[Place, int] = {}
        """How many kept blocks name this place as the one before them."""
        self._head: _Kept[Name] | None = None
        self._tail: _Kept[Name] | None = None
        self._hand: _Kept[Name] | None = None
        """Looked at next; None: the tail."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: Name) -> bool:
        return name in self._kept

    def add(self, name: Name, at: Place, before: Place) -> None:
        """A block is kept from now on, new and unused."""
        if name in self._kept:
            return
        new = self._kept[name] = _Kept(name, at, before)
        self._at[at] = new
        self._successors[before] = self._successors.get(before, 0) + 1
        if (parent := self._at.get(before)) is not None:
            if parent.queued:
                self._leave_queue(parent)
            else:
                parent.used = True  # two go on from here
        if not self._successors.get(at):
            self._enter_queue(new, self._head)

    def use(self, name: Name) -> None:
        """A block was of use."""
        if (kept := self._kept.get(name)) is not None:
            kept.used = True

    def candidate(self) -> Name | None:
        """Return the block that goes next, and moves the hand to it.  None if there is none."""
        found = self._hand or self._tail
        while found is not None and found.used:
            found.used = False
            found = found.newer or self._tail
        self._hand = found
        return found.name if found is not None else None

    def remove(self, name: Name) -> None:
        """A block is not kept any more.  Nothing happens if it was not."""
        if (gone := self._kept.pop(name, None)) is None:
            return
        if self._at.get(gone.at) is gone:
            del self._at[gone.at]
        self._successors[gone.before] -= 1
        if not self._successors[gone.before]:
            del self._successors[gone.before]
            if (parent := self._at.get(gone.before)) is not None and not parent.queued:
                self._take_place(parent, gone)
        if gone.queued:
            self._leave_queue(gone)

    # -- the queue

    def _take_place(self, parent: _Kept[Name], gone: _Kept[Name]) -> None:
        """Put the block before it where a block is that goes; at the tail if it is not queued."""
        self._enter_queue(parent, gone if gone.queued else None)
        if self._hand is gone:
            self._hand = parent

    def _enter_queue(self, new: _Kept[Name], older: _Kept[Name] | None) -> None:
        """Put a block on the newer side of ``older``; at the tail if that is None."""
        newer = older.newer if older is not None else self._tail
        new.older, new.newer, new.queued = older, newer, True
        if older is not None:
            older.newer = new
        else:
            self._tail = new
        if newer is not None:
            newer.older = new
        else:
            self._head = new

    def _leave_queue(self, gone: _Kept[Name]) -> None:
        if self._hand is gone:
            self._hand = gone.newer
        if gone.older is not None:
            gone.older.newer = gone.newer
        else:
            self._tail = gone.newer
        if gone.newer is not None:
            gone.newer.older = gone.older
        else:
            self._head = gone.older
        gone.older = gone.newer = None
        gone.queued = False
