"""What a keeper does with what calls of the store bring, at moments that processes do not show.

A shelf may give way while a call is under way that was made for it: what the call has brought is
thrown away, for the memory has blocks of others by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from kvshm import Group
from kvshm._engine.costs import REFUSALS_PER_TRIAL
from kvshm._engine.store_asks import Lacking, Wanted
from kvshm.api import BlockContent, BlockName
from kvshm.tools.keeper.fetching import Fetching
from kvshm.tools.keeper.generations import Generations, _look
from kvshm.tools.keeper.store import block_keys, generation_key
from kvshm.tools.keeper.writing import Writing

from ..multiprocess.folder_store import FolderStore

FINGERPRINT = "ab" * 32
KEY = b"k" * 32
BLOCK = b"what x has"
OTHERS = b"what y has"
NUMBER = 7


class Calls:
    """Made when the test says so."""

    def __init__(self) -> None:
        self.made: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def make(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.made.append((call, then))

    def end(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        call, then = self.made.pop(0)
        result = call()
        meanwhile()
        then(result)


class Shelf:
    layout = SimpleNamespace(fingerprint=FINGERPRINT, block_bytes=((len(BLOCK),),))
    most = 1

    def __init__(self) -> None:
        self.closed = False
        self.withdrawn = frozenset[int]()
        self.node = SimpleNamespace(
            withdrawn=lambda: self.withdrawn, joined=True, count=self._count
        )
        self.has_it = True

    def _count(self, name: str, number: int) -> None:
        assert not self.closed

    def kept(self, name: BlockName) -> tuple[BlockContent, int] | None:
        return (BlockContent(KEY, bytes(8), 0, 0), 0) if self.has_it else None

    def is_near(self, name: BlockName) -> bool:
        return self.has_it


class Memory:
    """Of one block, which is another shelf's once the first one is closed."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def bytes_of(self, shelf: Shelf, block: int) -> Iterable[memoryview]:
        return [memoryview(OTHERS if self._shelf.closed else BLOCK)]

    def place(self, shelf: Shelf, now: float) -> NoReturn:
        raise AssertionError("nothing is to be kept")

    def use(self, shelf: Shelf, names: Sequence[BlockName]) -> None:
        pass


class Tier:
    def __init__(self, folder: Path) -> None:
        self.store, self.shelf = FolderStore(folder), Shelf()
        self.looks, self.reads, self.writes = Calls(), Calls(), Calls()
        link: Any = self
        self.usable = self.connected = True
        self.superseded: list[Any] = []
        memory: Any = Memory(self.shelf)
        self.generations = Generations(link, self.superseded.append, lambda: NUMBER)
        self.asked: list[tuple[bytes, Wanted]] = []
        self.answers: list[Any] = []
        desk: Any = SimpleNamespace(
            asks=lambda: iter(self.asked), answer=lambda route, coming: self.answers.append(coming)
        )
        self.writing = Writing(link, self.generations, memory, lambda: 0.0)
        self.fetching = Fetching(link, self.generations, memory, desk, lambda: 0.0)
        self.follow(0.0)
        self.looks.end()

    def follow(self, now: float) -> None:
        shelf: Any = self.shelf
        self.generations.follow(shelf, now)

    def asks_for(self, seconds: float) -> int:
        """How much is coming of a prompt of one block, which the store has and takes so long to
        compute."""
        self.path.write_bytes(BLOCK)
        self.shelf.has_it = False
        shelf: Any = self.shelf
        lacking, groups = Lacking(0, 0, 1), (Group(0, 16),)
        wanted = Wanted(bytes.fromhex(FINGERPRINT), 1, KEY, lacking, groups, seconds)
        self.asked.append((b"route", wanted))
        self.fetching.go_round({FINGERPRINT: shelf})
        self.asked.clear()
        self.looks.end()
        return int(self.answers[-1].length)

    def close(self) -> None:
        self.shelf.closed = True

    @property
    def path(self) -> Path:
        return self.store.path(*block_keys(FINGERPRINT, NUMBER, [BlockName(KEY, 0)]))


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path)


@pytest.mark.parametrize("closes", [False, True])
def test_nothing_is_written_of_a_shelf_that_was_closed(tier: Tier, closes: bool) -> None:
    shelf: Any = tier.shelf
    tier.writing.add(shelf, [BlockName(KEY, 0)])
    tier.writing.go_round([shelf])
    tier.writes.end(tier.close if closes else lambda: None)
    while tier.writes.made:
        tier.writes.end()
    assert tier.path.exists() == (not closes)


def test_now_and_then_a_fetch_is_made_that_seems_too_slow(tier: Tier) -> None:
    """Or a store that was slow once would never be fetched from again."""
    for _ in range(20):
        tier.fetching._times.add(1 << 20, 1000.0)
    assert [tier.asks_for(0.3) for _ in range(REFUSALS_PER_TRIAL)].count(1) == 1


@pytest.mark.parametrize("what", ["closed", "withdrawn"])
def test_nothing_is_kept_of_what_was_being_fetched_when_its_shelf(tier: Tier, what: str) -> None:
    """Was closed, or heard of a withdrawal, of which the store is told later."""
    shelf: Any = tier.shelf
    assert tier.asks_for(9.0) == 1
    tier.fetching.go_round({FINGERPRINT: shelf})

    def happens() -> None:
        setattr(tier.shelf, what, True if what == "closed" else frozenset({1}))

    tier.reads.end(happens)  # or Memory.place would say so


def test_a_shelf_that_was_closed_is_not_told_of_a_withdrawal_elsewhere(tier: Tier) -> None:
    tier.store.set_number(generation_key(FINGERPRINT), NUMBER + 1)
    tier.follow(100.0)
    tier.looks.end(tier.close)
    assert tier.superseded == []


def test_one_that_was_opened_since_is_told(tier: Tier) -> None:
    tier.store.set_number(generation_key(FINGERPRINT), NUMBER + 1)
    tier.follow(100.0)

    def reopen() -> None:
        tier.close()
        tier.shelf = Shelf()
        tier.follow(100.0)

    tier.looks.end(reopen)
    assert tier.superseded == [tier.shelf]


@pytest.mark.parametrize(("raising", "expected"), [(False, NUMBER), (True, NUMBER + 1)])
def test_a_number_that_another_keeper_makes_up_at_the_same_time_is_taken_and_raised(
    tmp_path: Path, raising: bool, expected: int
) -> None:
    class Late(FolderStore):
        def number(self, key: str) -> int:
            """There is none; then another keeper writes the first one."""
            found = super().number(key)
            self.first_number(key, NUMBER)
            return found

    store, key = Late(tmp_path), generation_key(FINGERPRINT)
    assert _look(store, key, 0, raising, NUMBER + 100) == expected
    assert store.number(key) == expected
