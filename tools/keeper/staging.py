"""Memory between a keeper's blocks and a store's values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvshm.api import BlockName

from .shelf import Shelf, Stored
from .store import HEADER_BYTES, Store, StoreError

STAGED_BYTES = 16 << 20
"""Of the values of one call, or one value."""


class Memory(Protocol):
    """Where a keeper keeps blocks."""

    def place(self, shelf: Shelf, now: float) -> int | None:
        """Take a block to fill; others go for it if they must."""
        ...

    def bytes_of(self, shelf: Shelf, block: int) -> Iterable[memoryview]:
        """The bytes of a block's regions, rank by rank."""
        ...

    def added(self, shelf: Shelf, stored: Iterable[Stored]) -> None:
        """These blocks were filled, and are kept."""
        ...

    def use(self, shelf: Shelf, names: Iterable[BlockName]) -> None:
        """These blocks are wanted: of those that are kept, others go first."""
        ...

    def take_back_elsewhere(self, shelf: Shelf) -> None:
        """Keep no more what came from files and stores: it may be wrong."""
        ...


class Staging:
    """Room for the values of one call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._buffer = store.buffer(STAGED_BYTES)

    def values(self, shelf: Shelf) -> int:
        """Return how many values of a shelf fit, and have room for one at least.  0: the store
        takes no memory for it."""
        size = value_bytes(shelf)
        if size > len(self._buffer):  # a call under way keeps the memory that it has
            try:
                self._buffer = self._store.buffer(size)
            except StoreError:
                return 0
        return len(self._buffer) // size

    def value(self, shelf: Shelf, index: int) -> memoryview:
        """Return room for one value."""
        size = value_bytes(shelf)
        return self._buffer[index * size : (index + 1) * size]


def value_bytes(shelf: Shelf) -> int:
    return HEADER_BYTES + sum(map(sum, shelf.layout.block_bytes))
