"""Resets of the cache while requests run or load: as in vLLM without a connector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvshm._base.ids import Epoch, LoadId
from kvshm._engine.load_plan import LoadOrder, LoadReport
from kvshm.hooks.vllm import rank_loads
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.identity.rank_weights import RankWeights
from kvshm.hooks.vllm.messages import RankReport
from kvshm.hooks.vllm.rank_loads import RankLoads
from kvshm.hooks.vllm.ranks import Ranks
from kvshm.hooks.vllm.worker_side import WorkerSide

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, full, prompt, window


class Copying:
    """A rank's cache whose loads end, all of them bad, when it has been asked often enough."""

    def __init__(self, polls: int) -> None:
        self._left = polls
        self._loads: list[LoadOrder] = []

    def begin_load(self, load: LoadOrder) -> None:
        self._loads.append(load)

    def attached(self) -> frozenset[Epoch]:
        return frozenset()  # so that vLLM holds back whoever has to wait for a load

    def poll(self, linger: float = 0.0) -> list[LoadReport]:
        if not self._loads or self._left > 0:
            self._left -= bool(self._loads)
            return []
        ended, self._loads = self._loads, []
        return [LoadReport(load.load_id, load.lost) for load in ended]

    def load_at_once(self, loads: Sequence[LoadOrder], patience: float) -> list[LoadReport]:
        raise NotImplementedError  # no step waits for a load

    def end_now(self) -> None:
        self._left = 0

    def cancel(self, _: LoadId) -> None:
        self.end_now()

    def carries_out(self, load_id: LoadId) -> bool:
        return load_id in {load.load_id for load in self._loads}

    def open_epoch(self, _: str) -> None:
        """Nothing is exported."""

    def end_epoch(self) -> None:
        """Nothing was."""

    def hook_took(self, hook: str, nanoseconds: int) -> None:
        """No one asks."""


class Worker:
    """The one worker of an engine, and vLLM's executor in front of it."""

    def __init__(self, engine: DrivenEngine, polls: int) -> None:
        side = object.__new__(WorkerSide)
        side._report, side._attached = RankReport(0), frozenset()
        side._weights = RankWeights(3600, side._weights_written)
        self.side = side
        self.cache = side._cache = Copying(polls)  # type: ignore[assignment]  # stands for one
        by_block = engine.connector._scheduler.importer.lookups.groups.is_single_full_attention
        side.loads = RankLoads(side._cache, side._next_report, by_block)
        self.connector = object.__new__(KvshmConnector)
        self.connector.strict, self.connector._scheduler = True, None
        self.connector._worker, self.connector._connector_metadata = side, None
        side.describe = engine_rank  # type: ignore[method-assign]  # there is no model
        side._rank = 0  # type: ignore[assignment]  # a plain number will do
        self._engine = engine
        engine.connector._scheduler.epochs.ranks = Ranks(self)

    def collective_rpc(
        self, what: Callable[..., Any], args: tuple[Any, ...] = (), non_block: bool = False
    ) -> list[Any]:
        return [what(None, *args)]

    def run(self, sent: Sent) -> None:
        """A step in the worker, and its output in the scheduler."""
        self._engine.answer(sent, self.output_of(sent))

    def output_of(self, sent: Sent) -> KVConnectorOutput:
        """A step in the worker."""
        own = self.connector
        own.bind_connector_metadata(sent.metadata)
        own.start_load_kv(None)
        own.wait_for_save()
        results = own.get_transfer_results(set())
        bad = own.get_block_ids_with_load_errors()
        report = own.build_connector_worker_meta()
        own.clear_connector_metadata()
        return KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving or set(),
            invalid_block_ids=bad,
            kv_connector_worker_meta=report,
        )

    def step(self) -> None:
        self.run(self._engine.schedule())


def engine_rank() -> Any:
    from .scheduling import description

    return description()


@pytest.fixture(params=[(), (full(), window(40)), (window(40),)], ids=["full", "both", "window"])
def loading(
    request: pytest.FixtureRequest, engine: Make, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[DrivenEngine, Worker]]:
    """An engine whose request "a" loads two blocks, which ends after this many looks at it."""

    def make(
        polls: int, asynchronous: bool = False, before: Callable[..., None] = lambda *_: None
    ) -> tuple[DrivenEngine, Worker]:
        made = engine(asynchronous, specs=request.param)
        one = Worker(made, polls)
        before(made, one)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", one.connector)
        matches = iter([2 * BLOCK_SIZE])
        made.connector._scheduler.importer.match = lambda *_: next(matches, 0)
        made.add("a", prompt(3), max_tokens=2)
        one.step()
        assert made.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return made, one

    return make


def finish(engine: DrivenEngine, one: Worker) -> None:
    for _ in range(6):
        one.step()
    assert engine.scheduler.get_num_unfinished_requests() == 0
    assert not engine.scheduler.requests
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == len(pool.blocks) - 1


