"""Loads that no one reports: found after a while, and their requests computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvshm._engine.load_plan import LoadOrder, LoadReport
from kvshm._shm.statistics import LOADS_LOST, MISS_NOT_IMPORTING
from kvshm.hooks.vllm import rank_loads
from kvshm.hooks.vllm.imports.held_requests import LOOK_SECONDS, LOST_SECONDS
from kvshm.hooks.vllm.imports.request_import import Way
from kvshm.hooks.vllm.messages import RankReport
from kvshm.hooks.vllm.vllm_scheduler import VllmScheduler

from .conftest import Lines
from .scheduling import DrivenEngine, Sent, prompt
from .test_resets import Worker, finish
from .test_resets import loading as loading

Loading = Callable[..., tuple[DrivenEngine, Worker]]
NEVER = 1 << 60


def not_handed_over(e: DrivenEngine, one: Worker) -> None:
    """The scheduler's half has made the load, and no step has it."""
    loads = e.connector._scheduler.importer.loads
    e.connector._scheduler.importer.loads = lambda scheduled: (loads(scheduled), ([], []))[1]


def not_begun(e: DrivenEngine, one: Worker) -> None:
    """A rank has thrown it away."""
    begun = one.side.loads.under_way
    one.cache.begin_load = lambda load: begun.pop(load.load_id, None)  # type: ignore[method-assign]


def begin_fails(e: DrivenEngine, one: Worker) -> None:
    """And fails again where a rank whose hook has failed begins it only to report it."""

    def fail(load: LoadOrder) -> None:
        raise RuntimeError("planted")

    one.connector.strict = False
    # What is planted stands in the place of the rank's method.
    one.cache.begin_load = fail  # type: ignore[method-assign]


def not_ended(e: DrivenEngine, one: Worker) -> None:
    """Its copy goes on until it is cancelled."""


def not_reported(e: DrivenEngine, one: Worker) -> None:
    """The rank has taken it for reported, and vLLM has not heard of it."""
    one.cache.end_now()
    answer = e.answer

    def deaf(sent: Sent, output: KVConnectorOutput | None) -> None:
        assert output is not None
        output.finished_recving, output.failed_recving = None, set()
        output.invalid_block_ids = set()
        answer(sent, output)

    e.answer = deaf  # type: ignore[method-assign]


def forgotten(e: DrivenEngine, one: Worker) -> None:
    """Neither side knows it, only vLLM."""
    not_begun(e, one)
    allocated = e.connector._scheduler.importer.allocated

    def forget(*args: Any) -> None:
        allocated(*args)
        importer = e.connector._scheduler.importer
        importer.imports.clear()
        importer.running.by_id.clear()
        importer.step.imports.clear()

    e.connector._scheduler.importer.allocated = forget


def taken_for_another(e: DrivenEngine, one: Worker) -> None:
    """The step waits for it as for a load at once, so no rank tells vLLM of its end."""
    register = e.connector._scheduler.importer._register

    def registered(*args: Any) -> Any:
        import_ = register(*args)
        import_.way = Way.AT_ONCE
        return import_

    e.connector._scheduler.importer._register = registered
    one.cache.load_at_once = lambda loads, _: [LoadReport(each.load_id, ()) for each in loads]


LOSSES = (not_handed_over, not_begun, not_ended, not_reported, forgotten, taken_for_another)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("aborted", [False, True], ids=["waits", "aborted"])
@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
def test_a_request_whose_load_is_lost_is_computed_and_its_blocks_come_back(
    loading: Loading, lose: Callable[..., None], aborted: bool, asynchronous: bool
) -> None:
    e, one = loading(NEVER, asynchronous, before=lose)
    held, now = e.connector._scheduler.importer.held, [time.monotonic()]
    held._clock = lambda: now[0]
    held.add("a")  # by this clock
    if aborted:
        e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    for _ in range(int(LOST_SECONDS) - 2):
        now[0] += LOOK_SECONDS
        one.step()
    assert e.table.counters.read(LOADS_LOST) == 0
    assert "a" in e.scheduler.requests
    if not aborted:
        assert e.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    for _ in range(6 + 2 * asynchronous):
        now[0] += LOOK_SECONDS
        one.step()
    assert e.table.counters.read(LOADS_LOST) == 1
    finish(e, one)
    assert not held


@pytest.mark.parametrize("aborted", [False, True], ids=["waits", "aborted"])
def test_a_load_that_a_rank_could_not_begin_is_lost_too(loading: Loading, aborted: bool) -> None:
    """kvshm is off then."""
    e, one = loading(NEVER, before=begin_fails)
    held, now = e.connector._scheduler.importer.held, [time.monotonic()]
    held._clock = lambda: now[0]
    held.add("a")
    if aborted:
        e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    for _ in range(int(LOST_SECONDS) + 6):
        now[0] += LOOK_SECONDS
        one.step()
    finish(e, one)
    assert not held


