"""Which generation of blocks in a store holds: a withdrawal on any node begins another one.

An engine that withdraws its blocks and goes on says that they may be wrong.  Copies of them may lie
in the store, and on every node that has fetched them.  So the keeper of its node raises a number in
the store, which is a part of each block's key; the other keepers look at it before they show what
they have fetched, and once a second, and drop what they have fetched of an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .shelf import Shelf
from .store import Store, generation_key
from .store_link import StoreLink

LOOK_SECONDS = 1.0


@dataclass(slots=True)
class _Known:
    number: int = 0
    """The highest that this keeper has seen."""
    holds: bool = False
    """Whether the store has said so, and nothing was withdrawn since."""
    withdrawn: frozenset[int] = frozenset()
    """Epochs of engines of which the number takes account, or will."""
    looking: bool = False
    look_at: float = 0.0


class Generations:
    """Used by the keeper's thread."""

    def __init__(self, link: StoreLink, superseded: Callable[[Shelf], None]) -> None:
        """``superseded``: called when a shelf's blocks from elsewhere may be wrong."""
        self._link, self._superseded = link, superseded
        self._known: dict[str, _Known] = {}
        """By fingerprint."""

    def of(self, shelf: Shelf) -> int | None:
        """Return the number with which a shelf's blocks are read and written now; None: not at
        all."""
        known = self._known.get(shelf.layout.fingerprint)
        return known.number if known is not None and known.holds else None

    def follow(self, shelf: Shelf, now: float) -> None:
        """Take note of withdrawals here, and look for those of other nodes now and then."""
        known = self._known.setdefault(shelf.layout.fingerprint, _Known())
        fresh = shelf.node.withdrawn() - known.withdrawn
        if fresh:
            known.withdrawn |= fresh
            known.number += 1
            known.holds = False
        if known.looking or not (fresh or now >= known.look_at) or not self._link.connected:
            return
        known.looking, known.look_at = True, now + LOOK_SECONDS
        store, number, key = (
            self._link.store,
            known.number,
            generation_key(shelf.layout.fingerprint),
        )
        self._link.looks.make(
            lambda: _raise_to(store, key, number), lambda found: self._seen(shelf, known, found)
        )

    def seen(self, shelf: Shelf, number: int) -> None:
        """A fetch has found this number in the store."""
        if (known := self._known.get(shelf.layout.fingerprint)) is not None:
            self._seen(shelf, known, number, looked=False)

    def _seen(self, shelf: Shelf, known: _Known, found: int | None, looked: bool = True) -> None:
        known.looking &= not looked
        if found is None:
            return
        if found > known.number:
            began = known.number > 0 or known.holds
            known.number = found
            if began:
                self._superseded(shelf)
        if looked:
            known.holds = found == known.number


def _raise_to(store: Store, key: str, number: int) -> int:
    """Have the store's number be at least this one; return it."""
    found = store.number(key)
    if found < number:
        store.set_number(key, number)
    return max(found, number)
