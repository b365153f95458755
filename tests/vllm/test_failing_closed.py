"""A hook of the scheduler's half fails: everything is withdrawn, the failure is counted and told of
once, and the engine serves on."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm._base.log import LogLimit

pytest.importorskip("vllm")

from vllm.v1.request import FinishReason

from kvshm._base.declined import list_declined
from kvshm._engine.load_plan import LoadReport
from kvshm._shm.statistics import HOOK_ERRORS
from kvshm.config import Config
from kvshm.errors import MemoryInUse
from kvshm.hooks import boundary
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, description, prompt
from .test_undoing import Failing

FAILING: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "on_new_request": lambda side: (side.tracker, "track"),
    "get_num_new_matched_tokens": lambda side: (side, "match"),
    "update_state_after_alloc": lambda side: (side.importer, "allocated"),
    "blocks_handed_out": lambda side: (side.tracker, "blocks_handed_out"),
    "build_connector_meta": lambda side: (side, "build"),
    "update_connector_output": lambda side: (side, "output"),
    "request_finished": lambda side: (side, "request_finished"),
    "pool_will_reset": lambda side: (side, "prepare_pool_reset"),
    "pool_reset": lambda side: (side.epochs, "reset"),
    "has_pending_push_work": lambda side: (side, "must_step"),
}


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("a bug")


@pytest.fixture
def tracebacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines of kvshm that come with a traceback."""
    monkeypatch.setattr(boundary, "_log_limit", LogLimit(math.inf))
    reported: list[str] = []
    make = logging.getLogRecordFactory()

    def hear(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("vllm.kvshm") and record.exc_info:
            reported.append(record.getMessage())
        return record

    logging.setLogRecordFactory(hear)
    yield reported
    logging.setLogRecordFactory(make)


def assert_off(e: DrivenEngine, hook: str, tracebacks: list[str]) -> None:
    assert e.table.retired
    assert e.ready() == set()
    assert e.table.counters.read(HOOK_ERRORS) == 1
    (error,) = e.table.errors()
    assert (error.text, error.times) == (f"{hook}: a bug", 1)
    assert tracebacks == [f"kvshm: {hook} failed; kvshm is off for this engine, which serves on"]


def finish(e: DrivenEngine, name: str) -> None:
    request = e.scheduler.requests[name]
    for _ in range(20):
        if request.is_finished():
            break
        e.step()
    assert request.get_finished_reason() is FinishReason.LENGTH


@pytest.fixture
def lenient(engine: Make) -> Make:
    def make(asynchronous: bool = False) -> DrivenEngine:
        e = engine(asynchronous)
        e.connector.strict = False
        return e

    return make


@pytest.mark.parametrize("hook", list(FAILING))
def test_the_engine_withdraws_everything_and_serves_on(
    lenient: Make, monkeypatch: pytest.MonkeyPatch, tracebacks: list[str], hook: str
) -> None:
    e = lenient()
    e.add("shown", prompt(3), max_tokens=1)
    e.step()
    assert len(e.ready()) == 3
    monkeypatch.setattr(*FAILING[hook](e.connector._scheduler), broken)
    e.add("first", prompt(3, first=500), max_tokens=4)
    finish(e, "first")
    e.connector.has_pending_push_work()
    assert e.scheduler.reset_prefix_cache()
    e.add("second", prompt(3, first=900), max_tokens=4)
    finish(e, "second")
    assert_off(e, hook, tracebacks)
    config = Config.from_env(os.environ)
    ((_, reported),) = list_declined(Path(config.run_dir), config.namespace)
    assert reported.reason == f"kvshm is off until the engine is restarted: {hook}: a bug"


def test_a_load_is_reported_by_the_very_step_whose_hook_fails(
    lenient: Make, monkeypatch: pytest.MonkeyPatch, tracebacks: list[str]
) -> None:
    """Its request would wait for ever."""
    e = lenient()
    side = e.connector._scheduler
    monkeypatch.setattr(side, "build", broken)
    with monkeypatch.context() as patch:
        patch.setattr(side.importer, "match", lambda *_: 2 * BLOCK_SIZE)
        e.add("r", prompt(3), max_tokens=4)
        sent = e.schedule()
    (load,) = sent.metadata.loads
    assert not e.schedule().metadata.loads  # once
    lost = RankReport(0, loads=[LoadReport(load.load_id, load.lost)])
    e.run(sent, lost, invalid_block_ids=set(load.lost))
    finish(e, "r")
    assert_off(e, "build_connector_meta", tracebacks)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_late_in_the_hook_loses_no_load(
    lenient: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    e = lenient(asynchronous)
    node = Failing(e, monkeypatch)
    monkeypatch.setattr(node.side.importer.at_once, "accepts", lambda *_: False)
    monkeypatch.setattr(node.side._times, "built", broken)
    node.ask()
    e.add("other", prompt(0, first=900), max_tokens=2)  # so that the step has tokens, and is timed
    assert len(e.schedule().metadata.loads) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("hook", ["build", "before_output"])
def test_nothing_computed_on_blocks_that_may_not_have_come_is_delivered(
    lenient: Make,
    monkeypatch: pytest.MonkeyPatch,
    tracebacks: list[str],
    asynchronous: bool,
    hook: str,
) -> None:
    """A step waits for an import, none of which arrives, and one of its hooks fails."""
    e = lenient(asynchronous)
    node = Failing(e, monkeypatch)
    monkeypatch.setattr(node.side, hook, broken)
    request = node.ask()
    node.schedule()
    assert node.steps[-1][0].metadata.at_once
    with monkeypatch.context() as patch:
        patch.setattr(node.side.cache.planner, "lookup", lambda *_: None)  # ended with the epoch
        node.go_on(request)
    assert request.get_finished_reason() is FinishReason.LENGTH
    assert len(node.delivered["r"]) == 5
    assert_off(e, {"build": "build_connector_meta"}.get(hook, hook), tracebacks)


@pytest.mark.parametrize("of_a_rank", [False, True])
def test_what_is_off_stays_off_over_a_reset(
    lenient: Make, monkeypatch: pytest.MonkeyPatch, of_a_rank: bool
) -> None:
    e = lenient()
    side = e.connector._scheduler
    e.add("first", prompt(3), max_tokens=1)
    with monkeypatch.context() as patch:
        if of_a_rank:
            sent = e.schedule()
            e.run(sent, RankReport(sent.metadata.step, failed=True))
        else:
            patch.setattr(side, "request_finished", broken)
            e.step()
    assert e.scheduler.reset_prefix_cache()
    request = e.add("second", prompt(3, first=900), max_tokens=1)
    sent = e.schedule()
    assert not sent.metadata.describe
    answer = RankReport(
        sent.metadata.step,
        descriptions={0: description()},
        describes=side.epochs.descriptions.resets,
    )
    e.run(sent, answer)
    assert side.match(request, 0) == (0, False)
    assert side.cache._requested is None, "the next epoch would begin"
    assert e.table.counters.read(HOOK_ERRORS) == 1


def test_no_import_is_left_of_a_step_whose_output_could_not_be_checked(
    lenient: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = lenient()
    node = Failing(e, monkeypatch)
    monkeypatch.setattr(node.side, "before_output", broken)
    node.ask()
    node.schedule()
    assert node.side.importer.running.by_id
    node.run()
    assert not node.side.importer.running.by_id
    assert node.side.importer.linger((), busy=False) == 0.0


def test_a_request_that_cannot_be_undone_is_ended(
    lenient: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error: its blocks may not have come."""
    e = lenient()
    node = Failing(e, monkeypatch)
    monkeypatch.setattr(node.side.importer.at_once, "failed", broken)
    request = node.ask()
    node.schedule()
    node.run()
    assert request.get_finished_reason() is FinishReason.ERROR
    assert node.delivered["r"] == []


@pytest.mark.parametrize("kind", ["nothing", "asynchronous", "at once"])
@pytest.mark.parametrize("again", ["loads", "step_dispatched", "at_once.step_built"])
def test_a_failure_that_comes_again_reaches_vllm_only_where_tokens_could_be_wrong(
    lenient: Make, monkeypatch: pytest.MonkeyPatch, kind: str, again: str
) -> None:
    """vLLM's worker asserts that each step has metadata."""
    e = lenient()
    node = Failing(e, monkeypatch)
    importer = node.side.importer
    monkeypatch.setattr(importer.at_once, "accepts", lambda *_: kind == "at once")
    if kind != "nothing":
        node.ask()
    else:
        e.add("other", prompt(0, first=900), max_tokens=2)
    monkeypatch.setattr(node.side, "build", broken)
    owner = importer.at_once if "." in again else importer
    monkeypatch.setattr(owner, again.rpartition(".")[2], broken)
    if kind == "at once":
        with pytest.raises(MemoryInUse, match="blocks that nothing fills: a bug"):
            node.schedule()
    else:
        assert e.schedule().metadata is not None


def test_an_import_that_can_be_registered_in_no_way_is_computed(
    lenient: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = lenient()
    node = Failing(e, monkeypatch)
    monkeypatch.setattr(node.side.importer, "_register", broken)
    monkeypatch.setattr(node.side.importer.at_once, "accepts", lambda *_: False)
    node.ask()
    node.schedule()
    e.add("other", prompt(1, first=900), max_tokens=2)
    finish(e, "other")
