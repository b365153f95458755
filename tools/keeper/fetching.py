"""Fetches from a store what engines ask for and nobody on their node has: once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvshm._engine.store_asks import Coming, Wanted
from kvshm.api import BlockContent, BlockName

from .desk import Desk
from .fetch_times import FetchTimes
from .generations import Generations
from .shelf import Shelf
from .staging import Memory, Staging, value_bytes
from .store import HEADER_BYTES, Store, block_keys, generation_key, read_value
from .store_link import StoreLink
from .wanted import Prompt

MOST_ASKS = 64
"""Of one round: the keeper has other things to do."""


class _Ask(NamedTuple):
    """An engine waits for blocks that are being fetched."""

    shelf: Shelf
    route: bytes
    wanted: Wanted
    awaits: set[BlockName]


class _Batch(NamedTuple):
    """Blocks of one call."""

    shelf: Shelf
    generation: int
    names: Sequence[BlockName]
    values: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.values))


class _Read(NamedTuple):
    """What a call has done."""

    good: Sequence[bool]
    generation: int
    seconds: float


class Fetching:
    """Used by the keeper's thread."""

    def __init__(
        self,
        link: StoreLink,
        generations: Generations,
        memory: Memory,
        desk: Desk,
        clock: Callable[[], float],
    ) -> None:
        self._link, self._generations, self._memory = link, generations, memory
        self._desk, self._clock = desk, clock
        self._staging = Staging(link.store)
        self._times = FetchTimes()
        self._waiting: list[tuple[Shelf, int, BlockName]] = []
        """With their generations, in the order in which they are fetched."""
        self._under_way: dict[Shelf, dict[BlockName, None]] = {}
        self._asks: list[_Ask] = []
        self._busy = False

    def go_round(self, shelves: Mapping[str, Shelf]) -> None:
        """Answer what has arrived, and fetch."""
        self._under_way = {each: self._under_way.get(each, {}) for each in shelves.values()}
        self._waiting = [each for each in self._waiting if not each[0].closed]
        for route, wanted in islice(self._desk.asks(), MOST_ASKS):
            shelf = shelves.get(wanted.fingerprint.hex())
            if shelf is not None and wanted.withdrew:
                self._generations.withdrawn(shelf, wanted.withdrew)
            generation = self._generations.of(shelf) if shelf is not None else None
            if shelf is None or generation is None:
                self._desk.answer(route, Coming(wanted.number, 0, 0.0))
                continue
            ask = _Ask(shelf, route, wanted, set())
            if self._may_fetch(shelf):
                self._look(ask, generation)
            else:
                self._refuse(ask)
        if not self._link.usable:
            self._give_up()
        elif self._waiting and not self._busy:
            self._fetch()

    def _may_fetch(self, shelf: Shelf) -> bool:
        return self._link.usable and shelf.node.joined and self._staging.values(shelf) > 0

    def _answer(self, ask: _Ask, length: int, seconds: float) -> None:
        """The number in the store is higher than when the engine's blocks were withdrawn."""
        coming = Coming(ask.wanted.number, length, seconds, ask.wanted.withdrew)
        self._desk.answer(ask.route, coming)

    def _refuse(self, ask: _Ask) -> None:
        self._answer(ask, 0, 0.0)

    # -- what is asked for

    def _look(self, ask: _Ask, generation: int) -> None:
        """See which blocks the store has that the node lacks."""
        shelf, prompt = ask.shelf, Prompt(ask.wanted)
        under_way = self._under_way[shelf]
        names = [n for n in prompt.names() if not shelf.is_near(n) and n not in under_way]
        keys, store = block_keys(shelf.layout.fingerprint, generation, names), self._link.store

        def decide(there: list[bool] | None) -> None:
            found = {name for name, has in zip(names, there or (), strict=False) if has}
            self._decide(ask, prompt, found, generation)

        self._link.looks.make(lambda: store.has(keys), decide)

    def _decide(
        self, ask: _Ask, prompt: Prompt, found: Collection[BlockName], generation: int
    ) -> None:
        """Fetch what makes the prompt's prefix longer, if that is faster than to compute it."""
        shelf, wanted = ask.shelf, ask.wanted
        under_way = self._under_way.get(shelf, {})

        def has(name: BlockName) -> bool:
            return name in found or name in under_way or shelf.is_near(name)

        length = 0 if shelf.closed else prompt.longest(has)
        needed = [name for name in prompt.needed(length) if not shelf.is_near(name)]
        fresh = [name for name in needed if name not in under_way]
        under_way_now = len(under_way) + len(fresh)
        known = self._times.seconds(under_way_now * value_bytes(shelf))
        seconds = wanted.seconds if known is None else known  # at first it may take as long
        fast = known is None or self._times.are_less(seconds, wanted.seconds)
        worth = length > wanted.lacking.found and fast
        kept = [name for name in prompt.needed(length) if shelf.kept(name) is not None]
        if not worth or len(kept) + len(needed) > shelf.most:
            self._refuse(ask)
            return
        self._answer(ask, length, seconds)
        self._memory.use(shelf, kept)
        under_way.update(dict.fromkeys(fresh))
        self._waiting += [(shelf, generation, name) for name in fresh]
        if needed:
            self._asks.append(ask._replace(awaits=set(needed)))

    # -- what is fetched

    def _fetch(self) -> None:
        """Read as many blocks of one shelf as one call reads."""
        shelf, generation, _ = self._waiting[0]
        same = [name for at, number, name in self._waiting if (at, number) == (shelf, generation)]
        names = same[: self._staging.values(shelf)]
        chosen = set(names)
        self._waiting = [w for w in self._waiting if w[0] is not shelf or w[2] not in chosen]
        values = [self._staging.value(shelf, index) for index in range(len(names))]
        batch = _Batch(shelf, generation, names, values)
        self._busy, store, clock = True, self._link.store, self._clock
        self._link.reads.make(
            lambda: _read(store, clock, batch), lambda read: self._take_in(batch, read)
        )

    def _take_in(self, batch: _Batch, read: _Read | None) -> None:
        self._busy = False
        shelf, good = batch.shelf, list[BlockName]()
        if shelf.closed:  # meanwhile
            return
        if read is not None:
            self._times.add(batch.nbytes, read.seconds)
            self._generations.seen(shelf, read.generation)
            if self._generations.of(shelf) == batch.generation:
                good = self._keep(batch, read)
        self._done(shelf, batch.names, good)

    def _keep(self, batch: _Batch, read: _Read) -> list[BlockName]:
        """Keep the blocks that are as they were written; return the names of all that are kept."""
        shelf, now = batch.shelf, self._clock()
        sound, damaged = _sound(batch, read)
        fresh = [each for each in sound if shelf.kept(each[0].name) is None]
        places = [self._memory.place(shelf, now) for _ in fresh]
        shelf.node.drain()  # an importer that reads what gave way discards what it has read
        filled = []
        for (content, value), block in zip(fresh, places, strict=True):
            if block is not None:
                _copy(value, self._memory.bytes_of(shelf, block))
                filled.append((content, block))
        shelf.node.count("store_damaged", damaged)  # first: who finds the blocks finds them counted
        shelf.node.count("store_fetched", len(filled))
        self._memory.added(shelf, shelf.add(filled, now))
        return [name for name in batch.names if shelf.kept(name) is not None]

    def _done(
        self, shelf: Shelf, names: Collection[BlockName], good: Collection[BlockName]
    ) -> None:
        """Blocks have come, or do not come: tell who waits for those that do not."""
        bad, waiting = set(names).difference(good), list[_Ask]()
        for name in names:
            self._under_way[shelf].pop(name, None)
        for ask in self._asks:
            if ask.shelf is shelf and not ask.awaits.isdisjoint(bad):
                self._refuse(ask)
                continue
            if ask.shelf is shelf:
                ask.awaits.difference_update(names)
            if ask.awaits and not ask.shelf.closed:
                waiting.append(ask)
        self._asks = waiting

    def _give_up(self) -> None:
        """The store does not answer: nothing comes of what engines wait for."""
        for ask in self._asks:
            self._refuse(ask)
        for shelf, _, name in self._waiting:
            self._under_way.get(shelf, {}).pop(name, None)
        self._asks, self._waiting = [], []


def _sound(batch: _Batch, read: _Read) -> tuple[list[tuple[BlockContent, memoryview]], int]:
    """Return the blocks that are as they were written, and how many others there are."""
    sound, damaged = [], 0
    for name, value, good in zip(batch.names, batch.values, read.good, strict=True):
        content = read_value(value, batch.shelf.layout.fingerprint, name) if good else None
        if content is not None:
            sound.append((content, value))
        damaged += good and content is None
    return sound, damaged


def _copy(value: memoryview, parts: Iterable[memoryview]) -> None:
    at = HEADER_BYTES
    for part in parts:
        part[:] = value[at : at + len(part)]
        at += len(part)


def _read(store: Store, clock: Callable[[], float], batch: _Batch) -> _Read:
    """Read blocks, and then the generation: what was withdrawn before is not shown."""
    fingerprint, begun = batch.shelf.layout.fingerprint, clock()
    good = store.get(block_keys(fingerprint, batch.generation, batch.names), batch.values)
    seconds = clock() - begun
    return _Read(good, store.number(generation_key(fingerprint)), seconds)
