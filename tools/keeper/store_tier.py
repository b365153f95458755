"""A store beyond the node as the second tier of a keeper, which is the node's one client of it.

::

    kept -----> waiting -----> has? ----> staged -----> put             writing.py
    asked ----> has? -----> longest prefix -----> get -----> kept       fetching.py
    withdrawn -----> the generation, which all nodes follow             generations.py

All calls of the store are made on other threads (calls.py), and what they have done is taken in by
the keeper's.  A store that fails or hangs is a miss: engines are told so at once, and compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from kvshm.api import BlockName

from .desk import Desk
from .fetching import Fetching
from .generations import Generations
from .shelf import Shelf
from .staging import Memory
from .store import Store
from .store_link import StoreLink
from .writing import Writing


class StoreTier:
    """Used by the keeper's thread."""

    def __init__(
        self,
        store: Store,
        desk: Desk,
        memory: Memory,
        clock: Callable[[], float],
        say: Callable[[str], None],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Does not wait for the store.  Raises TransportError without threads or descriptors."""
        self._desk, self._clock = desk, clock
        self._link = StoreLink(store, clock, say)
        self._generations = Generations(
            self._link, memory.take_back_elsewhere, lambda: wall_ns() // 1000
        )
        self._fetching = Fetching(self._link, self._generations, memory, desk, clock)
        self._writing = Writing(self._link, self._generations, memory, clock)

    @property
    def wakes(self) -> tuple[int, int]:
        """Descriptors that are readable when there is something to do."""
        return self._desk.fileno(), self._link.woken

    def kept(self, shelf: Shelf, names: Iterable[BlockName]) -> None:
        """Blocks have come to be kept, from engines."""
        self._writing.add(shelf, names)

    def go_round(self, shelves: Mapping[str, Shelf]) -> None:
        """Do what is due.  ``shelves``: all that are open, by fingerprint."""
        self._link.go_round()
        for shelf in shelves.values():
            self._generations.follow(shelf, self._clock())
            shelf.node.count("store_failed", self._link.take_failures())
        self._fetching.go_round(shelves)
        self._writing.go_round(shelves.values())

    def close(self) -> None:
        """Use the store no more; the desk is the caller's."""
        self._link.close()
