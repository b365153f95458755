"""Calls of the ranks that may write weights, and weights that were found written: what the
scheduler's side does, with vLLM's own scheduler and a rank that is played."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshm._shm.statistics import WEIGHTS_WRITTEN
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.descriptions import SHARE_OF_TIME
from kvshm.hooks.vllm.epochs import MOST_NAMED
from kvshm.hooks.vllm.messages import RankDescription, RankReport
from kvshm.hooks.vllm.rank_calls import HARMLESS
from kvshm.hooks.vllm.ranks import ask_rank

from .conftest import Lines
from .scheduling import DrivenEngine, Make, described, description, prompt


class Executor:
    """Stands for vLLM's: notes what reaches the ranks, and what others may read by then."""

    def __init__(self, engine: DrivenEngine) -> None:
        self.engine = engine
        self.sent: list[tuple[object, bool]] = []

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), **more: Any
    ) -> str:
        self.sent.append((args[0] if method is ask_rank else method, self.engine.table.life(0) > 0))
        return "answers"


class Core:
    """Stands for the EngineCore that starts an engine."""

    def __init__(self, engine: DrivenEngine, seconds: float) -> None:
        self.model_executor = Executor(engine)
        reported = description()
        engine.rank = RankDescription(reported.info, reported.fields, seconds=seconds)
        self.start(engine)

    def start(self, engine: DrivenEngine, reported: dict[Any, Any] | None = None) -> None:
        """A method of the core, which kvshm finds on the stack.  ``told``: what the ranks say."""
        if reported is None:
            engine.shake_hands()
        else:
            engine.connector.set_xfer_handshake_metadata_pp_aware(reported)


@pytest.fixture
def called(engine: Make) -> Callable[..., tuple[DrivenEngine, Executor]]:
    """An engine that shares, with blocks that others may read, and its executor.  ``seconds``: how
    long its rank has digested the weights."""

    def make(seconds: float = 0.0, **more: Any) -> tuple[DrivenEngine, Executor]:
        e = engine(**more)
        core = Core(e, seconds)
        e.wait_for_epoch()
        e.add("a", prompt(3), max_tokens=40)
        e.step()
        assert len(e.ready()) == 3
        return e, core.model_executor

    return make


def write(_: object) -> None:
    """A callable that somebody sends to the ranks."""


class NoHash:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, _: object) -> None:
        """Nothing."""


WRITERS: list[Any] = [
    write, partial(write), NoHash(), lambda _: None, b"pickled", "apply_model", "my_method",
    "update_weights", "sleep", "wake_up", "elastic_ep_execute", "x" * 10**6, "new\nline\x1b[0m",
]  # fmt: skip


@pytest.mark.parametrize("method", WRITERS, ids=lambda m: repr(m)[:20])
@pytest.mark.parametrize("by_name", [False, True])
def test_whatever_may_write_ends_the_epoch_before_it_is_sent(
    called: Any, method: Any, by_name: bool, lines: Lines
) -> None:
    e, executor = called()
    call = executor.collective_rpc
    assert (call(method=method) if by_name else call(method)) == "answers"
    assert executor.sent == [("weights_change", False), (method, False)]
    assert (e.table.retired, e.ready()) == (True, set())
    assert e.connector._scheduler.cache.epoch_state is None
    (line,) = [line for line in lines if "may write weights" in line]
    assert len(line) < 400
    assert line.isprintable()


def test_a_hundred_calls_are_named_each_once_and_no_further_ones(
    engine: Make, lines: Lines
) -> None:
    connector = engine().connector
    for _ in range(2):
        for number in range(MOST_NAMED + 1):
            connector.call_may_write(f"call_{number}")
    assert len([line for line in lines if "may write weights" in line]) == MOST_NAMED


