"""How many steps it takes from a request's arrival to its first token, and what that costs the
others: asynchronous scheduling, a step is dispatched before the last one's output is taken in.

Counted in steps, or in played time, so that a slow machine changes nothing: a copy ends within the
step that begins it, or when the test says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshm._rank import rank_half as rank
from kvshm._rank.attachments import AttachmentCache
from kvshm._shm.statistics import (
    ESTIMATED_US,
    IMPORTED_BLOCKS,
    LOADS_AT_ONCE,
    LOADS_TOO_LATE,
    MEASURED_US,
)
from kvshm.hooks.vllm.imports import at_once
from kvshm.hooks.vllm.imports import importer as importer_module

from ..doubles.cuda_fake import NotYet
from .scheduling import BLOCK_SIZE
from .test_cuda_runner import InProcessEngine, pair, value_of

__all__ = ["pair"]

PREFIX_BLOCKS = 5
STEP_SECONDS = 0.01
COPY_SECONDS = 0.0018
CAP, LINGER = at_once.SECONDS_PER_STEP, importer_module.LINGER_SECONDS


def tokens_of(first: int) -> list[int]:
    return [first * 977 + 7 * i for i in range(PREFIX_BLOCKS * BLOCK_SIZE + 8)]


class Importer:
    """The second of two engines, busy with a request that never ends."""

    def __init__(self, a: InProcessEngine, b: InProcessEngine) -> None:
        self.a, self.b = a, b
        self.busy = b.engine.add("busy", [900 + i for i in range(20)], max_tokens=400)
        b.step()
        self.importer = b.engine.connector._scheduler.importer

    def hold(self, first: int) -> None:
        """Have the peer compute a prompt, until this engine knows."""
        chain = self.a.engine.add(f"held{first}", tokens_of(first), max_tokens=1).block_hashes

        def known() -> bool:
            plan = self.b.cache.planner.lookup(chain, 0, PREFIX_BLOCKS)
            return plan is not None and plan.num_blocks == PREFIX_BLOCKS

        self.a.until(known)  # this engine takes no step meanwhile, so its request does not grow

    def first_token(self, name: str, first: int) -> tuple[int, int]:
        """Steps from the arrival to the first token, and the most steps of those in a row that
        brought the busy request none."""
        request = self.b.engine.add(name, tokens_of(first), max_tokens=2)
        steps, gap, widest, before = 0, 0, 0, self.busy.num_output_tokens
        deadline = monotonic() + 60  # an attach takes as long as the machine needs for it
        while request.num_output_tokens == 0:
            assert monotonic() < deadline
            self.b.step()
            steps += 1
            gap = 0 if self.busy.num_output_tokens > before else gap + 1
            widest, before = max(widest, gap), self.busy.num_output_tokens
        return steps, widest

    def count(self, counter: int) -> int:
        return self.b.cache.table.counters.read(counter)


@pytest.fixture
def only_loads_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank attaches a peer before it has a load from it, however long that takes to come."""
    monkeypatch.setattr(AttachmentCache, "follow", lambda self, reader: None)


@pytest.fixture
def importer(only_loads_attach: None, pair: list[InProcessEngine]) -> Importer:
    return Importer(*pair)


@contextmanager
def held_copies(engine: InProcessEngine) -> Iterator[None]:
    """No copy of the engine runs meanwhile."""
    with engine.driver.hold(engine.worker._worker._cache.transport.copy_stream.stream):
        yield


def test_steps_to_the_first_token(importer: Importer) -> None:
    """Before: 2 where computed or hit, 7 where imported."""
    for first in (1, 2, 3):
        importer.hold(first)
    asynchronous = importer.first_token("first", 1)  # attaches the peer
    imported = importer.first_token("second", 2)
    hit = importer.first_token("again", 2)
    computed = importer.first_token("alone", 99)
    assert (computed, hit, imported) == ((2, 0), (2, 0), (2, 0))
    assert asynchronous <= (4, 0)
    importer.importer.at_once.available = False
    assert importer.first_token("third", 3) <= (4, 0)
    assert importer.count(IMPORTED_BLOCKS) == 3 * PREFIX_BLOCKS
    assert importer.count(LOADS_AT_ONCE) == 1
    assert importer.count(MEASURED_US) > 0
    assert importer.count(ESTIMATED_US) > 0


