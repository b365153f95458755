"""Which generation of blocks in a store holds: a withdrawal on any node begins another one.

An engine that withdraws its blocks and goes on says that they may be wrong.  Copies of them may lie
in the store, and on every node that has fetched them.  So the keeper of its node raises a number in
the store, which is a part of each block's key; the other keepers look at it before they show what
they have fetched, and once a second, and drop what they have fetched of an earlier one.

Who finds no number makes one up that was never used: if the store has lost it, what was written
before is out of reach, too.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from .shelf import Shelf
from .store import Store, generation_key
from .store_link import StoreLink

LOOK_SECONDS = 1.0


@dataclass(slots=True)
class _Known:
    number: int = 0
    """The highest that this keeper has seen."""
    withdrawals: int = 0
    """Of this node."""
    covered: int = -1
    """How many of them the number covers, as the store has said; -1: it has said nothing yet."""
    withdrawn: frozenset[int] = frozenset()
    """The epochs that were withdrawn."""
    shelf: Shelf | None = None
    """The one that is open, or was last."""
    looking: bool = False
    look_at: float = 0.0


class Generations:
    """Used by the keeper's thread."""

    def __init__(
        self, link: StoreLink, superseded: Callable[[Shelf], None], unused: Callable[[], int]
    ) -> None:
        """``superseded``: called when a shelf's blocks from elsewhere may be wrong.  ``unused``:
        returns a number that no keeper has used, and will, higher than those that were."""
        self._link, self._superseded, self._unused = link, superseded, unused
        self._known: dict[str, _Known] = {}
        """By fingerprint."""

    def of(self, shelf: Shelf) -> int | None:
        """Return the number with which a shelf's blocks are read and written now; None: not at
        all."""
        known = self._known.get(shelf.layout.fingerprint)
        if known is None or known.covered != known.withdrawals:
            return None
        return known.number if shelf.node.withdrawn() <= known.withdrawn else None

    def follow(self, shelf: Shelf, now: float) -> None:
        """Take note of withdrawals here, and look for those of other nodes now and then."""
        key = generation_key(shelf.layout.fingerprint)
        known = self._known.setdefault(shelf.layout.fingerprint, _Known())
        known.shelf = shelf
        if fresh := shelf.node.withdrawn() - known.withdrawn:
            self._add(known, fresh)
        if known.looking or now < known.look_at or not self._link.connected:
            return
        known.looking, known.look_at = True, now + LOOK_SECONDS
        store, number, asked = self._link.store, known.number, known.withdrawals
        raising, unused = asked > max(known.covered, 0), self._unused()

        def looked(found: int | None) -> None:
            known.looking = False
            if found is not None:
                self._take(known, found)
                known.covered = asked

        self._link.looks.make(lambda: _look(store, key, number, raising, unused), looked)

    def withdrawn(self, shelf: Shelf, epoch: int) -> None:
        """An engine says that it has withdrawn this epoch, perhaps when no keeper was there."""
        known = self._known[shelf.layout.fingerprint]
        if epoch not in known.withdrawn:
            self._add(known, {epoch})

    def _add(self, known: _Known, epochs: Set[int]) -> None:
        known.withdrawn |= epochs
        known.withdrawals += 1
        known.look_at = 0.0  # at once

    def seen(self, shelf: Shelf, number: int) -> None:
        """A fetch has found this number in the store."""
        if (known := self._known.get(shelf.layout.fingerprint)) is not None:
            self._take(known, number)

    def _take(self, known: _Known, found: int) -> None:
        if found > known.number:
            known.number = found
            if known.covered >= 0 and known.shelf is not None and not known.shelf.closed:
                self._superseded(known.shelf)


def _look(store: Store, key: str, least: int, raising: bool, unused: int) -> int:
    """Return the store's number, which is now at least this one, and, if it is to be raised, higher
    than it was."""
    found = store.number(key)
    if not max(found, least):
        found = store.first_number(key, unused)
        if found == unused:  # else another keeper was quicker, and has perhaps been used
            return found
    wanted = max(found, least) + raising
    if found < wanted:
        store.set_number(key, wanted)
    return wanted