def test_a_hook_that_fails_in_every_step_hides_no_lost_load(loading: Loading) -> None:
    e, one = loading(NEVER, before=not_begun)
    side, now = e.connector._scheduler, [time.monotonic()]
    side.importer.held._clock = lambda: now[0]
    side.importer.held.add("a")

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    e.connector.strict = False
    side._option_checks.step_built = fail
    for _ in range(int(LOST_SECONDS) + 6):
        now[0] += LOOK_SECONDS
        one.step()
    finish(e, one)
    assert not side.importer.held


def test_beside_a_copy_that_hangs_nothing_is_imported_and_ranks_are_asked_ever_more_rarely(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads behind it would hang as well, and asking stops the engine for a second."""
    monkeypatch.setattr(rank_loads, "GIVE_UP_SECONDS", 0.0)
    e, one = loading(NEVER)
    monkeypatch.setattr(one.cache, "cancel", lambda _: None)
    asked: list[float] = []
    end, now = one.side.loads.end, [0.0]
    monkeypatch.setattr(one.side.loads, "end", lambda ids: (asked.append(now[0]), end(ids))[1])
    held = e.connector._scheduler.importer.held
    held._clock = lambda: now[0]
    held._looked_at = 0.0
    held.add("a")
    while len(asked) < 4:
        now[0] += LOOK_SECONDS
        one.step()
    assert [b - a for a, b in pairwise(asked)] == [LOST_SECONDS, 2 * LOST_SECONDS, 4 * LOST_SECONDS]
    e.add("b", prompt(4, first=9000), max_tokens=1)
    one.step()
    assert e.table.counters.read(MISS_NOT_IMPORTING) == 1
    one.cache.end_now()
    finish(e, one)
    assert not held.hangs


def test_a_report_that_was_on_its_way_when_ranks_were_asked_counts(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would end at a report of a request that it has begun anew.  Three steps at a time, as
    with pipeline parallelism."""
    monkeypatch.setattr(VllmScheduler, "steps_under_way", 3)
    e, one = loading(NEVER, asynchronous=True)
    held, now = e.connector._scheduler.importer.held, [time.monotonic()]
    held._clock = lambda: now[0]
    held.add("a")
    late = e.schedule()
    one.cache.end_now()
    output = one.output_of(late)  # the rank's report is made, and not taken in yet
    assert output.finished_recving == {"a"}
    held._since["a"] -= LOST_SECONDS
    now[0] += LOOK_SECONDS
    asked = e.schedule()
    assert held._forgotten
    now[0] += LOOK_SECONDS
    third = e.schedule()
    e.answer(late, output)
    for sent in (asked, third):
        one.run(sent)
    for _ in range(4):
        now[0] += LOOK_SECONDS
        one.step()
    assert e.table.counters.read(LOADS_LOST) == 0
    finish(e, one)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_is_not_lost_because_the_engine_was_paused(
    loading: Loading, asynchronous: bool
) -> None:
    """vLLM does not step meanwhile, so no rank can report; nor is one cancelled that goes on."""
    e, one = loading(NEVER, asynchronous)
    held, now = e.connector._scheduler.importer.held, [time.monotonic()]
    held._clock = lambda: now[0]
    held.add("a")
    now[0] += 100 * LOST_SECONDS
    for _ in range(3):
        one.step()
        now[0] += LOOK_SECONDS
    assert one.side.loads.under_way
    one.cache.end_now()
    one.step()
    assert e.table.counters.read(LOADS_LOST) == 0
    finish(e, one)


def test_a_load_that_has_just_ended_when_ranks_are_asked_is_reported(loading: Loading) -> None:
    e, one = loading(NEVER)
    held, now = e.connector._scheduler.importer.held, [time.monotonic() + LOOK_SECONDS]
    held._clock = lambda: now[0]
    held._since["a"] = now[0] - 2 * LOST_SECONDS
    one.cache.end_now()
    asked = e.schedule()
    assert held._forgotten == {}
    output = one.output_of(asked)
    assert output.finished_recving == {"a"}
    e.answer(asked, output)
    assert e.table.counters.read(LOADS_LOST) == 0
    finish(e, one)


def test_a_report_that_matches_no_load_changes_nothing(loading: Loading, lines: Lines) -> None:
    """vLLM would end at what it does not wait for."""
    e, one = loading(NEVER)
    sent = e.schedule()
    strange = [LoadReport("nobody's", ()), LoadReport(12345, ())]
    meta = RankReport(0, loads=strange)
    e.answer(sent, KVConnectorOutput(finished_recving={"nobody's"}, kv_connector_worker_meta=meta))
    assert e.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert any("no request waits for: 1" in line for line in lines)
    one.cache.end_now()
    finish(e, one)


def test_a_load_that_is_reported_again_changes_nothing(loading: Loading) -> None:
    e, one = loading(NEVER)
    one.cache.end_now()
    while "a" in e.scheduler.requests:
        sent = e.schedule()
        output = one.output_of(sent)
        output.finished_recving = {"a"}
        e.answer(sent, output)
    finish(e, one)
