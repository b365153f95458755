"""Two engines are one cache: together they keep what has room in both, because neither drops what
the other has not, and each drops first what the other has."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshm._engine.duplicate_search import DuplicateSearch
from kvshm._shm.statistics import DUPLICATES_LOST, DUPLICATES_REUSED
from kvshm.hooks.vllm.exports.duplicates import Duplicates

from .scheduling import BLOCK_SIZE
from .test_cuda_runner import BLOCKS, InProcessEngine, pair
from .test_steps import PREFIX_BLOCKS, tokens_of

__all__ = ["pair"]

PREFIXES = 22
REQUESTS = 240


class Day:
    """Requests for popular and less popular prefixes, each at an engine that is drawn."""

    def __init__(self, engines: list[InProcessEngine], first: int) -> None:
        """``first``: number of the most popular prefix."""
        self.engines = engines
        self.chance = random.Random(7)
        self.first = first
        self.seen: set[int] = set()
        self.lost = 0
        """Prefixes that had to be computed once more."""

    def run(self) -> int:
        weights = [1 / (rank + 1) for rank in range(PREFIXES)]
        for turn in range(REQUESTS):
            number = self.first + self.chance.choices(range(PREFIXES), weights)[0]
            engine = self.chance.randrange(2)
            computed = self.ask(engine, number, f"{number}.{turn}")
            self.lost += computed and number in self.seen
            self.seen.add(number)
        return self.lost

    def ask(self, which: int, number: int, name: str) -> bool:
        """Whether the engine had to compute (a part of) the prefix.  Returns once the other engine
        knows that this one has it."""
        engine, other = self.engines[which], self.engines[1 - which]
        request = engine.engine.add(name, tokens_of(number), max_tokens=1)
        engine.until(request.is_finished)
        while engine.under_way:
            engine.take_output()

        def known() -> bool:
            plan = other.cache.planner.lookup(request.block_hashes, 0, PREFIX_BLOCKS)
            return plan is not None and plan.num_blocks == PREFIX_BLOCKS

        engine.until(known)
        begun = engine.computed_from.pop(name)
        return begun < PREFIX_BLOCKS * BLOCK_SIZE


def test_together_they_lose_nothing_that_has_room(
    pair: list[InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BLOCKS < PREFIXES * PREFIX_BLOCKS < 2 * BLOCKS
    # A measured ratio is another one in each run: one that leaves no part of the queue alone.
    monkeypatch.setattr(DuplicateSearch, "import_ratio", lambda _: 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Duplicates, "put_first", lambda *_: None)
        without = Day(pair, first=100).run()
    lost = Day(pair, first=200).run()
    assert without > 10
    assert lost < without / 4
    counted: Any = [engine.cache.table.counters.read for engine in pair]
    assert all(read(DUPLICATES_REUSED) > 100 for read in counted)
    assert not any(read(DUPLICATES_LOST) for read in counted)
