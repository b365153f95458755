"""What a lease is worth on a GPU: asynchronous scheduling, copies that last for two steps of an
exporter whose pool is short, and hot prefixes that are its oldest free blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

from kvshm._base.ids import Rank
from kvshm._shm.layout import unpack_records
from kvshm._shm.statistics import FORCED, IMPORTED_BLOCKS, KEPT, RECHECK_FAILED
from kvshm.hooks.vllm.exports.duplicates import Duplicates
from kvshm.hooks.vllm.exports.kept_blocks import KeptBlocks
from kvshm.hooks.vllm.imports import importer as importer_module
from kvshm.hooks.vllm.imports import twins

from ..doubles.cuda_fake import NotYet
from .scheduling import prompt
from .test_cuda_runner import BLOCKS, InProcessEngine, pair, value_of
from .test_steps import PREFIX_BLOCKS, held_copies, tokens_of

__all__ = ["pair"]

HOT = (1, 2, 3)
"""The prefixes that the importer imports in every round."""
LEASED = len(HOT) * PREFIX_BLOCKS
STEPS = 2
"""The exporter's in the life of a lease."""
ROUNDS = 9
FILL_BLOCKS = 13
"""Of the prompt that each of these steps begins; it shares nothing with others."""


class Outcome(NamedTuple):
    imported: int
    discarded: int
    forced: int
    kept: int
    computed_again: int
    """Hot prefixes that the exporter had to compute once more."""
    steps: int


class Reuse:
    """An exporter under pressure, and an importer that imports the same prefixes in each round."""

    def __init__(self, a: InProcessEngine, b: InProcessEngine) -> None:
        self.a, self.b = a, b
        self.arrived = self.computed_again = self.steps = 0
        a.cache.planner.leaving = True  # only b imports
        b.engine.connector._scheduler.importer.at_once.available = False  # it would end the copies
        self.chains = {number: self.add(a, tokens_of(number)).block_hashes for number in HOT}
        self.settle(b)
        self.settle(a)

    def add(self, engine: InProcessEngine, tokens: list[int]) -> Any:
        self.arrived += 1
        return engine.engine.add(f"r{self.arrived}", tokens, max_tokens=1)

    def settle(self, engine: InProcessEngine) -> None:
        """All its requests end, and no step is under way."""
        engine.until(lambda: not engine.engine.scheduler.requests)
        while engine.under_way:
            engine.take_output()

    def ask_for_what_is_lost(self) -> None:
        """Clients ask the exporter for the hot prefixes that it has no more, until it has all, and
        the importer knows that."""
        while lost := [number for number, chain in self.chains.items() if not self.is_there(chain)]:
            self.add(self.a, tokens_of(lost[0]))
            self.computed_again += 1
            self.settle(self.a)
        self.a.until(lambda: all(map(self.is_known, self.chains.values())))
        self.settle(self.a)

    def is_there(self, chain: list[bytes]) -> bool:
        found = {record.block_hash for record in unpack_records(self.a.cache.table.scan())}
        return found.issuperset(chain[:PREFIX_BLOCKS])

    def is_known(self, chain: list[bytes]) -> bool:
        """Whether the importer knows where the exporter has this prefix now."""
        plan = self.b.cache.planner.lookup(chain, 0, PREFIX_BLOCKS)
        if plan is None or plan.num_blocks != PREFIX_BLOCKS:
            return False
        return all(all(self.a.cache.table.recheck(Rank(0), run.records)) for run in plan.runs)

    def round(self) -> None:
        """Import all hot prefixes; as long as the copies last, each step of the exporter begins a
        prompt of its own."""
        self.ask_for_what_is_lost()
        self.b.engine.scheduler.kv_cache_manager.evict_blocks(set(range(1, BLOCKS)))
        for number in HOT:
            self.add(self.b, tokens_of(number))
        with held_copies(self.b):
            self.b.dispatch()
            assert self.leased() == LEASED
            for _ in range(STEPS):
                filler = self.add(self.a, prompt(FILL_BLOCKS, first=10_000 * self.arrived))
                self.a.step()
                assert filler.num_preemptions == 0
                assert filler.num_computed_tokens
                self.steps += 1
        self.settle(self.b)
        self.settle(self.a)
        assert self.leased() == 0

    def leased(self) -> int:
        return sum(bool(slot.leases) for slot in self.a.cache.table.slots())

    def outcome(self) -> Outcome:
        before = self.counted()
        self.computed_again = self.steps = 0
        for _ in range(ROUNDS):
            self.round()
        seen = [now - was for now, was in zip(self.counted(), before, strict=True)]
        imported, discarded, forced, kept = seen
        return Outcome(imported, discarded, forced, kept, self.computed_again, self.steps)

    def counted(self) -> list[int]:
        """The first four of an Outcome, since the start."""
        a, b = (engine.cache.table.counters.read for engine in (self.a, self.b))
        return [b(IMPORTED_BLOCKS), b(RECHECK_FAILED), a(FORCED), a(KEPT)]


