"""The worker's half when something fails: every load is reported once, and only once."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch.nn import Module
from vllm.lora.request import LoRARequest

from kvshm._base.ids import NO_LEASE_BIT, BlockId, Epoch, Rank
from kvshm._engine.load_plan import NO_TICKET, LoadOrder, LoadReport
from kvshm._rank.rank_half import RankHalf
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm.errors import MemoryInUse, TransportError
from kvshm.hooks.vllm import worker_side as worker_side_module
from kvshm.hooks.vllm.adapters import AdapterDigests
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.identity.layout import Placement
from kvshm.hooks.vllm.identity.rank_weights import RankWeights
from kvshm.hooks.vllm.messages import (
    QuietReport,
    QuietStep,
    RankDescription,
    RankReport,
    StepMetadata,
)
from kvshm.hooks.vllm.rank_loads import RankLoads
from kvshm.hooks.vllm.worker_side import WorkerSide

from ..sessions import new_namespace
from ..unit.served import ServedNode

GONE = Epoch(1)


class Unexportable:
    """A transport that has run out of descriptors."""

    name = "unexportable"

    def export(self, epoch: Epoch) -> Any:
        raise TransportError(f"no descriptor left for {epoch}")

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def engines() -> Iterator[ServedNode]:
    """The run directory in which the worker's engine hands out its tables."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        node = ServedNode(Path(directory), new_namespace())
        yield node
        node.close()


@pytest.fixture
def connector(engines: ServedNode) -> Iterator[KvshmConnector]:
    """A worker's connector, without the engine around it."""
    side = object.__new__(WorkerSide)
    side._report, side._attached = RankReport(0), frozenset()
    side._rank, side._weights = Rank(0), RankWeights(3600, side._weights_written)
    side._could_not_open = False
    side._cache = RankHalf(Unexportable(), Rank(0), engines.segments)  # type: ignore[arg-type]
    side.loads = RankLoads(side._cache, side._next_report, by_block=True)
    made = object.__new__(KvshmConnector)
    made.strict, made._scheduler, made._worker, made._connector_metadata = False, None, side, None
    yield made
    side.close()


@pytest.fixture
def table(engines: ServedNode) -> OwnSlotTable:
    """The slot table of an epoch that has just begun."""
    return engines.serve("engine", 7, num_blocks=8).table


def step(connector: KvshmConnector, metadata: StepMetadata) -> tuple[set[str], set[int], Any]:
    """What vLLM's model runner calls in one step: finished loads, bad blocks, the report."""
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    finished = connector.get_transfer_results(set()).finished_recving
    bad = connector.get_block_ids_with_load_errors()
    report = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return set(finished), bad, report


def test_loads_of_a_step_whose_epoch_cannot_be_opened_are_reported_once(
    connector: KvshmConnector, table: OwnSlotTable
) -> None:
    """vLLM asserts on a second report, and a load under way after the first may write into
    blocks that are somebody else's by then."""
    targets = (BlockId(5), BlockId(6))
    load = LoadOrder("r", Epoch(1), NO_TICKET, NO_LEASE_BIT, (), targets)
    steps = [step(connector, StepMetadata(1, open_epoch=table.epoch, loads=[load]))]
    assert (steps[0][2].not_opened, steps[0][2].failed) == (table.epoch, False)
    deadline = time.monotonic() + 100
    while not any(done for done, _, _ in steps):
        assert time.monotonic() < deadline
        steps.append(step(connector, StepMetadata(2)))
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        steps.append(step(connector, StepMetadata(2)))
    finished = [(done, bad) for done, bad, _ in steps if done or bad]
    assert finished == [({"r"}, set(targets))]
    assert [report.load_id for _, _, answer in steps for report in answer.loads] == ["r"]


def test_an_epoch_that_ended_while_its_step_was_under_way_is_no_failure(
    connector: KvshmConnector,
) -> None:
    """With asynchronous scheduling: a reset came after the step was dispatched."""
    load = LoadOrder("r", Epoch(1), NO_TICKET, NO_LEASE_BIT, (), (BlockId(5),))
    _, _, report = step(connector, StepMetadata(1, open_epoch=GONE, loads=[load]))
    assert not report.failed
    deadline = time.monotonic() + 100
    bad: set[int] = set()
    while not bad:
        assert time.monotonic() < deadline
        bad = step(connector, StepMetadata(2))[1]
    assert bad == {5}


def test_vllm_is_not_asked_to_call_for_every_layer(connector: KvshmConnector) -> None:
    connector.bind_connector_metadata(StepMetadata(1))
    assert not connector.has_connector_metadata()


def test_new_weights_end_the_epoch_and_are_reported(connector: KvshmConnector) -> None:
    assert connector._worker is not None
    connector._worker._weights_load()
    _, _, report = step(connector, StepMetadata(1))
    assert report.weights_changed
    _, _, report = step(connector, StepMetadata(2))
    assert not report.weights_changed


