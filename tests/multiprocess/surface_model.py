"""One node, and what a plain model says of its blocks: each is free, published or being loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import kvshm
from kvshm import Config, Found, Identity, Load, LoadState, Region
from kvshm._base.ids import Epoch
from kvshm._shm.layout import SlotState
from kvshm._shm.slot_table import Slot

from .processes import PATIENCE_SECONDS, Node, wait_until
from .surface_contents import BLOCK, BLOCKS, TOKENS, content, garbage

T = TypeVar("T")


def identity(kind: str) -> Identity:
    return Identity(engine="toy 1", model="m", weights=kind)


class Modelled:
    def __init__(self, place: Node, kind: str) -> None:
        self.kind = kind
        self.memory = kvshm.allocate(BLOCK * BLOCKS)
        self.node = kvshm.join(
            identity(kind),
            memory=self.memory,
            regions=[Region(0, BLOCK, BLOCK, BLOCKS)],
            block_size=TOKENS,
            name="own",
            config=Config(run_dir=str(place.run_dir), namespace=place.namespace),
        )
        assert self.node.wait_joined(PATIENCE_SECONDS)
        self.published: dict[int, bytes] = {}
        self.loads: list[tuple[Load, Sequence[bytes]]] = []
        self.found: list[Found] = []
        self.is_paused = False
        self._let_go: threading.Event | None = None
        for block in range(BLOCKS):
            self.write(block, garbage(block))

    @property
    def loading(self) -> list[int]:
        return [block for load, _ in self.loads for block in load.targets]

    @property
    def free(self) -> list[int]:
        taken = {*self.published, *self.loading}
        return [block for block in range(BLOCKS) if block not in taken]

    def write(self, block: int, what: bytes) -> None:
        self.memory.buffer[block * BLOCK : (block + 1) * BLOCK] = what

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """They are not published any more, and get other contents at once."""
        for block in blocks:
            del self.published[block]
            self.write(block, garbage(block))

    def read(self, block: int) -> bytes:
        return bytes(self.memory.buffer[block * BLOCK : (block + 1) * BLOCK])

    def hold_copies(self) -> None:
        """Copies into its memory wait until ``let_go``."""
        if self._let_go is None:
            self._let_go = threading.Event()
            self.node._halves.ranks.halves[0].transport.copier.submit(self._let_go.wait)

    def let_go(self) -> None:
        if self._let_go is not None:
            self._let_go.set()
        self._let_go = None

    def wait_until_copying(self) -> None:
        """Wait until copies are held up, or all loads have ended otherwise."""
        rank = self.node._halves.ranks.halves[0]
        wait_until(
            lambda: bool(rank.transport.copier._waiting) or len(rank._reports) >= rank._unreported,
            "copies begin",
        )

    @property
    def holds_copies(self) -> bool:
        return self._let_go is not None

    @contextmanager
    def openings_held_up(self) -> Iterator[threading.Event]:
        """The rank opens no epoch before the end of this; the event tells that one was begun."""
        rank, begun, go_on = self.node._halves.ranks.halves[0], threading.Event(), threading.Event()
        original = rank.open_epoch

        def open_later(epoch: Epoch) -> None:
            begun.set()
            assert go_on.wait(PATIENCE_SECONDS)
            original(epoch)

        rank.open_epoch = open_later
        try:
            yield begun
        finally:
            go_on.set()
            rank.open_epoch = original

    def judge(self) -> None:
        """Take note of the loads that have ended: what they call good is right, to the byte."""
        for load, keys in list(self.loads):
            if load.poll() is LoadState.PENDING:
                continue
            assert load.failed == load.targets[load.good :]
            assert (load.state is LoadState.DONE) == (load.failed == ())
            for block, key in list(zip(load.targets, keys, strict=True))[: load.good]:
                assert self.read(block) == content(key), f"block {block} of {load} is wrong"
            self.loads.remove((load, keys))
            for block in load.targets:
                self.write(block, garbage(block))

    def check(self) -> None:
        self.judge()
        own = self.node._own
        assert {b: c.key for b, c in own.contents.items()} == self.published
        for block, key in self.published.items():
            assert self.read(block) == content(key), f"block {block} has changed"
        for block in self.free:
            assert self.read(block) == garbage(block), f"block {block} has changed"
        self._check_table()

    def _check_table(self) -> None:
        """Nothing is readable but what the model has, and only in an epoch that is open."""
        cache, opened = self.node._halves.cache, self.node._open
        if (state := cache.epoch_state) is None:
            return
        slots = list(state.table.slots())
        ready = {b: s.block_hash for b, s in enumerate(slots) if s.state is SlotState.READY}
        assert ready.items() <= self.published.items()
        assert not ready or state.table.alive, "blocks are readable before the rank serves them"
        if opened is state and not self.is_paused:
            assert ready == self.published
        assert self.draining() == set(), "a retracted block may still be read"
        assert state.table.check_integrity() == []

    def draining(self) -> set[int]:
        """Retracted blocks that somebody may still read."""
        return {b for b, s in enumerate(self._slots()) if s.state is SlotState.DRAINING}

    def leased(self) -> set[int]:
        return {b for b, s in enumerate(self._slots()) if s.leases}

    def counted(self, counter: str) -> int:
        state = self.node._halves.cache.epoch_state
        return state.table.counters.snapshot()[counter] if state else 0

    def _slots(self) -> list[Slot]:
        state = self.node._halves.cache.epoch_state
        return list(state.table.slots()) if state else []

    def end_loads(self) -> None:
        """All loads end within a bound."""
        self.let_go()
        for load, _ in self.loads:
            assert load.wait(PATIENCE_SECONDS) is not LoadState.PENDING, f"{load} never ended"
        self.judge()
        assert self.loads == []
        assert self.node._own._loading == set()

    def close(self) -> None:
        self.let_go()
        self.node.close()
        self.memory.close()


def pick(things: Sequence[T], first: int, number: int) -> list[T]:
    count = min(number, len(things))
    return [things[(first + i) % len(things)] for i in range(count)]
