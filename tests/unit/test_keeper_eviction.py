"""Which kept block goes next, against a plain list; a block never goes before its successors."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshm.tools.keeper.eviction import Eviction, Place

Path = tuple[int, ...]
"""A block's prefix: what stands in it and in all blocks before it."""
paths = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)


def place(path: Path) -> Place:
    return Place(0, 0, repr(path).encode() if path else bytes(8))


class Model(RuleBasedStateMachine):
    """All that is kept, and the queue as a list from its tail to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.eviction = Eviction[Path]()
        self.kept: dict[Path, bool] = {}
        """Whether it was used since the hand was there."""
        self.queue: list[Path] = []
        self.hand: Path | None = None

    def is_last(self, path: Path) -> bool:
        return not any(other[:-1] == path for other in self.kept)

    @rule(path=paths)
    def add(self, path: Path) -> None:
        self.eviction.add(path, place(path), place(path[:-1]))
        if path in self.kept:
            return
        self.kept[path] = False
        if (before := path[:-1]) in self.queue:
            self.leave(before)
        elif before in self.kept:
            self.kept[before] = True
        if self.is_last(path):
            self.queue.append(path)

    @rule(path=paths)
    def use(self, path: Path) -> None:
        self.eviction.use(path)
        if path in self.kept:
            self.kept[path] = True

    @rule(path=paths)
    def remove(self, path: Path) -> None:
        self.eviction.remove(path)
        if path not in self.kept:
            return
        del self.kept[path]
        before, at = path[:-1], self.queue.index(path) if path in self.queue else -1
        if before in self.kept and self.is_last(before):
            self.queue.insert(at + 1, before)
            if self.hand == path:
                self.hand = before
        if at >= 0:
            self.leave(path)

    def leave(self, path: Path) -> None:
        at = self.queue.index(path)
        if self.hand == path:
            self.hand = self.queue[at + 1] if at + 1 < len(self.queue) else None
        self.queue.remove(path)

    @rule()
    def evict(self) -> None:
        at = self.queue.index(self.hand) if self.hand is not None else 0
        while self.queue and self.kept[self.queue[at]]:
            self.kept[self.queue[at]] = False
            at = (at + 1) % len(self.queue)
        found = self.queue[at] if self.queue else None
        self.hand = found
        assert self.eviction.candidate() == found
        if found is not None:
            assert self.is_last(found)
            self.remove(found)

    @invariant()
    def each_last_block_is_queued_once(self) -> None:
        assert sorted(self.queue) == sorted(path for path in self.kept if self.is_last(path))
        assert len(self.eviction) == len(self.kept)
        assert all(path in self.eviction for path in self.kept)


TestEviction = Model.TestCase
TestEviction.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is
)


def filled(*prompts: Path) -> Eviction[Path]:
    eviction = Eviction[Path]()
    for path in (prompt[: n + 1] for prompt in prompts for n in range(len(prompt))):
        eviction.add(path, place(path), place(path[:-1]))
    return eviction


def emptied(eviction: Eviction[Path]) -> list[Path]:
    gone = []
    while (path := eviction.candidate()) is not None:
        eviction.remove(path)
        gone.append(path)
    return gone


def test_a_cold_prompt_goes_from_its_end_before_the_next_one() -> None:
    assert emptied(filled((1, 2, 3), (4, 5))) == [(1, 2, 3), (1, 2), (1,), (4, 5), (4,)]


def test_what_was_used_stays_longer_and_so_does_what_is_before_it() -> None:
    eviction = filled((1, 2, 3), (4, 5))
    eviction.use((1, 2, 3))
    assert emptied(eviction)[:2] == [(4, 5), (4,)]


def test_a_shared_beginning_outlives_all_that_go_on_from_it() -> None:
    assert emptied(filled((1, 2), (1, 3), (1, 4), (5,)))[-1] == (1,)


def test_blocks_may_come_before_those_that_stand_before_them() -> None:
    eviction = Eviction[Path]()
    for path in [(1, 2), (1,), (3,)]:
        eviction.add(path, place(path), place(path[:-1]))
    assert emptied(eviction) == [(1, 2), (1,), (3,)]
