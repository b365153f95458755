"""What a request whose import did not arrive leaves behind when its step is undone: nothing that a
client could see, and where undoing itself fails, an error rather than a wrong token."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import Request, RequestStatus

from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, plan_of, prompt
from .test_at_once import PEER, Node


class Failing(Node):
    """An engine whose one request matches three blocks, none of which arrives."""

    def __init__(self, e: DrivenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(e, random.Random(1), failing=1.0)
        runs = (PlannedRun(PEER, bytes(RECORD_BYTES * 3)),)
        plan = plan_of(e.table.epoch, 0, runs)
        monkeypatch.setattr(self.side.cache.planner, "has_peers", lambda: True)
        monkeypatch.setattr(self.side.cache.planner, "lookup", lambda *_: plan)
        monkeypatch.setattr(self.side.cache.planner, "load", self.begin_load)
        monkeypatch.setattr(self.rnd, "random", lambda: 0.2)  # below failing / 3, above silence

    def ask(self, seed: int | None = None, temperature: float = 0.0) -> Request:
        self.prompts["r"], self.delivered["r"] = prompt(3), []
        request = self.e.add("r", prompt(3), max_tokens=5)
        request.sampling_params.seed = seed
        request.sampling_params.temperature = temperature
        return request

    def go_on(self, request: Request) -> None:
        for _ in range(30):
            if request.is_finished():
                return
            self.schedule()
            self.run()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_client_hears_what_was_really_cached(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    node = Failing(engine(asynchronous), monkeypatch)
    request = node.ask()
    node.schedule()
    assert request.prefill_stats.num_external_cached_tokens == 3 * BLOCK_SIZE
    if asynchronous:
        node.schedule()
    node.run()
    stats = request.prefill_stats
    assert (stats.num_cached_tokens, stats.num_computed_tokens) == (0, 3 * BLOCK_SIZE + 3)
    node.go_on(request)
    assert len(node.delivered["r"]) == 5


@pytest.mark.parametrize(
    ("seed", "temperature", "awaited"),
    [(7, 1.0, False), (7, 0.0, True), (None, 1.0, True)],
    ids=["seeded", "greedy", "random"],
)
def test_a_request_whose_seed_counts_is_not_awaited(
    engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    seed: int | None,
    temperature: float,
    awaited: bool,
) -> None:
    """A runner keeps its generator, which a token that is dropped would leave a draw ahead."""
    node = Failing(engine(), monkeypatch)
    request = node.ask(seed, temperature)
    node.schedule()
    running = request.status is RequestStatus.RUNNING
    assert running is awaited


def test_who_cannot_be_preempted_is_ended_with_an_error(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    e.connector.strict = False
    node = Failing(e, monkeypatch)
    request = node.ask()
    node.schedule()

    def preempt(*_: Any, **__: Any) -> None:
        raise TypeError("another vLLM")

    monkeypatch.setattr(e.scheduler, "_preempt_request", preempt)
    node.run()
    assert request.status is RequestStatus.FINISHED_ERROR
    assert node.delivered["r"] == []
    assert request not in e.scheduler.running


def test_without_a_way_to_drop_output_nothing_is_awaited(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = engine()
    at_once = e.connector._scheduler.importer.at_once
    at_once.available = False
    real = e.scheduler._preempt_request
    monkeypatch.setattr(e.scheduler, "_preempt_request", lambda request, at: real(request, at))
    at_once.watch(e.scheduler, lambda *_: None)
    assert not at_once.available


@pytest.mark.parametrize("awaited", [False, True])
def test_an_allocation_that_fails_in_the_hook_keeps_no_one_waiting(
    engine: Make, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    e = engine()
    e.connector.strict = False
    node = Failing(e, monkeypatch)
    importer = node.side.importer
    monkeypatch.setattr(importer.at_once, "accepts", lambda *_: awaited)
    real = importer.allocated

    def once(*_: Any) -> None:
        monkeypatch.setattr(importer, "allocated", real)
        raise RuntimeError("a bug")

    monkeypatch.setattr(importer, "allocated", once)
    request = node.ask()
    node.go_on(request)
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert len(node.delivered["r"]) == 5


def test_an_import_that_was_to_fill_no_block_is_tried_once(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvshm has made no load of it, so its blocks are not known."""
    e = engine()
    node = Failing(e, monkeypatch)
    importer, real = node.side.importer, node.side.importer.allocated

    def once(*_: Any) -> None:
        monkeypatch.setattr(importer, "allocated", real)

    monkeypatch.setattr(importer, "allocated", once)
    request = node.ask()
    node.schedule()
    (load,) = node.steps[-1][0].metadata.at_once
    assert load.targets == ()
    node.run()
    assert not importer.imports["r"].may_import
    node.go_on(request)
    assert len(node.delivered["r"]) == 5
