"""What is copied of engines that are about to be stopped: what they alone have, hottest first.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from kvshm.api import BlockName

from .catalogue import Catalogue

LIST_SECONDS = 0.5
"""Between two lists of the same engines' blocks."""


class Keepers(NamedTuple):
    """How several keepers share the work: each begins with a part, by name, and goes on with what
    the others have not copied by then."""

    turn: int = 0
    number: int = 1

    def begins_with(self, name: BlockName) -> bool:
        return name.key[0] % self.number == self.turn


class Leaving(NamedTuple):
    """Engines that are about to be stopped."""

    giving: frozenset[int]
    """Those of which keepers are to copy now what no engine has that goes on."""
    in_drain: frozenset[int]
    """All of them."""


class Outgoing:
    """The blocks that only engines in drain have."""

    def __init__(self) -> None:
        self._taken = set[BlockName]()
        """All that were taken since the first of these engines was put into drain."""
        self._names: list[BlockName] = []
        """The hottest last."""
        self._leaving = Leaving(frozenset(), frozenset())
        self._listed = 0.0

    def take(
        self,
        most: int,
        leaving: Leaving,
        known: Catalogue,
        is_kept: Callable[[BlockName], bool],
        keepers: Keepers,
        now: float,
    ) -> list[BlockName]:
        """Return at most ``most`` blocks to copy now."""
        before, self._leaving = self._leaving, leaving
        if not leaving.in_drain:
            self._taken.clear()
        if not leaving.giving:
            self._names.clear()
            return []
        if leaving != before or (not self._names and now >= self._listed + LIST_SECONDS):
            self._listed = now
            self._names = _list(leaving, known, is_kept, keepers)
        found = list[BlockName]()
        while self._names and len(found) < most:
            name = self._names.pop()
            if not is_kept(name) and _is_alone(known.holders(name), leaving):
                found.append(name)
        self._taken.update(found)
        return found

    def is_last(self, name: BlockName, known: Catalogue) -> bool:
        """Whether a kept block would be lost if it went: engines in drain have it, or had it."""
        return name in self._taken or _is_alone(known.holders(name), self._leaving)


def _list(
    leaving: Leaving,
    known: Catalogue,
    is_kept: Callable[[BlockName], bool],
    keepers: Keepers,
) -> list[BlockName]:
    """All blocks of engines that give away which no engine has that goes on, in the order in which
    ``Outgoing`` has them.  Of blocks that were used equally often the first of a prefix is worth
    most."""
    wanted = {
        name: (keepers.begins_with(name), known.uses(name), -depth)
        for engine in leaving.giving
        for name, depth in known.blocks_of(engine)
        if not is_kept(name) and _is_alone(known.holders(name), leaving)
    }
    return sorted(wanted, key=wanted.__getitem__)


def _is_alone(holders: Collection[int], leaving: Leaving) -> bool:
    return bool(holders) and all(holder in leaving.in_drain for holder in holders)