def test_an_adapter_that_a_step_finds_changed_is_reported_once(connector: KvshmConnector) -> None:
    assert connector._worker is not None
    connector._worker._adapter_changed()
    _, _, report = step(connector, StepMetadata(1))
    assert report.aggregate(RankReport(2)).adapter_changed
    assert report.weights_changed
    _, _, report = step(connector, StepMetadata(2))
    assert not report.adapter_changed


def test_a_table_for_weights_that_are_gone_is_not_opened(
    connector: KvshmConnector, table: OwnSlotTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine described itself, new weights came, and only then the table was announced:
    what it holds and what others hold of its fingerprint are different things."""
    side = connector._worker
    assert side is not None
    monkeypatch.setattr(Unexportable, "export", lambda *_: None)
    side._weights_load()
    step(connector, StepMetadata(1))  # the one step that tells of the change
    targets = (BlockId(5), BlockId(6))
    load = LoadOrder("r", table.epoch, NO_TICKET, NO_LEASE_BIT, (), targets)
    step(connector, StepMetadata(2, open_epoch=table.epoch, loads=[load]))
    assert table.life(0) == 0
    assert side._cache is not None
    assert side._cache.table is None


def test_a_description_covers_the_changes_before_it(
    connector: KvshmConnector, table: OwnSlotTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an engine that was reset before its new weights came, as vLLM's ``pause`` does, would
    begin one epoch more and never share what the first step computed."""
    side = connector._worker
    assert side is not None
    monkeypatch.setattr(Unexportable, "export", lambda *_: None)
    monkeypatch.setattr(worker_side_module, "rank_fields", lambda *_: {"weights": "w"})
    model = Module()
    side._weights.find([SimpleNamespace(get_model=lambda: model)], side._weights_load)
    side._placement = Placement(torch.empty(0), [], "1", ())
    side._vllm_config = side._kv_cache_config = None
    side._weights_load()
    _, _, report = step(connector, StepMetadata(1, describe=3))
    assert report.descriptions[0].fields["weights"] == "w"
    assert not report.weights_changed
    step(connector, StepMetadata(2, open_epoch=table.epoch))
    assert table.life(0) == table.epoch


def test_a_rank_whose_kv_cache_was_moved_does_not_share(connector: KvshmConnector) -> None:
    """As LMCache's connector does on a CPU: the model then computes in memory of that one's."""
    side = connector._worker
    assert side is not None
    storage = torch.zeros(8, dtype=torch.int8)
    layers = storage[:4], storage[4:]
    side._placement = placement = Placement(storage, [], "1", layers)
    assert placement.holds_caches()
    layers[1].set_(torch.zeros(4, dtype=torch.int8).untyped_storage(), 0, (4,), (1,))
    assert not placement.holds_caches()
    assert side.describe() == RankDescription(None, {}, "another connector has moved the KV cache")


def test_what_comes_up_between_quiet_steps_is_reported_with_the_next(
    connector: KvshmConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that neither asks for anything nor has anything to tell is answered by its number
    alone, and asks the rank nothing; whatever the rank has come by meanwhile is not lost."""
    side = connector._worker
    assert side is not None
    side._rank = Rank(3)
    step(connector, StepMetadata(1))
    with monkeypatch.context() as context:
        context.setattr(side, "_cache", SimpleNamespace(attached=lambda: side._attached))
        assert step(connector, QuietStep(2)) == (set(), set(), QuietReport(2))
    peers = frozenset({Epoch(9)})
    monkeypatch.setattr(side._cache, "attached", lambda: peers)
    assert step(connector, QuietStep(3))[2].attached == {3: peers}
    assert step(connector, QuietStep(4))[2].quiet
    side._weights_load()
    assert step(connector, QuietStep(5))[2].weights_changed
    connector.hook_failed("some hook", ValueError())
    assert step(connector, QuietStep(6))[2].failed
    assert step(connector, QuietStep(7))[2] == QuietReport(7)


def test_a_loaded_adapter_is_reported_with_the_next_step_and_to_who_asks(
    connector: KvshmConnector,
) -> None:
    side = connector._worker
    assert side is not None
    digests = AdapterDigests(Rank(0), side._adapter_loaded, side._adapter_changed)
    digests._listed = lambda: {7, 8}  # by vLLM's manager
    side._weights.adapters = digests
    step(connector, StepMetadata(1))
    digests._take(LoRARequest("name", 7, "path"), SimpleNamespace(loras={}))
    digests._take(LoRARequest("name", 8, "path"), SimpleNamespace(loras={}))
    known = digests.known()
    assert known[0].keys() == {7, 8}
    report = step(connector, QuietStep(2))[2]
    assert report.adapters == connector.answer_scheduler("adapters") == known
    both = report.aggregate(RankReport(2, adapters={1: {7: b"x"}}))
    assert both.adapters == {**known, 1: {7: b"x"}}
    assert not step(connector, QuietStep(3))[2].adapters


def test_no_step_is_quiet_while_a_load_is_under_way(connector: KvshmConnector) -> None:
    """However quiet the steps are in which it ends."""
    load = LoadOrder("r", Epoch(1), NO_TICKET, NO_LEASE_BIT, (), (BlockId(5),))
    said = [step(connector, StepMetadata(1, loads=[load]))]
    deadline = time.monotonic() + 100
    while not said[-1][0]:
        assert not said[-1][2].quiet
        assert time.monotonic() < deadline
        said.append(step(connector, QuietStep(2)))
    assert said[-1][:2] == ({"r"}, {5})
    assert step(connector, QuietStep(3)) == (set(), set(), QuietReport(3))


def test_reports_of_several_ranks_become_one() -> None:
    """Quiet only if all are: vLLM merges what the ranks say of a step."""
    spoken = RankReport(4, attached={1: frozenset({Epoch(9)})})
    assert QuietReport(4).aggregate(QuietReport(4)).quiet
    for merged in (QuietReport(4).aggregate(spoken), spoken.aggregate(QuietReport(4))):
        assert merged == spoken
        assert not merged.quiet
    assert QuietReport(4).aggregate(QuietReport(3)) == RankReport(3)


@pytest.mark.parametrize("kind", [QuietStep, QuietReport])
def test_a_quiet_message_has_every_value_and_packs_its_number(kind: Any) -> None:
    answer = pickle.loads(pickle.dumps(kind(7)))
    assert vars(answer) == {"step": 7}
    full = StepMetadata(7) if kind is QuietStep else RankReport(7)
    for name, value in vars(full).items():
        assert bool(getattr(answer, name)) == bool(value), name


def load(name: str) -> LoadOrder:
    return LoadOrder(name, GONE, NO_TICKET, NO_LEASE_BIT, (), (BlockId(5), BlockId(6)))


def until_finished(connector: KvshmConnector, metadata: StepMetadata) -> set[int]:
    """Run steps until the load of ``metadata`` is finished; return the bad blocks of all steps."""
    bad, deadline = set(), time.monotonic() + 100
    while True:
        finished, wrong, _ = step(connector, metadata)
        bad |= wrong
        if finished:
            return bad
        metadata = StepMetadata(2)
        assert time.monotonic() < deadline, "the request waits for ever"


@pytest.mark.parametrize("broken", ["begin_step", "begin_loads", "give_up's epoch"])
def test_the_loads_of_a_step_whose_hook_failed_are_reported(
    connector: KvshmConnector, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    side: Any = connector._worker
    if broken == "give_up's epoch":
        monkeypatch.setattr(side._cache, "end_epoch", fails)
    monkeypatch.setattr(side, "begin_loads" if broken == "begin_loads" else "begin_step", fails)
    assert until_finished(connector, StepMetadata(1, loads=[load("r")])) == {5, 6}


def test_what_has_ended_is_reported_by_the_very_step_whose_hook_fails(
    connector: KvshmConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    side: Any = connector._worker
    monkeypatch.setattr(side._cache, "attached", fails)
    assert until_finished(connector, StepMetadata(1, loads=[load("r")])) == {5, 6}


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("a bug")


def test_a_load_of_several_groups_is_reported_by_request(connector: KvshmConnector) -> None:
    """Blocks would end the engine.  What was forgotten fails no later load of the request."""
    side = connector._worker
    assert side is not None
    side.loads._by_block = False
    side.loads._end(LoadReport("a", (BlockId(3),)))
    side.loads._end(LoadReport("b", ()))
    assert connector.get_block_ids_with_load_errors() == set()
    results = connector.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"a"})
    side.loads._end(LoadReport("a", (BlockId(3),)))
    side.loads.forget(["a"])
    results = connector.get_transfer_results(set())
    assert not results.finished_recving
    assert not results.failed_recving


def test_memory_does_not_go_under_a_load_that_a_bug_keeps_from_ending(
    connector: KvshmConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way may write to it: then the sleep fails, and else it goes on."""
    side: Any = connector._worker
    monkeypatch.setattr(side._cache, "release_memory", fails)
    connector.unregister_kv_caches()
    side.loads.under_way["r"] = load("r")
    with pytest.raises(MemoryInUse, match="must stay mapped"):
        connector.unregister_kv_caches()
    del side.loads.under_way["r"]


def test_a_rank_answers_the_handshake_once(
    connector: KvshmConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    side: Any = connector._worker
    monkeypatch.setattr(side, "describe", lambda: "described")
    assert [connector.get_handshake_metadata() for _ in range(2)] == ["described", None]