def test_a_forced_reset_succeeds_with_steps_in_flight(engine: Make) -> None:
    e = engine(asynchronous=True)
    for name, first in (("a", 1), ("b", 300)):
        e.add(name, prompt(3, first=first), max_tokens=30)
    flying = [e.schedule(), e.schedule()]
    e.run(flying.pop(0))
    assert e.ready()
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert e.ready() == set()
    assert not e.scheduler.deferred_frees
    flying.append(e.schedule())
    while flying:
        e.run(flying.pop(0))
    for _ in range(40):
        e.step()
    assert e.scheduler.get_num_unfinished_requests() == 0


def test_nothing_is_imported_while_steps_fly_from_before_a_reset(engine: Make) -> None:
    """They still write into blocks that are free by now; a copy is not ordered behind them."""
    e = engine(asynchronous=True)
    asked: list[str] = []
    e.connector._scheduler.importer.match = lambda request, _: asked.append(request.request_id) or 0
    e.add("a", prompt(3), max_tokens=30)
    flying = [e.schedule(), e.schedule()]
    assert asked == ["a"]
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    e.add("b", prompt(3, first=300))
    flying.append(e.schedule())
    e.run(flying.pop(0))
    e.add("c", prompt(3, first=600))
    flying.append(e.schedule())
    assert asked == ["a"]
    e.run(flying.pop(0))
    e.add("d", prompt(3, first=900))
    e.schedule()
    assert asked == ["a", "d"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("polls", [1, 50])
def test_a_forced_reset_of_a_paused_engine_ends_its_loads(
    loading: Any, polls: int, asynchronous: bool
) -> None:
    """pause(mode="keep", clear_cache=True): nothing steps, so nothing would be reported."""
    e, one = loading(polls, asynchronous)
    before = e.connector._scheduler.epochs.descriptions.resets
    e.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert e.connector._scheduler.epochs.descriptions.resets > before
    assert e.connector._scheduler.importer.running.under_way() == set()
    request = e.scheduler.requests["a"]
    assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 0)
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    finish(e, one)


def test_a_forced_reset_ends_the_load_of_an_aborted_request(loading: Any) -> None:
    e, one = loading(polls=2)
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(e, one)


@pytest.mark.parametrize(("paused", "session"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_import_that_waits_for_room_behind_its_load_is_reset_too(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, paused: bool, session: bool
) -> None:
    """vLLM has taken it for loaded, and it holds blocks, but the rest of it finds no room.  Who was
    running goes on before it."""
    e = engine(asynchronous, num_blocks=13)
    importer, cache = e.connector._scheduler.importer, e.connector._scheduler.cache
    monkeypatch.setattr(cache.planner, "end_load", lambda load, reports: set())
    importer.match = lambda request, _: 3 * BLOCK_SIZE if request.request_id == "a" else 0
    e.add("fills", prompt(5, tail=15, first=500), max_tokens=80)
    e.step()
    e.add("a", prompt(4), max_tokens=2, resumable=session)
    (load,) = (sent := e.schedule()).metadata.loads
    e.run(sent)
    while e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks():
        e.step()
    sent = e.schedule()
    e.run(sent, RankReport(sent.metadata.step, loads=[LoadReport(load.load_id, ())]))
    e.step()
    request = e.scheduler.requests["a"]
    assert (request.status, len(e.blocks_of("a"))) == (RequestStatus.WAITING, 3)
    if paused:
        e.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert e.blocks_of("a") == []
    assert [waiting.request_id for waiting in e.scheduler.waiting] == ["fills", "a"]
    importer.match = lambda *_: 0
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    while "a" in e.scheduler.requests and request.status.name != "WAITING_FOR_STREAMING_REQ":
        e.step()
    assert request.num_tokens == len(prompt(4)) + 2
    assert importer.unscheduled == set()


def test_a_load_that_has_ended_but_does_not_run_yet_is_reset_too(loading: Any) -> None:
    e, one = loading(polls=0)
    assert e.scheduler.finished_recving_kv_req_ids == {"a"}
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(e, one)


def test_a_reset_that_is_not_forced_leaves_loads_alone(loading: Any) -> None:
    e, one = loading(polls=3)
    assert e.scheduler.reset_prefix_cache() is False
    assert e.connector._scheduler.importer.running.under_way() == {"a"}
    finish(e, one)


def test_a_load_that_does_not_end_refuses_the_reset_and_goes_on(
    loading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copies may still write: then the reset fails as vLLM's own do, and can be tried again."""
    monkeypatch.setattr(rank_loads, "GIVE_UP_SECONDS", 0.01)
    e, one = loading(polls=10**9)
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        e.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert e.connector._scheduler.importer.running.under_way() == {"a"}
    one.cache.end_now()
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(e, one)


def test_a_load_that_a_step_in_flight_reports_is_left_to_that_report(loading: Any) -> None:
    """A second report would end the engine."""
    e, one = loading(polls=1)
    sent = e.schedule()
    one.connector.bind_connector_metadata(sent.metadata)
    taken = one.connector.get_transfer_results(set()).finished_recving
    assert taken == {"a"}
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        e.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert e.connector._scheduler.importer.running.under_way() == {"a"}
