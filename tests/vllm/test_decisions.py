"""What is imported and what is computed: the scheduler is vLLM's, time and the peer are played."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput

from kvshm._base.ids import NO_LEASE_BIT, Epoch, LoadId
from kvshm._engine.groups import Group, Groups
from kvshm._engine.load_plan import (
    NO_TICKET,
    LoadFailure,
    LoadOrder,
    LoadReport,
    Piece,
    PieceFailure,
    Plan,
)
from kvshm._node.peer import PlannedRun
from kvshm._shm import statistics as c
from kvshm._shm.layout import RECORD_BYTES
from kvshm.hooks.vllm import step_times
from kvshm.hooks.vllm.imports import lookups
from kvshm.hooks.vllm.imports.at_once import LATE_SECONDS
from kvshm.hooks.vllm.imports.pool_room import NO_ROOM_SECONDS, PoolRoom
from kvshm.hooks.vllm.imports.twins import TWIN_WAIT_SECONDS
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import DrivenEngine, Make, Sent, plan_of, prompt

PEER: Any = SimpleNamespace(info=SimpleNamespace(epoch=77, ranks=[]), row=-1)
BLOCKS = 5


class Node:
    """An engine beside a peer that holds the first blocks of every prompt."""

    def __init__(self, e: DrivenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.e, self.side = e, e.connector._scheduler
        self.now = 1000.0
        self.lookups = 0
        importer = self.side.importer
        for one in (self.side._times, importer.peers, importer.twins, importer.held, importer):
            one._clock = lambda: self.now
        monkeypatch.setattr(self.side.cache.planner, "has_peers", lambda: True)
        monkeypatch.setattr(self.side.cache.planner, "lookup", self.lookup)
        monkeypatch.setattr(self.side.cache.planner, "load", self.begin_load)

    def attach(self) -> None:
        self.side.importer.peers.attached[0] = frozenset({Epoch(77)})

    def lookup(self, chain: list[bytes], start: int, stop: int) -> Plan | None:
        self.lookups += 1
        runs = (PlannedRun(PEER, bytes(RECORD_BYTES * (min(stop, BLOCKS) - start))),)
        return plan_of(self.e.table.epoch, start, runs, time.monotonic(), 1000)

    def begin_load(
        self, plan: Plan, load_id: LoadId, targets: tuple[int, ...], *, attached: bool
    ) -> LoadOrder:
        pieces = (Piece(Epoch(77), (), b"", b"", targets, 0),)
        return LoadOrder(load_id, self.e.table.epoch, NO_TICKET, NO_LEASE_BIT, pieces, ())

    def step(self, per_token: float) -> None:
        sent = self.e.schedule()
        self.now += 0.005 + per_token * sent.output.total_num_scheduled_tokens
        self.e.run(sent)

    def measure(self, per_token: float) -> None:
        self.e.add("decodes", prompt(0), max_tokens=40)
        for _ in range(40):
            self.step(per_token)
        self.e.add("prefills", prompt(15, tail=16, first=500), max_tokens=1, cache_salt="own")
        self.side.importer.running.compute_from_now(
            self.e.scheduler.requests["prefills"]
        )  # computed, whatever the peer holds
        self.step(per_token)

    def answer(self, sent: Sent, *bad: int, why: LoadFailure = LoadFailure.RECLAIMED) -> None:
        """The step's loads have ended, all but ``bad`` blocks of them well."""
        failures = (PieceFailure(Epoch(77), why, b""),) if bad else ()
        ended = [LoadReport(load.load_id, bad, failures) for load in sent.metadata.at_once]
        report = RankReport(sent.metadata.step, loads=ended)
        self.e.answer(sent, KVConnectorOutput(kv_connector_worker_meta=report))

    def count(self, counter: int) -> int:
        return self.e.table.counters.read(counter)