@pytest.mark.parametrize("method", [*sorted(HARMLESS), "counts_things", "tells_things"])
def test_what_only_reads_changes_nothing(
    called: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_READ_ONLY_CALLS", "counts_things, tells_things")
    e, executor = called()
    assert executor.collective_rpc(method) == "answers"
    assert executor.sent == [(method, True)]
    assert len(e.ready()) == 3


def test_kvshms_own_questions_change_nothing(called: Any) -> None:
    e, executor = called()
    e.connector._scheduler.epochs.ranks.describe()
    assert executor.sent == [("describe", True)]
    assert len(e.ready()) == 3


def test_a_handshake_that_comes_again_asks_no_rank_and_ends_no_epoch(engine: Make) -> None:
    """vLLM 0.33 repeats it when the KV cache wakes up; the weights may sleep then."""
    e = engine()
    core = Core(e, 0.0)
    e.wait_for_epoch()
    epoch = e.connector._scheduler.cache.epoch_state
    for again in ({(0, 0): e.rank}, {}):
        core.start(e, again)
    assert core.model_executor.sent == []
    assert e.connector._scheduler.cache.epoch_state is epoch


def test_the_ranks_are_asked_anew_and_what_they_compute_then_is_shared(called: Any) -> None:
    e, executor = called()
    executor.collective_rpc(write)
    sent = e.schedule()
    assert sent.metadata.describe
    e.run(sent, described(sent))
    e.wait_for_epoch()
    e.add("b", prompt(2, first=300), max_tokens=3)
    e.step()
    assert e.ready() == set(e.blocks_of("b")[:2])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_under_way_was_of_the_old_weights(called: Any, asynchronous: bool) -> None:
    e, executor = called(asynchronous=asynchronous)
    e.add("b", prompt(2, first=300), max_tokens=30)
    flying = e.schedule()
    executor.collective_rpc(write)
    e.run(flying)
    sent = e.schedule()
    e.run(sent, described(sent))
    e.wait_for_epoch()
    e.step()
    assert e.ready() == set()


def test_a_call_is_logged_once_however_often_it_comes(called: Any, lines: Lines) -> None:
    _, executor = called()
    for _ in range(3):
        executor.collective_rpc("watches")
        executor.collective_rpc(write)
    said = [line for line in lines if "may write weights" in line]
    assert [line.split(" of all ranks")[0] for line in said] == [
        "kvshm: watches",
        "kvshm: a callable, write",
    ]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_calls_that_come_again_and_again_do_not_have_the_weights_read_each_time(
    called: Any,
) -> None:
    """A monitor that calls the ranks each second, or a writer that no one hears of."""
    e, executor = called(seconds=2.0)
    descriptions = e.connector._scheduler.epochs.descriptions
    clock = descriptions._clock = Clock()
    clock.now = descriptions._earliest - 0.001
    executor.collective_rpc(write)
    assert not e.step().metadata.describe
    assert e.ready() == set()
    clock.now += 0.002
    sent = e.schedule()
    assert sent.metadata.describe
    reported = RankDescription(description().info, {"weights": "w"}, seconds=3.0)
    answers = {"descriptions": {0: reported}, "describes": sent.metadata.describe}
    e.run(sent, RankReport(sent.metadata.step, **answers))
    e.wait_for_epoch()
    report = RankReport(0, written={0: "model.norm.weight"}, weights_changed=True)
    e.step(report)
    assert not e.step().metadata.describe
    clock.now += 3.0 * SHARE_OF_TIME - 0.01
    assert not e.step().metadata.describe
    clock.now += 0.02
    assert e.step().metadata.describe


def test_what_is_computed_before_the_weights_are_read_is_never_shared(called: Any) -> None:
    e, executor = called(seconds=2.0)
    descriptions = e.connector._scheduler.epochs.descriptions
    clock = descriptions._clock = Clock()
    executor.collective_rpc(write)
    e.add("b", prompt(2, first=300), max_tokens=30)
    e.step()
    e.step()
    clock.now = descriptions._earliest
    sent = e.schedule()
    e.run(sent, described(sent))
    e.wait_for_epoch()
    for _ in range(20):
        e.step()
    assert e.ready() == set()


def test_a_change_that_was_announced_is_not_waited_with(called: Any) -> None:
    """Of a trainer that resets the cache after each update."""
    e, executor = called(seconds=1000.0)
    executor.collective_rpc(write)
    assert not e.step().metadata.describe
    e.connector.reset_cache()
    assert e.step().metadata.describe


def test_a_reset_that_vllm_cannot_carry_out_counts_all_the_same(called: Any) -> None:
    """Requests run: vLLM keeps its blocks, and the weights are others."""
    e, _ = called()
    assert e.scheduler.reset_prefix_cache() is False
    assert (e.table.retired, e.ready()) == (True, set())
    sent = e.schedule()
    e.run(sent, described(sent))
    e.wait_for_epoch()
    for _ in range(20):
        e.step()
    assert e.ready() == set(), "the request began with the old weights"


def test_a_write_that_was_found_is_counted_and_named_in_the_next_epoch(called: Any) -> None:
    e, _ = called()
    for name in ("model.norm.weight", "lm_head.weight"):
        sent = e.schedule()
        report = RankReport(sent.metadata.step, written={0: name}, weights_changed=True)
        e.run(sent, report)
        assert (e.table.retired, e.ready()) == (True, set())
        sent = e.schedule()
        assert sent.metadata.describe
        e.run(sent, described(sent))
        e.wait_for_epoch()
        e.step()
    assert e.table.counters.read(WEIGHTS_WRITTEN) == 2
    (error,) = [error.text for error in e.table.errors()]
    assert error == "rank 0: weights written: lm_head.weight"


def test_an_engine_that_wakes_up_hands_its_ranks_over_again(called: Any) -> None:
    """vLLM 0.33 does: the calls are still watched once."""
    e, executor = called()
    watched = executor.collective_rpc
    e.connector._scheduler.epochs.ranks.watch_calls(lambda _: None, ())
    assert executor.collective_rpc is watched


def test_a_failure_of_kvshm_does_not_keep_a_call_from_the_ranks(
    called: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    e, executor = called()
    monkeypatch.setattr(e.connector, "strict", False)
    side = e.connector._scheduler
    monkeypatch.setattr(side.epochs, "reset", lambda **_: 1 / 0)
    with caplog.at_level(logging.CRITICAL):
        assert executor.collective_rpc(write) == "answers"
    assert executor.sent == [(write, False)]
    assert side.epochs.off
    assert isinstance(e.connector, KvshmConnector)
