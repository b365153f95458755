"""The kept blocks of one fingerprint: a joined engine, its memory, and what it hears."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvshm.api import (
    BlockContent,
    BlockName,
    Config,
    EngineLayout,
    FoundBlocks,
    LoadOfBlocks,
    LoadState,
    TransportError,
    join_like,
)

from .admission import TURN_SECONDS, Known, Waiting
from .catalogue import Catalogue
from .eviction import Place
from .outgoing import Keepers, Leaving, Outgoing
from .room import Room

if TYPE_CHECKING:
    from ..kv.kept_files import KeptFile

SETTLE_SECONDS = 1.0
"""After a shelf has joined nothing is copied for so long, nor shown of what files held: it gets to
know the engines, and what other keepers have."""
AGAIN_SECONDS = 5.0
"""Between two looks at what was let go."""
MOST_AT_ONCE = 64
"""Blocks of one load."""
FROM_ELSEWHERE = 0
"""Source of blocks from a file or a store: no epoch has this number."""
MAX_BLOCKS = 1 << 20
"""Of one shelf: slots, and what is known of blocks, take memory too."""


class Stored(NamedTuple):
    """A block that has come to be kept."""

    name: BlockName
    at: Place
    before: Place


class Kept(NamedTuple):
    """Where a block is kept."""

    block: int
    since: float
    source: int
    """The epoch of the engine that it was copied from, or FROM_ELSEWHERE."""
    content: BlockContent


class Filled(NamedTuple):
    """All that one shelf keeps, and in which blocks."""

    layout: EngineLayout
    contents: Sequence[BlockContent]
    blocks: Sequence[int]


class Joining(NamedTuple):
    """How all shelves join."""

    config: Config
    name: str


class Shelf:
    """One fingerprint's part of a keeper.  One thread."""

    def __init__(
        self, number: int, layout: EngineLayout, memory: Any, room: Room, joining: Joining
    ) -> None:
        """``memory``: of all shelves, and ``room``: whose each part of it is.  Raises KvshmError,
        and OSError."""
        self.number = number
        self.layout = layout
        self.room = room
        num_blocks = min(room.usable // layout.stride, MAX_BLOCKS)
        if not num_blocks:
            raise TransportError(f"a block has {layout.stride} bytes, all memory {room.usable}")
        self.node = join_like(
            layout,
            memory=memory,
            num_blocks=num_blocks,
            config=joining.config,
            name=joining.name,
            wait=0,
        )
        room.open(number, layout.stride)
        self._known = Catalogue()
        self._waiting = Waiting()
        self._outgoing = Outgoing()
        self._kept: dict[BlockName, Kept] = {}
        self._names: dict[int, BlockName] = {}
        """The kept block in each place."""
        self._sources = Counter[int]()
        """How many kept blocks are copies of an engine's."""
        self._tried: set[BlockName] = set()
        """What could not be copied, and is tried once more."""
        self._load: tuple[LoadOfBlocks, FoundBlocks] | None = None
        self._joined_at: float | None = None
        self._keepers: frozenset[int] = frozenset()
        self._withdrawn: frozenset[int] = frozenset()
        """The epochs whose blocks were taken back."""

    def __len__(self) -> int:
        return len(self._kept)

    # -- what is heard

    def hear(self, now: float) -> Iterator[BlockName]:
        """Take note of what other engines have published.  Yields kept blocks that were of use."""
        keepers = self.node.keepers()
        self._waiting.let_go |= not keepers >= self._keepers  # what one had, nobody keeps now
        self._keepers = keepers
        if self._joined_at is None and self.node.joined:
            self._joined_at = now
        if self._has_settled(now):
            self.node.resume()
        for news in self.node.news():
            for use in self._known.hear(news, self._keepers):
                if use.name in self._kept:
                    yield use.name
                else:
                    self._waiting.add(use.name, now)

    def look_again(self, now: float) -> None:
        """There is room: what was let go for lack of it may be wanted now."""
        due = now >= self._waiting.looked_at + AGAIN_SECONDS
        if due and self._waiting.let_go and not self._waiting:
            self._waiting.let_go, self._waiting.looked_at = False, now
            for name in self._known.names():
                if name not in self._kept:
                    self._waiting.add(name, now)

    def wanted(self, most: int, room: int, now: float) -> list[BlockName]:
        """Return at most ``most`` blocks to copy now.  ``room``: for how many nothing has to go."""
        if self._load is not None or not self._has_settled(now):
            return []
        most, turn = min(most, MOST_AT_ONCE), sum(epoch < self.epoch for epoch in self._keepers)
        leaving = Leaving(self.node.giving_away(), self.node.in_drain())
        keepers = Keepers(turn, 1 + len(self._keepers))
        if outgoing := self._outgoing.take(most, leaving, self._known, self._is_kept, keepers, now):
            return outgoing
        before = now - TURN_SECONDS * (1 + turn) if self._keepers else now
        return list(self._waiting.take(most, room, self._what_is_known, before))

    def _has_settled(self, now: float) -> bool:
        return self._joined_at is not None and now >= self._joined_at + SETTLE_SECONDS

    def _what_is_known(self, name: BlockName) -> Known:
        there = bool(self._known.holders(name))
        return Known(self._known.uses(name), self._is_kept(name), there)

    def is_near(self, name: BlockName) -> bool:
        """Whether an engine of the node, this one included, has a block."""
        return name in self._kept or bool(self._known.holders(name))

    def _is_kept(self, name: BlockName) -> bool:
        """Whether a keeper has a block, this one or another."""
        return name in self._kept or not self._keepers.isdisjoint(self._known.holders(name))

    @property
    def epoch(self) -> int:
        """Of the joined engine; 0 while it has none."""
        return self.node.epoch

    # -- copying

    def begin(self, names: Sequence[BlockName], blocks: Sequence[int]) -> int:
        """Begin to copy some of these blocks, those that are found, and leave the others' places.
        Those without a place are let go, and those of engines that do not answer now.  Returns how
        many.  No other load may be going on."""
        found = self.node.lookup_blocks(names[: len(blocks)])
        self._waiting.let_go |= len(found.contents) < len(names)
        targets, rest = blocks[: len(found.contents)], blocks[len(found.contents) :]
        for block in rest:
            self.room.leave(self.number, block)
        if targets:
            self._load = self.node.load_blocks(found, targets), found
        return len(targets)

    def end(self, now: float) -> list[Stored]:
        """Return what a load that has ended has brought, which engines can read now."""
        if self._load is None or self._load[0].poll() is LoadState.PENDING:
            return []
        load, found = self._load
        self._load, failed = None, frozenset(load.failed)
        not_kept = self.node.withdrawn() | self._keepers  # only who is asked knows of a withdrawal
        good, blocks = [], []
        copied = zip(found.contents, load.targets, found.sources, strict=True)
        for content, block, source in copied:
            if block in failed or content.name in self._kept or source in not_kept:
                self.room.leave(self.number, block)
                self._try_again(content.name, now)
            else:
                self._tried.discard(content.name)
                self._keep(Kept(block, now, source, content))
                good.append(content)
                blocks.append(block)
        return self._show(good, blocks)

    def fill(self, file: KeptFile, memory: memoryview, now: float) -> list[Stored]:
        """Keep what a file holds, as far as there is room and its bytes are as they were.  Engines
        see it once this one knows them, and so hears what they withdraw.  Raises KvshmError."""
        self.node.pause()
        filled = dict[BlockName, tuple[BlockContent, int]]()
        for row, content in enumerate(file.contents):
            if content.name in self._kept or content.name in filled:
                continue
            if (block := self.take()) is None:
                break
            if file.copy(row, self.layout.places(block), memory):
                filled[content.name] = content, block
            else:
                self.room.leave(self.number, block)
        return self.add(list(filled.values()), now)

    def add(self, filled: Sequence[tuple[BlockContent, int]], now: float) -> list[Stored]:
        """Keep blocks that were filled from elsewhere, none of which was kept."""
        for content, block in filled:
            self._keep(Kept(block, now, FROM_ELSEWHERE, content))
        return self._show([content for content, _ in filled], [block for _, block in filled])

    def _keep(self, kept: Kept) -> None:
        self._kept[kept.content.name] = kept
        self._names[kept.block] = kept.content.name
        self._sources[kept.source] += 1

    def _show(self, contents: Sequence[BlockContent], blocks: Sequence[int]) -> list[Stored]:
        """Let engines read these blocks."""
        self.node.publish_blocks(contents, blocks)
        return [
            Stored(c.name, self._place(c.group, c.key[:8]), self._place(c.group, c.parent))
            for c in contents
        ]

    def _try_again(self, name: BlockName, now: float) -> None:
        """The engine may not have been attached yet."""
        if name in self._tried or not self._known.holders(name):
            self._tried.discard(name)
            self._waiting.let_go = True
        else:
            self._tried.add(name)
            self._waiting.add(name, now)

    def _place(self, group: int, tag: bytes) -> Place:
        return Place(self.number, group, tag)

    @property
    def is_copying(self) -> bool:
        """Whether a load is going on."""
        return self._load is not None

    def names(self) -> list[BlockName]:
        """Return all kept blocks."""
        return list(self._kept)

    # -- room

    @property
    def most(self) -> int:
        """How many blocks it can keep, if all memory is its."""
        return self.room.usable // self.layout.stride

    def take(self) -> int | None:
        """Return a free block, or None."""
        return self.room.take(self.number)

    def evict(self, name: BlockName, now: float) -> None:
        """Keep a block no more, because its place is needed; it is free."""
        self.node.evict(self._kept[name].block, now - self._kept[name].since)
        self._forget(name)

    def take_back(self) -> list[BlockName]:
        """Keep no more what its engine has withdrawn: it may be wrong, and other engines hear of it
        now.  Waits for readers of it, for the drain budget at most.  Returns what that was."""
        sources = withdrawn = frozenset(self.node.withdrawn())
        if withdrawn - self._withdrawn:  # neither file nor store says whose each block was
            sources |= {FROM_ELSEWHERE}
        self._withdrawn = withdrawn
        return self._take_back(sources & self._sources.keys())

    def take_back_elsewhere(self) -> list[BlockName]:
        """``take_back`` of what came from files and stores."""
        return self._take_back({FROM_ELSEWHERE} & self._sources.keys())

    def _take_back(self, sources: Collection[int]) -> list[BlockName]:
        if not sources:
            return []
        names = [name for name, kept in self._kept.items() if kept.source in sources]
        self.node.retract([self._kept[name].block for name in names])
        for name in names:
            self._forget(name)
        return names

    def _forget(self, name: BlockName) -> None:
        gone = self._kept.pop(name)
        del self._names[gone.block]
        self._sources[gone.source] -= 1
        if not self._sources[gone.source]:
            del self._sources[gone.source]
        self.room.leave(self.number, gone.block)

    def is_needed(self, name: BlockName) -> bool:
        """Whether an engine is copying a block, or holds it, or it ``is_last``."""
        return self.is_last(name) or bool(self.node.kept([self._kept[name].block]))

    def is_last(self, name: BlockName) -> bool:
        """Whether no engine has a block that goes on, but one that is in drain."""
        return self._outgoing.is_last(name, self._known)

    def names_in(self, blocks: Sequence[int]) -> list[BlockName] | None:
        """Return what is kept in these places; None if one of them is being filled."""
        names = [self._names.get(block) for block in blocks]
        return [each for each in names if each is not None] if None not in names else None

    def kept(self, name: BlockName) -> tuple[BlockContent, int] | None:
        """Return what a kept block holds, and which one it is; None if it is not kept."""
        found = self._kept.get(name)
        return (found.content, found.block) if found is not None else None

    def byte_of(self, name: BlockName) -> int:
        """Return where a kept block begins in the memory."""
        return self._kept[name].block * self.layout.stride

    def filled(self) -> Filled:
        """Return what is kept, for a file."""
        kept = {b: c for b, c in self.node.contents().items() if b in self._names}
        return Filled(self.layout, list(kept.values()), list(kept))

    # -- the end

    @property
    def closed(self) -> bool:
        """Whether its part of the memory is others' now."""
        return self.node.closed

    def close(self) -> None:
        """Leave, with all that is kept.  Blocks for some seconds at most."""
        self.node.close()
        self.room.close(self.number)