@pytest.mark.parametrize(
    "pair",
    [(InProcessEngine, {"prefill_schedule_interval": interval}) for interval in (2, 5, 40)],
    indirect=True,
)
def test_an_interval_between_prefills_delays_imports_as_it_does_hits(importer: Importer) -> None:
    """From 0.33 on an engine without data parallelism keeps it, too: nothing is admitted for so
    many steps after one with a prefill."""
    for first in (1, 2):
        importer.hold(first)
    importer.first_token("first", 1)  # attaches the peer
    imported, b = importer.first_token("second", 2), importer.b
    blocks = b.engine.blocks_of("second")[:PREFIX_BLOCKS]
    assert b.values(blocks) == [{value_of(tokens_of(2), i)} for i in range(PREFIX_BLOCKS)]
    hit, computed = importer.first_token("again", 2), importer.first_token("alone", 99)
    assert imported == hit <= computed
    assert importer.count(IMPORTED_BLOCKS) == 2 * PREFIX_BLOCKS
    assert importer.count(LOADS_AT_ONCE) == 1


def test_what_is_imported_at_once_holds_what_the_peer_has_computed(importer: Importer) -> None:
    for first in (1, 2):
        importer.hold(first)
        importer.first_token(f"r{first}", first)
    b = importer.b
    assert b.computed_from["r2"] == PREFIX_BLOCKS * BLOCK_SIZE
    blocks = b.engine.blocks_of("r2")[:PREFIX_BLOCKS]
    assert b.values(blocks) == [{value_of(tokens_of(2), i)} for i in range(PREFIX_BLOCKS)]
    b.step()
    assert set(blocks) <= b.ready()


