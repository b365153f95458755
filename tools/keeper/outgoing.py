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


class Outgoing:
    """The blocks that only engines in drain have."""

    def __init__(self) -> None:
        self._taken = set[BlockName]()
        """All that were taken since the first of these drains began."""
        self._names: list[BlockName] = []
        """The hottest last."""
        self._engines: frozenset[int] = frozenset()
        self._listed = 0.0

    def take(
        self,
        most: int,
        engines: frozenset[int],
        known: Catalogue,
        is_kept: Callable[[BlockName], bool],
        keepers: Keepers,
        now: float,
    ) -> list[BlockName]:
        """Return at most ``most`` blocks to copy now.  ``engines``: those in drain."""
        if not engines:
            self._names.clear()
            self._taken.clear()
            self._engines = engines
            return []
        if engines != self._engines or (not self._names and now >= self._listed + LIST_SECONDS):
            self._engines, self._listed = engines, now
            self._names = _list(engines, known, is_kept, keepers)
        found = list[BlockName]()
        while self._names and len(found) < most:
            name = self._names.pop()
            if not is_kept(name) and _is_alone(known.holders(name), engines):
                found.append(name)
        self._taken.update(found)
        return found

    def is_last(self, name: BlockName, known: Catalogue) -> bool:
        """Whether a kept block would be lost if it went: engines in drain have it, or had it."""
        return name in self._taken or _is_alone(known.holders(name), self._engines)


def _list(
    engines: Collection[int],
    known: Catalogue,
    is_kept: Callable[[BlockName], bool],
    keepers: Keepers,
) -> list[BlockName]:
    """All blocks that only these engines have, in the order in which ``Outgoing`` has them.  Of
    blocks that were used equally often the first of a prefix is worth most."""
    wanted = {
        name: (keepers.begins_with(name), known.uses(name), -depth)
        for engine in engines
        for name, depth in known.blocks_of(engine)
        if not is_kept(name) and _is_alone(known.holders(name), engines)
    }
    return sorted(wanted, key=wanted.__getitem__)


def _is_alone(holders: Collection[int], engines: Collection[int]) -> bool:
    return bool(holders) and all(holder in engines for holder in holders)
