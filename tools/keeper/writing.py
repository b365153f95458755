"""Writes what is kept through to a store, unless the store has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvshm.api import BlockName

from .generations import Generations
from .shelf import Shelf
from .staging import Memory, Staging
from .store import block_keys, write_value
from .store_link import StoreLink

MOST_WAITING = 1 << 16
"""Names of blocks of one shelf that wait; further ones are left out."""
AGAIN_SECONDS = 5.0
"""Before the next try, after the store has not taken something."""


class _Batch(NamedTuple):
    shelf: Shelf
    generation: int
    names: list[BlockName]

    @property
    def keys(self) -> list[str]:
        return block_keys(self.shelf.layout.fingerprint, self.generation, self.names)


class Writing:
    """Used by the keeper's thread."""

    def __init__(
        self,
        link: StoreLink,
        generations: Generations,
        memory: Memory,
        clock: Callable[[], float],
    ) -> None:
        self._link, self._generations, self._memory = link, generations, memory
        self._clock, self._next_at = clock, clock()
        self._staging = Staging(link.store)
        self._waiting: dict[Shelf, dict[BlockName, None]] = {}
        """Of all shelves that are open."""
        self._busy = False

    def add(self, shelf: Shelf, names: Iterable[BlockName]) -> None:
        """These blocks have come to be kept, not from the store."""
        waiting = self._waiting.setdefault(shelf, {})
        for name in names:
            if len(waiting) < MOST_WAITING:
                waiting[name] = None

    def go_round(self, shelves: Iterable[Shelf]) -> None:
        """Begin to write, if there is something to write and nothing is being written."""
        self._waiting = {shelf: self._waiting.get(shelf, {}) for shelf in shelves}
        if self._busy or not self._link.usable or self._clock() < self._next_at:
            return
        for shelf, waiting in self._waiting.items():
            if waiting and (generation := self._generations.of(shelf)) is not None:
                if not (most := self._staging.values(shelf)):
                    waiting.clear()
                    continue
                names = [name for name, _ in zip(list(waiting), range(most), strict=False)]
                for name in names:
                    del waiting[name]
                self._begin(_Batch(shelf, generation, names))
                return

    def _begin(self, batch: _Batch) -> None:
        self._busy, store, keys = True, self._link.store, batch.keys
        self._link.writes.make(lambda: store.has(keys), lambda there: self._stage(batch, there))

    def _stage(self, batch: _Batch, there: list[bool] | None) -> None:
        """Copy what the store lacks: a block may go while it is written."""
        shelf, names, values = batch.shelf, list[BlockName](), list[memoryview]()
        if there is None:
            self._try_again(shelf, batch.names)
        for name, known in zip(batch.names, there or (), strict=False):
            if shelf.closed:  # meanwhile: its memory has other blocks now
                break
            kept = shelf.kept(name)
            if known or kept is None or self._generations.of(shelf) != batch.generation:
                continue
            content, block = kept
            value = self._staging.value(shelf, len(values))
            write_value(
                value, shelf.layout.fingerprint, content, self._memory.bytes_of(shelf, block)
            )
            names.append(name)
            values.append(value)
        lacking = batch._replace(names=names)
        if not names:
            self._busy = False
            return
        store, keys = self._link.store, lacking.keys
        self._link.writes.make(
            lambda: store.put(keys, values), lambda written: self._end(lacking, written)
        )

    def _end(self, batch: _Batch, written: list[bool] | None) -> None:
        self._busy = False
        done = written or [False] * len(batch.names)
        if not batch.shelf.closed:
            batch.shelf.node.count("store_written", sum(done))
        if left := [name for name, is_there in zip(batch.names, done, strict=True) if not is_there]:
            self._try_again(batch.shelf, left)

    def _try_again(self, shelf: Shelf, names: Sequence[BlockName]) -> None:
        """The store has failed, or has no room: these are written later, if they are kept then."""
        self._next_at = self._clock() + AGAIN_SECONDS
        self.add(shelf, names)