@pytest.fixture
def node(engine: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    def make(least: str = "0", **arguments: Any) -> Node:
        monkeypatch.setenv("KVSHM_MIN_PREFIX_TOKENS", least)
        monkeypatch.setattr(step_times, "STEPS_PER_MEASURED", 1)
        return Node(engine(**arguments), monkeypatch)

    return make


@pytest.mark.parametrize(
    ("per_token", "attached", "imported"),
    [(1e-3, True, True), (1e-3, False, True), (1e-4, True, True),
     (1e-4, False, False), (1e-6, True, False)],
)  # fmt: skip
def test_a_prefix_is_imported_where_that_is_faster(
    node: Callable[..., Node], per_token: float, attached: bool, imported: bool
) -> None:
    """80 tokens, and a copy of half a millisecond; one that no step waits for costs two steps."""
    n = node("auto")
    n.measure(per_token)
    assert n.side.cache.planner.costs.compute_seconds(100) == pytest.approx(
        100 * per_token, rel=0.05
    )
    if attached:
        n.attach()
    n.e.add("wants", prompt(BLOCKS, first=2000))
    sent = n.e.schedule()
    loads = sent.metadata.at_once if attached else sent.metadata.loads
    assert bool(loads) is imported
    assert n.count(c.MISS_CHEAPER) == (not imported)
    if not imported:
        assert sent.output.num_scheduled_tokens["wants"] == len(prompt(BLOCKS))


@pytest.mark.parametrize("seconds", [0.0, lookups.DECIDED_SECONDS], ids=["known", "later"])
def test_a_request_that_waits_is_decided_on_again(
    node: Callable[..., Node], seconds: float
) -> None:
    """When costs become known, and when they have changed since."""
    n = node("auto")
    n.attach()
    costs, now = n.side.cache.planner.costs, n.side.importer.lookups._clock()
    n.side.importer.lookups._clock = lambda: now
    costs.known = bool(seconds)
    n.e.add("runs", prompt(0), max_tokens=400)
    n.e.step()
    n.e.add("wants", prompt(BLOCKS, first=2000))
    for _ in range(300):
        n.answer(n.e.schedule(throttled=True))
    assert n.count(c.MISS_CHEAPER) == 1
    for tokens in [1] * 30 + [256] * 5:
        costs.add_step(tokens, 0.005 + 0.001 * tokens)
    now += seconds
    sent = n.e.schedule()
    assert sent.metadata.at_once
    n.answer(sent)


def test_a_step_that_waited_for_a_copy_says_nothing_of_computing(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = node()
    n.attach()
    seen: list[int] = []
    monkeypatch.setattr(
        n.side.cache.planner.costs, "add_step", lambda tokens, _: seen.append(tokens)
    )
    n.e.add("wants", prompt(BLOCKS), max_tokens=3)
    n.answer(n.e.schedule())
    assert seen == []
    n.e.step()
    assert seen == [1]


def test_of_steps_that_only_decode_a_few_are_timed(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = node()
    monkeypatch.setattr(step_times, "STEPS_PER_MEASURED", 4)
    seen: list[int] = []
    monkeypatch.setattr(
        n.side.cache.planner.costs, "add_step", lambda tokens, _: seen.append(tokens)
    )
    n.e.add("decodes", prompt(0), max_tokens=17)
    n.side.importer.running.compute_from_now(n.e.scheduler.requests["decodes"])
    for _ in range(17):
        n.e.step()
    assert seen[0] == len(prompt(0))
    assert len(seen[1:]) == 4


@pytest.mark.parametrize(
    ("limit", "threshold", "least"), [(512, 0, 256), (128, 0, 128), (512, 64, 64)]
)
def test_what_counts_as_a_prefill_is_no_longer_than_a_step_can_be(
    engine: Make, limit: int, threshold: int, least: int
) -> None:
    e = engine(max_num_batched_tokens=limit, long_prefill_token_threshold=threshold)
    assert e.connector._scheduler.cache.planner.costs.prefill_tokens == least


@pytest.mark.parametrize(("known", "timed"), [(True, 1 + 16 // 8), (False, 17)])
@pytest.mark.parametrize("max_tokens", [1, 7, 8])
def test_of_prompts_that_no_one_may_have_a_few_are_timed(
    engine: Make, monkeypatch: pytest.MonkeyPatch, max_tokens: int, known: bool, timed: int
) -> None:
    """However many steps a request takes; and the first, before the ranks know all."""
    e = engine()
    costs, seen = e.connector._scheduler.cache.planner.costs, []
    costs.known = known
    monkeypatch.setattr(costs, "add_step", lambda tokens, _: seen.append(tokens))
    for number in range(17):
        e.add(f"r{number}", prompt(2, first=100 * number), max_tokens=max_tokens)
        while e.scheduler.has_requests():
            e.step()
    assert seen.count(len(prompt(2))) == timed


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_lasts_from_when_it_had_the_device(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Neither the pause before it counts nor the step before it."""
    n = node(asynchronous=asynchronous)
    seen: list[float] = []
    monkeypatch.setattr(
        n.side.cache.planner.costs, "add_step", lambda _, seconds: seen.append(seconds)
    )
    n.e.add("decodes", prompt(0), max_tokens=30)
    for _ in range(3):
        n.now += 100.0
        for sent in [n.e.schedule() for _ in range(1 + asynchronous)]:
            n.now += 1.0
            n.e.run(sent)
    assert seen == [1.0] * 3 * (1 + asynchronous)


@pytest.mark.parametrize("bad", [0, 1])
def test_what_is_thrown_away_is_not_counted_as_imported(
    node: Callable[..., Node], bad: int
) -> None:
    """A load that a step waited for counts as a whole or not at all."""
    n = node()
    n.attach()
    n.e.add("wants", prompt(BLOCKS), max_tokens=3)
    sent = n.e.schedule()
    ((piece,),) = [load.pieces for load in sent.metadata.at_once]
    n.answer(sent, *piece.targets[-1:] * bad)
    good = 1 - bad
    reported = (n.count(c.IMPORTED_BLOCKS), n.count(c.LOADS_DONE), n.count(c.LOADS_FAILED))
    assert reported == (good * BLOCKS, good, bad)
    stats = n.e.stats()
    assert stats is not None
    assert (stats["imported_blocks"], stats["failed_loads"]) == (good * BLOCKS, bad)


def test_a_peer_whose_copy_was_too_late_is_not_waited_for_a_while(
    node: Callable[..., Node],
) -> None:
    n = node()
    n.attach()
    n.e.add("first", prompt(BLOCKS), max_tokens=1)
    sent = n.e.schedule()
    (load,) = sent.metadata.at_once
    n.answer(sent, *load.pieces[0].targets, why=LoadFailure.TOO_LATE)
    n.e.step()
    n.now += LATE_SECONDS - 0.1
    n.e.add("second", prompt(BLOCKS, first=2000), max_tokens=1)
    sent = n.e.schedule()
    assert (len(sent.metadata.at_once), len(sent.metadata.loads)) == (0, 1)
    n.e.run(sent, RankReport(sent.metadata.step, loads=[LoadReport("second", ())]))
    n.now += 0.2
    n.e.add("third", prompt(BLOCKS, first=4000), max_tokens=1)
    assert len(n.e.schedule().metadata.at_once) == 1


def crowd(n: Node) -> None:
    """A request occupies eight blocks; another one wants to import beside it for five steps."""
    n.e.add("big", prompt(8), max_tokens=10, cache_salt="own")
    n.side.importer.running.compute_from_now(n.e.scheduler.requests["big"])
    n.e.step()
    n.attach()
    n.e.add("wants", prompt(BLOCKS, first=2000), max_tokens=1)
    for _ in range(5):
        n.e.step()


def test_what_does_not_fit_is_looked_up_again_when_blocks_become_free(
    node: Callable[..., Node],
) -> None:
    n = node(num_blocks=12)
    crowd(n)
    assert (n.lookups, n.count(c.MISS_NO_ROOM)) == (1, 1)
    while "big" in n.e.scheduler.requests:
        n.e.step()
    assert n.lookups == 1
    assert len(n.e.schedule().metadata.at_once) == 1
    assert n.side.importer.imports["wants"].no_room is None


def test_what_does_not_fit_is_looked_up_again_after_a_while(node: Callable[..., Node]) -> None:
    """Without more free blocks: prefills under way may need fewer."""
    n = node(num_blocks=12)
    crowd(n)
    n.e.step()
    assert n.lookups == 1
    n.now += NO_ROOM_SECONDS
    n.e.step()
    assert (n.lookups, n.count(c.MISS_NO_ROOM)) == (2, 2)


def test_without_room_for_a_block_nothing_is_looked_up(node: Callable[..., Node]) -> None:
    n = node(num_blocks=10)
    crowd(n)
    assert (n.lookups, n.count(c.MISS_NO_ROOM)) == (0, 1)


def test_a_request_waits_for_anothers_import_of_its_prefix_but_not_long(
    node: Callable[..., Node],
) -> None:
    assert TWIN_WAIT_SECONDS < 1.0
    n = node()
    n.e.add("first", prompt(BLOCKS))
    n.e.step()
    n.e.add("twin", prompt(BLOCKS))
    assert n.e.step().metadata.loads == []
    n.now += 1.0
    (load,) = n.e.schedule().metadata.loads
    assert load.load_id == "twin"


@pytest.mark.parametrize("watermark", [0, 3])
def test_an_asynchronous_load_is_let_in_beside_the_watermark(watermark: int) -> None:
    pool = SimpleNamespace(
        get_num_free_blocks=lambda: 10, blocks=range(16), cached_block_hash_to_block={}
    )
    one = SimpleNamespace(max_admission_blocks_per_request=None)
    coordinator = SimpleNamespace(single_type_managers=[one])
    manager = SimpleNamespace(block_pool=pool, watermark_blocks=watermark, coordinator=coordinator)
    room = PoolRoom(manager, {}, Groups([Group(0, 16)]), 512)
    request = SimpleNamespace(num_tokens=8 * 16)
    assert room.admits(10 - watermark, request)
    assert not room.admits(11 - watermark, request)
    request.num_tokens += 1  # the rest of its prompt, and one block in eight for others
    assert not room.admits(1, request)


def test_who_is_left_out_of_a_step_for_the_tokens_it_may_compute_is_matched_again(
    node: Callable[..., Node],
) -> None:
    """Without chunked prefill it is scheduled whole or not at all, however much memory there is."""
    n = node(num_blocks=100, max_num_batched_tokens=512, enable_chunked_prefill=False)
    n.attach()
    other = n.e.add("other", prompt(25, tail=1, first=9000), max_tokens=8)
    n.side.importer.running.compute_from_now(other)  # whatever the peer holds
    n.e.add("wants", prompt(BLOCKS + 8, first=2000), max_tokens=2)
    first = n.e.schedule()
    n.answer(first)
    assert "wants" not in first.output.num_scheduled_tokens
    assert n.e.schedule().metadata.at_once


def test_of_what_a_rank_has_not_reported_nothing_counts(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though vLLM says that all of them have ended."""
    n = node()
    monkeypatch.setattr(n.side.importer.running, "_num_ranks", 2)
    n.e.add("wants", prompt(BLOCKS), max_tokens=3)
    sent = n.e.schedule()
    (load,) = sent.metadata.loads
    report = RankReport(sent.metadata.step, loads=[LoadReport(load.load_id, ())])
    said = KVConnectorOutput(finished_recving={"wants"}, kv_connector_worker_meta=report)
    n.e.answer(sent, said)
    assert n.count(c.LOADS_FAILED) == 1
    assert n.e.ready() == set()