def test_leased_blocks_are_not_reused_under_their_copies(
    pair: list[InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the exporter's pool has others, without a step or a preemption more."""
    monkeypatch.setattr(importer_module, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(importer_module, "SECONDS_BEGUN", 100.0)
    # As far as the importer has the hot prefixes, too, they would go first, if importing is cheap.
    monkeypatch.setattr(Duplicates, "put_first", lambda *_: None)
    reuse = Reuse(*pair)
    with monkeypatch.context() as patch:
        patch.setattr(KeptBlocks, "put_last", lambda *_: None)
        without = reuse.outcome()
    copied, steps = ROUNDS * LEASED, ROUNDS * STEPS
    assert without == Outcome(copied - 24, 24, 24, kept=0, computed_again=12, steps=steps)
    assert reuse.outcome() == Outcome(copied, 0, 0, kept=copied, computed_again=0, steps=steps)


@contextmanager
def copies_in_turn(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[threading.Event]:
    """Only the first copy that begins meanwhile ends, before the event is set."""
    may_end, begun, copy = threading.Event(), [], engine.driver.copy_kernel
    ours = engine.worker._worker._cache.transport.copy_stream.stream.owner

    def wait() -> None:
        if not may_end.is_set():
            ours.work.appendleft(wait)
            raise NotYet

    def copy_kernel(*arguments: Any) -> None:
        if arguments[4].owner is ours:
            begun.append(arguments)
            if len(begun) > 1:
                engine.driver._put(arguments[4], wait)
        copy(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.driver, "copy_kernel", copy_kernel)
        yield may_end


def test_two_loads_of_an_importer_share_a_lease_and_the_recheck_guards_the_second(
    pair: list[InProcessEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An importer has one bit in a slot, which the load that set it takes back.  Such loads meet
    when a request has waited for another one's import in vain."""
    monkeypatch.setattr(importer_module, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(twins, "TWIN_WAIT_SECONDS", -1000.0)
    reuse = Reuse(*pair)
    a, b = pair
    reuse.ask_for_what_is_lost()
    with copies_in_turn(b, monkeypatch) as second_may_end:
        first, second = (reuse.add(b, tokens_of(HOT[0])) for _ in range(2))
        b.dispatch()
        imports = b.engine.connector._scheduler.importer.running.by_id.values()
        assert [one.load.order.pieces[0].taken for one in imports] == [b"\1" * 5, b"\0" * 5]
        b.until(first.is_finished)
        assert reuse.leased() == 0, "though the second copy has not ended"
        for _ in range(6):
            reuse.add(a, prompt(FILL_BLOCKS, first=10_000 * reuse.arrived))
            reuse.settle(a)
        second_may_end.set()
        b.until(lambda: second.num_computed_tokens > 0 and second.num_output_placeholders)
        blocks = b.engine.blocks_of(second.request_id)[:PREFIX_BLOCKS]
        reuse.settle(b)
    assert b.cache.table.counters.read(RECHECK_FAILED) == PREFIX_BLOCKS
    tokens = tokens_of(HOT[0])
    assert b.values(blocks) == [{value_of(tokens, i)} for i in range(PREFIX_BLOCKS)]