def test_a_step_does_not_wait_for_ever_and_nothing_of_the_copy_is_left(
    importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that has not ended in time writes nothing over what is computed instead."""
    for first in (1, 2):
        importer.hold(first)
    importer.first_token("first", 1)
    monkeypatch.setattr(at_once, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(at_once, "PATIENCE", 0.0)
    b = importer.b
    request = b.engine.add("second", tokens_of(2), max_tokens=30)
    with held_copies(b):
        b.dispatch()
        assert importer.count(LOADS_TOO_LATE) == 1
        leases = [slot.leases for slot in importer.a.cache.table.slots()]
        assert sum(map(bool, leases)) == PREFIX_BLOCKS
        # The model's stream waits for the copy: nothing of this step has run.
        assert b.driver.compute_stream().owner.work
    b.take_output()
    b.until(lambda: request.num_output_tokens > 2)
    assert b.computed_from["second"] == 0
    assert request.num_preemptions == 1
    blocks = b.engine.blocks_of("second")[:PREFIX_BLOCKS]
    assert b.values(blocks) == [{value_of(tokens_of(2), i)} for i in range(PREFIX_BLOCKS)]
    # Another thread gives them back, when it is its turn.
    b.until(lambda: not any(slot.leases for slot in importer.a.cache.table.slots()))


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_with_none_behind_it_is_alone(
    importer: Importer, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Who waits behind an import when its step is built is in that step, and waits for the copy."""
    for first in (1, 2):
        importer.hold(first)
    importer.first_token("first", 1)
    b = importer.b
    b.engine.scheduler.finish_requests("busy", RequestStatus.FINISHED_ABORTED)
    b.until(lambda: not b.engine.scheduler.requests)
    monkeypatch.setattr(at_once, "SECONDS_PER_STEP", 0.0)
    monkeypatch.setattr(at_once, "SECONDS_ALONE", 100.0)
    request = b.engine.add("second", tokens_of(2), max_tokens=1)
    for i in range(others):
        b.engine.add(f"behind{i}", [5000 + j for j in range(20)], max_tokens=1)
    sent = b.dispatch()
    assert len(sent.metadata.at_once) == 1 - others
    assert (request.status is RequestStatus.WAITING_FOR_REMOTE_KVS) is (others > 0)


def test_copies_that_a_step_only_begins_are_bounded(
    importer: Importer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take memory and cores from the requests that run; what is left the next step begins."""
    for first in (1, 2, 3):
        importer.hold(first)
    importer.first_token("first", 1)
    b = importer.b
    importer.importer.at_once.available = False
    one, other = (b.engine.add(f"r{i}", tokens_of(i), max_tokens=1) for i in (2, 3))
    planner = b.cache.planner
    nbytes = planner.lookup(one.block_hashes, 0, 5).nbytes
    monkeypatch.setattr(importer_module, "SECONDS_BEGUN", 1.5 * planner.costs.load_seconds(nbytes))
    b.step()
    assert one.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert other.status is RequestStatus.WAITING
    b.step()
    assert other.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    b.until(lambda: one.is_finished() and other.is_finished())


class PlayedTime:
    """An engine's time: its copies take some on their stream, one after the other, its forward
    passes take some, and whoever on the main thread waits lets it pass."""

    def __init__(self, engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.now = engine, 1000.0
        self._ends = [0.0]
        worker, scheduler = engine.worker._worker, engine.engine.connector._scheduler
        self._rank = worker._cache
        for one in (self._rank, scheduler, scheduler.importer):
            one._clock = lambda: self.now
        monkeypatch.setattr(rank, "time", SimpleNamespace(sleep=self.sleep))
        self._copy = engine.driver.copy_kernel
        self._stream = worker._cache.transport.copy_stream.stream.owner
        monkeypatch.setattr(engine.driver, "copy_kernel", self.copy_kernel)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def copy_kernel(self, *arguments: Any) -> None:
        stream = arguments[4]
        self._copy(*arguments)
        if stream.owner is not self._stream:
            return  # whoever attaches copies as well
        ends = max(self._ends[-1], self.now) + COPY_SECONDS
        self._ends.append(ends)

        def ended() -> None:
            if self.now < ends:
                stream.owner.work.appendleft(ended)
                raise NotYet

        self.engine.driver._put(stream, ended)

    def step(self) -> float:
        """One step; how long it took."""
        before = self.now
        self.engine.step()
        self.now += STEP_SECONDS
        self._until_noticed()
        return self.now - before

    def _until_noticed(self) -> None:
        """The thread that looks after loads has begun all and reported those that have ended,
        however little of the real time it gets."""
        deadline = monotonic() + 100
        while self._rank._unreported - len(self._rank._reports) > sum(
            ends > self.now for ends in self._ends
        ):
            assert monotonic() < deadline
            sleep(0.0005)


@pytest.mark.parametrize("capped", [True, False])
def test_a_burst_of_imports_keeps_no_one_waiting_longer_than_the_cap(
    importer: Importer, monkeypatch: pytest.MonkeyPatch, capped: bool
) -> None:
    """The time between two tokens of the request that runs meanwhile; two copies fit the cap, the
    rest is imported behind its back."""
    for first in range(1, 10):
        importer.hold(first)
    b = importer.b
    importer.first_token("attaches", 1)  # in real time: other threads do that
    time = PlayedTime(b, monkeypatch)
    importer.first_token("teaches", 2)
    monkeypatch.setattr(importer_module, "LINGER_SECONDS", LINGER)
    if capped:
        monkeypatch.setattr(at_once, "SECONDS_PER_STEP", CAP)
    burst = [b.engine.add(f"r{i}", tokens_of(i), max_tokens=1) for i in range(3, 9)]
    gaps = [time.step()]
    burst.append(b.engine.add("late", tokens_of(9), max_tokens=1))
    while not all(request.is_finished() for request in burst):
        answer = importer.busy.num_output_tokens
        gaps.append(time.step())
        assert importer.busy.num_output_tokens == answer + 1
    longest = STEP_SECONDS + CAP + LINGER
    assert (max(gaps) <= longest) is capped, gaps
    assert importer.count(IMPORTED_BLOCKS) == 9 * PREFIX_BLOCKS
    assert importer.count(LOADS_AT_ONCE) >= (3 if capped else 7)
