"""Which of the published blocks are kept: all as long as there is room, then those that were used
twice; what engines in drain have see outgoing.py.  Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvshm.api import BlockName

MOST_LOOKED = 1 << 12
"""Blocks that are looked at in one go."""
MAX_WAITING = 1 << 16
"""Blocks that wait to be looked at; of more, the oldest are let go."""
TURN_SECONDS = 1.0
"""How much longer each further keeper waits, for what those before it do not take.  If there are
several, the first one waits as well: it hears of what the others have no sooner than they of it."""
TWICE = 2


class Offer(NamedTuple):
    """A block that could be kept."""

    name: BlockName
    since: float
    """When it was heard of."""


class Known(NamedTuple):
    """What is known of an offered block."""

    uses: int
    """How often an engine has computed or imported it."""
    kept: bool
    """Whether a keeper has it, this one or another."""
    there: bool = True
    """Whether an engine still has it."""


def is_admitted(known: Known, room: bool) -> bool:
    """Whether to copy a block.  ``room``: nothing has to go for it."""
    return known.there and not known.kept and (room or known.uses >= TWICE)


class Waiting:
    """Blocks that wait to be looked at, in the order in which they were heard of."""

    def __init__(self, most: int = MAX_WAITING) -> None:
        self._offers = deque[Offer](maxlen=most)
        self.let_go = False
        """Whether a block was let go that is wanted if there is room; the reader takes it back."""
        self.looked_at = 0.0
        """When the reader last did."""

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, name: BlockName, now: float) -> None:
        self.let_go |= len(self._offers) == self._offers.maxlen
        self._offers.append(Offer(name, now))

    def take(
        self, most: int, room: int, known: Callable[[BlockName], Known], before: float
    ) -> Iterator[BlockName]:
        """Yield at most ``most`` blocks to copy, of those that were heard of ``before`` a moment,
        and let go of those that are not admitted.  ``room``: for how many nothing has to go.  What
        has gone again takes no other block's turn, so a keeper that cannot follow keeps what it
        can."""
        taken = set[BlockName]()
        for _ in range(min(len(self._offers), MOST_LOOKED)):
            if len(taken) >= most or self._offers[0].since > before:
                break
            name = self._offers.popleft().name
            if name in taken:
                continue
            about = known(name)
            if is_admitted(about, room > len(taken)):
                taken.add(name)
                yield name
            else:
                self.let_go |= about.there and not about.kept
