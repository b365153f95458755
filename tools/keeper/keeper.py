"""Keeps blocks of all fingerprints of a namespace, within one memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from kvshm.api import BlockName, Config, EngineLayout, EngineView, KvshmError, allocate

from .eviction import Eviction
from .looks import Look, Looks
from .pace import Pace
from .room import Room
from .shelf import Joining, Shelf, Stored

if TYPE_CHECKING:
    from ..kv.kept_files import Files
    from .store_tier import StoreTier

BUSY_SECONDS, IDLE_SECONDS = 0.005, 0.05
"""Between two rounds, while something is copied and while nothing is."""
MOST_SHELVES = 8
"""As many engines as one process may be."""
MOST_SPARED = 16
"""Candidates that are passed over because they are being read."""


class KeptName(NamedTuple):
    """A kept block, among those of all shelves."""

    shelf: int
    name: BlockName


class Limits(NamedTuple):
    """What the user allows."""

    memory: int
    """Bytes of blocks, of all fingerprints together."""
    rate: int
    """Bytes that are copied a second."""
    absent_seconds: float
    """For how long no engine of a fingerprint may be there before its blocks give way."""


class Keeper:
    """One thread, which calls ``go_round`` again and again."""

    def __init__(
        self, config: Config, limits: Limits, name: str, now: float, say: Callable[[str], None]
    ) -> None:
        """``say``: is told of shelves, and of engines of which nothing is kept.  Blocks while the
        kernel clears the memory.  Raises ConfigError, and TransportError without memory."""
        self._limits, self._say = limits, say
        self._joining = Joining(config, name)
        self._memory = allocate(limits.memory, config)
        self._room = Room(limits.memory, mmap.PAGESIZE)
        self._looks = Looks(config)
        self._pace = Pace(limits.rate, now)
        self._shelves: dict[str, Shelf] = {}
        """By fingerprint."""
        self._seen: dict[str, float] = {}
        """When an engine of each fingerprint was last there."""
        self._eviction = Eviction[KeptName]()
        self._looked = now
        """When it was last known which engines there are."""
        self._number = 0
        self._left_out: set[str] = set()
        self._tier: StoreTier | None = None
        """A store beyond the node."""

    def use_store(self, tier: StoreTier) -> None:
        """Write what is kept through to a store, and fetch from it."""
        self._tier = tier

    def go_round(self, now: float) -> float:
        """Do what is due, without waiting for any engine; return after how many seconds to call it
        again.  Only the end of a shelf may take a second."""
        if (look := self._looks.latest()) is not None:
            self._looked = now
            self._take_in(look)
        busy = False
        for shelf in list(self._shelves.values()):
            if shelf not in self._shelves.values():  # it has given way to the one before it
                continue
            self._take_back(shelf)
            if self._spare(shelf, now):
                shelf.look_again(now)
            for used in shelf.hear(now):
                self._eviction.use(KeptName(shelf.number, used))
            self._kept(shelf, shelf.end(now))
            busy |= self._copy(shelf, now)
        if self._tier is not None:
            self._tier.go_round(self._shelves)
        return BUSY_SECONDS if busy or self._is_copying else IDLE_SECONDS

    def _kept(self, shelf: Shelf, stored: Sequence[Stored]) -> None:
        """These blocks have come to be kept, from engines or files."""
        self.added(shelf, stored)
        if self._tier is not None and stored:
            self._tier.kept(shelf, [each.name for each in stored])

    @property
    def _is_copying(self) -> bool:
        return any(shelf.is_copying for shelf in self._shelves.values())

    def _take_back(self, shelf: Shelf) -> bool:
        """Keep no more what engines have withdrawn.  Whether there was something."""
        gone = shelf.take_back()
        for name in gone:
            self._eviction.remove(KeptName(shelf.number, name))
        return bool(gone)

    # -- which engines there are

    def _take_in(self, look: Look) -> None:
        self._seen |= dict.fromkeys((view.fingerprint for view in look.engines), self._looked)
        for view in look.engines:
            if view.fingerprint not in self._shelves:
                self._open(view, look)
            elif refusal := self._shelves[view.fingerprint].node.refusal:
                self._leave_out(view, refusal)

    def _open(self, view: EngineView, look: Look) -> None:
        if (layout := look.layouts.get(view.fingerprint)) is None:
            self._leave_out(view, "it does not say how its blocks are made up")
            return
        too_many = len(self._shelves) >= MOST_SHELVES
        if too_many and not self._close_absent(self._looked - self._limits.absent_seconds):
            self._leave_out(view, f"blocks of {MOST_SHELVES} fingerprints are kept already")
            return
        try:
            self._open_shelf(layout)
        except (KvshmError, OSError) as exc:
            self._leave_out(view, str(exc))

    def _open_shelf(self, layout: EngineLayout) -> Shelf:
        """Raises KvshmError, and OSError."""
        self._number += 1
        shelf = Shelf(self._number, layout, self._memory, self._room, self._joining)
        self._left_out.discard(layout.fingerprint)
        self._shelves[layout.fingerprint] = shelf
        self._seen.setdefault(layout.fingerprint, self._looked)
        kept = f"blocks of {layout.stride} bytes of {layout.model or 'a model without a name'}"
        self._say(f"keeping {kept}, fingerprint {layout.fingerprint[:16]}")
        return shelf

    def _leave_out(self, view: EngineView, why: str) -> None:
        if view.fingerprint not in self._left_out:
            self._left_out.add(view.fingerprint)
            self._say(f"keeping nothing of engine {view.name}: {why}")

    def _close_absent(self, since: float, but: Shelf | None = None) -> bool:
        """Close the shelf whose engines have been away longest, since that time at least.  Returns
        whether there was one."""
        found = next((f for f in self._away(since) if self._shelves[f] is not but), "")
        if not found:
            return False
        shelf = self._shelves.pop(found)
        for name in shelf.names():
            self._eviction.remove(KeptName(shelf.number, name))
        shelf.close()
        self._say(f"gave way: {shelf.layout.model}, fingerprint {found[:16]}")
        return True

    # -- copying

    def _copy(self, shelf: Shelf, now: float) -> bool:
        """Begin to copy blocks, if there are some and it is time.  Whether it did."""
        most = self._pace.blocks(shelf.layout.stride, now)
        # With a store what gives way is not lost, and all that engines compute is to be in it.
        room = self._spare(shelf, now) if self._tier is None else most
        if not most or not (names := shelf.wanted(most, room, now)):
            return False
        blocks = self._places(shelf, len(names), now)
        begun = shelf.begin(names, blocks)
        self._pace.copied(begun, shelf.layout.stride)
        return begun > 0

    def _spare(self, shelf: Shelf, now: float) -> int:
        """How many more blocks it may keep while none goes that an engine could use."""
        away = [self._shelves[found] for found in self._away(now - self._limits.absent_seconds)]
        others = [other.number for other in away if other is not shelf]
        return self._room.spare(shelf.number, others)

    def _away(self, since: float) -> list[str]:
        """The fingerprints of which no engine has been here since then, the longest away first."""
        since = min(since, self._looked)
        return sorted(
            (f for f in self._shelves if self._seen[f] < since), key=self._seen.__getitem__
        )

    def _places(self, shelf: Shelf, wanted: int, now: float) -> Sequence[int]:
        """Return at most ``wanted`` blocks to copy into; others go for them if they must."""
        places = list[int]()
        while len(places) < wanted:
            if (place := shelf.take()) is not None:
                places.append(place)
            elif not self._make_room(shelf, now):
                break
        return places

    def _make_room(self, shelf: Shelf, now: float) -> bool:
        """Let a block go or, if it is another shelf's, all that are in its way; or all of a
        fingerprint whose engines are away, or slabs that another shelf does not use.  Whether
        there is room now."""
        if self._close_absent(now - self._limits.absent_seconds, but=shelf):
            return True
        if self._hand_over(shelf, self._room.idle(shelf.number)):
            return True
        for _ in range(MOST_SPARED):
            if (gone := self._candidate()) is None:
                return False
            if self._replace(gone, shelf, now):
                return True
            self._eviction.use(gone)
        return False

    def _replace(self, gone: KeptName, shelf: Shelf, now: float) -> bool:
        """Let a block go, and what else is in the way of a block of this shelf's there.  Whether
        that could be done."""
        holder = self._numbered()[gone.shelf]
        if holder is shelf:
            self._evict(holder, gone.name, now)
            return True
        slabs = self._room.window(shelf.number, holder.byte_of(gone.name))
        return self._clear(shelf, slabs, now) and self._hand_over(shelf, slabs)

    def _clear(self, shelf: Shelf, slabs: Sequence[int], now: float) -> bool:
        """Let all go that other shelves keep in these slabs; not if one of the blocks is being
        filled or read, or engines in drain alone have it besides."""
        shelves, going = self._numbered(), list[KeptName]()
        for number, blocks in self._room.in_the_way(shelf.number, slabs).items():
            if (names := shelves[number].names_in(blocks)) is None:
                return False
            if any(map(shelves[number].is_needed, names)):
                return False
            going += [KeptName(number, name) for name in names]
        for number, name in going:
            self._evict(shelves[number], name, now)
        return True

    def _hand_over(self, shelf: Shelf, slabs: Sequence[int]) -> bool:
        """Make slabs a shelf's to take, in which no other one uses a block.  Whether it can fill a
        block now."""
        shelves = self._numbered()
        for number in self._room.owners(shelf.number, slabs):
            shelves[number].node.drain()  # an importer that reads there discards what it has read
        self._room.give_up(shelf.number, slabs)
        return self._room.can_take(shelf.number)

    def _numbered(self) -> dict[int, Shelf]:
        return {shelf.number: shelf for shelf in self._shelves.values()}

    def _evict(self, shelf: Shelf, name: BlockName, now: float) -> None:
        self._eviction.remove(KeptName(shelf.number, name))
        shelf.evict(name, now)

    def _candidate(self) -> KeptName | None:
        """The block that goes next: if possible one that nobody is reading, and none that engines
        in drain alone have besides."""
        by_number, found = self._numbered(), None
        for _ in range(MOST_SPARED):
            found = self._eviction.candidate()
            if found is None or not by_number[found.shelf].is_needed(found.name):
                return found
            self._eviction.use(found)
        assert found is not None
        return None if by_number[found.shelf].is_last(found.name) else found

    # -- what a store's tier uses (staging.Memory)

    def place(self, shelf: Shelf, now: float) -> int | None:
        """Take a block to fill; others go for it if they must."""
        return next(iter(self._places(shelf, 1, now)), None)

    def bytes_of(self, shelf: Shelf, block: int) -> Iterator[memoryview]:
        """The bytes of a block's regions, rank by rank."""
        for rank in shelf.layout.places(block):
            for place in rank:
                yield self._memory.buffer[place]

    def added(self, shelf: Shelf, stored: Iterable[Stored]) -> None:
        """These blocks were filled, and are kept."""
        for each in stored:
            self._eviction.add(KeptName(shelf.number, each.name), each.at, each.before)

    def use(self, shelf: Shelf, names: Iterable[BlockName]) -> None:
        """These blocks are wanted: of those that are kept, others go first."""
        for name in names:
            self._eviction.use(KeptName(shelf.number, name))

    def take_back_elsewhere(self, shelf: Shelf) -> None:
        """Keep no more what came from files and stores: it may be wrong."""
        for name in shelf.take_back_elsewhere():
            self._eviction.remove(KeptName(shelf.number, name))

    # -- files

    def read(self, files: Files) -> None:
        """Keep what files hold, as far as there is room.  Before the first round; blocks while they
        are read."""
        count = lacking = 0
        for file in files.read():
            try:
                shelf = self._shelves.get(file.layout.fingerprint)
                shelf = shelf or self._open_shelf(file.layout)
                stored = shelf.fill(file, self._memory.buffer, self._looked)
            except (KvshmError, OSError) as exc:
                self._say(f"left out, and removed: {file.path}: {exc}")
                continue
            self._kept(shelf, stored)
            count += len(stored)
            if not self._room.spare(shelf.number):
                lacking += len(file.contents) - len(stored)
        more = f"; {lacking} others had no room, and are gone" if lacking else ""
        self._say(f"read {count} blocks from files{more}")

    def write(self, files: Files) -> bool:
        """Write all that is kept into files; engines may go on reading it, and what they withdraw
        meanwhile is in no file afterwards.  Returns whether all could be written."""
        shelves = list(self._shelves.values())
        for shelf in shelves:
            self._take_back(shelf)  # the last round is some time ago
        waiting = dict.fromkeys(shelves)
        while waiting:
            shelf, _ = waiting.popitem()
            for _ in files.write(shelf.filled(), self._memory.buffer):
                changed = [each for each in shelves if self._take_back(each)]
                for each in changed:
                    files.take_back(each.layout.fingerprint)
                waiting |= dict.fromkeys(changed)
                if shelf in changed:
                    break
        return files.finish()

    # -- the end

    def close(self) -> None:
        """Leave the node.  Blocks for some seconds at most."""
        self._looks.close()
        nodes = [shelf.node for shelf in self._shelves.values()]
        self._shelves.clear()
        with ThreadPoolExecutor(MOST_SHELVES) as at_once:
            for done in [at_once.submit(node.close) for node in nodes]:
                done.result()
        self._memory.close()
