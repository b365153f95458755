"""Imports that a step builds upon before their result is in: what is shown of it, and when."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshm._base.ids import BlockId
from kvshm.hooks.vllm.exports.block_tracker import BlockTracker
from kvshm.hooks.vllm.imports.request_import import LoadedBlocks
from kvshm.hooks.vllm.messages import QuietReport, QuietStep

from .scheduling import BLOCK_SIZE, DrivenEngine, Make, Sent, prompt

NUM_PROMISED = 2


class Promised:
    """Request "a" builds upon blocks whose load is under way; with asynchronous scheduling
    another step of it is built before the first one's output is in."""

    def __init__(self, e: DrivenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.e = e
        self.tracker: BlockTracker = e.connector._scheduler.tracker
        found = (NUM_PROMISED * BLOCK_SIZE, False)
        with monkeypatch.context() as patch:
            patch.setattr(e.connector, "get_num_new_matched_tokens", lambda *_: found)
            patch.setattr(e.connector, "update_state_after_alloc", lambda *_: None)
            patch.setattr(e.connector._scheduler.importer, "loads", self._loads)
            e.connector._scheduler.importer.step.has_news = True  # as by an allocation
            self.request = e.add("a", prompt(5), max_tokens=40)
            self.under_way: list[Sent] = [e.schedule()]
        if e.asynchronous:
            self.under_way.append(e.schedule())
        self.blocks = [BlockId(block) for block in e.blocks_of("a")[:5]]

    def _loads(self, _: object) -> tuple[list[object], list[object]]:
        """As ``build`` does for the targets of each load."""
        self.tracker.blocks_promised(self.e.blocks_of("a")[:NUM_PROMISED])  # type: ignore[arg-type]  # numbers
        return [], []

    def outputs(self) -> None:
        while self.under_way:
            self.e.run(self.under_way.pop(0))

    def loaded(self, count: int) -> None:
        chain = self.request.block_hashes
        self.tracker.blocks_loaded(LoadedBlocks(chain, 0, self.blocks[:count]))  # type: ignore[arg-type]  # of bytes


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def promised(
    request: pytest.FixtureRequest, engine: Make, monkeypatch: pytest.MonkeyPatch
) -> Promised:
    return Promised(engine(asynchronous=request.param), monkeypatch)


def test_what_is_built_upon_a_load_is_shown_when_the_load_is_in(promised: Promised) -> None:
    promised.outputs()
    assert promised.e.ready() == set()
    promised.e.add("c", prompt(2, first=300), max_tokens=1)
    promised.e.step()
    assert promised.e.ready() == set()  # later steps wait with it
    promised.loaded(NUM_PROMISED)
    promised.e.step()
    assert promised.e.ready() >= set(promised.blocks)
    assert len(promised.e.ready() - set(promised.e.blocks_of("a"))) == 2


def test_a_result_that_comes_with_the_steps_output_delays_nothing(promised: Promised) -> None:
    promised.loaded(NUM_PROMISED)
    promised.outputs()
    assert promised.e.ready() == set(promised.blocks)


@pytest.mark.parametrize("gone", [False, True])
def test_what_is_built_upon_a_load_that_failed_is_never_shown(
    promised: Promised, gone: bool
) -> None:
    e = promised.e
    if gone:
        e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    promised.tracker.blocks_failed([promised.blocks[1]])
    promised.loaded(1)
    promised.outputs()
    assert e.ready() <= {promised.blocks[0]}
    e.add("b", prompt(8), max_tokens=2)
    for _ in range(8):
        e.step()
    assert e.ready() == {promised.blocks[0]}
    e.add("c", prompt(3, first=300), max_tokens=20)
    e.step()
    assert len(e.ready()) == 4  # others are shown as ever


def test_an_import_of_an_earlier_life_is_not_shown(promised: Promised) -> None:
    promised.tracker.stop_expecting()
    promised.tracker.expecting = True  # as after a reset
    promised.loaded(NUM_PROMISED)
    promised.outputs()
    for _ in range(4):
        promised.e.step()
    assert promised.e.ready() == set()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_does_not_vouch_for_a_later_writer_of_its_block(
    engine: Make, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Its request was aborted, the blocks were freed before the step was over, as for a reset, and
    another request with the same prefix computes one of them anew."""
    e = engine(num_blocks=16, asynchronous=asynchronous)
    e.add("running", prompt(8, first=300), max_tokens=8)
    e.step()
    promised = Promised(e, monkeypatch)
    block = promised.blocks[0]
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    e.connector.pool_will_reset()
    e.add("others", prompt(4, first=700), max_tokens=8)  # takes all of its blocks but the first
    e.add("b", prompt(1, tail=0), max_tokens=8)
    writes = e.schedule()
    assert e.blocks_of("b") == [block]
    promised.loaded(NUM_PROMISED)
    promised.outputs()
    assert block not in e.ready()
    e.run(writes)
    assert block in e.ready()


def test_blocks_that_another_connector_failed_to_fill_are_withdrawn(engine: Make) -> None:
    """Its result comes with a step of which the ranks have nothing to tell."""
    e = engine()
    e.add("a", prompt(3), max_tokens=30)
    e.step()
    e.step()
    side, bad = e.connector._scheduler, e.blocks_of("a")[1]
    assert bad in e.ready()
    sent = e.schedule()
    side.output(frozenset(), QuietReport(sent.metadata.step), {bad})
    assert bad not in e.ready()


def test_a_decode_that_reuses_what_others_read_waits_for_them(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a request that shows nothing itself."""
    e = engine(num_blocks=8)
    drained: list[int] = []
    publisher = e.connector._scheduler.cache.publisher
    drain = publisher.drain_before_dispatch
    e.add("a", prompt(3, tail=1, first=100), max_tokens=1)
    e.step()
    e.step()
    b = e.add("b", prompt(2, tail=1, first=900), max_tokens=90)
    b.kv_transfer_params = {"kvshm": {"share": False}}
    monkeypatch.setattr(publisher, "drain_before_dispatch", lambda: (drained.append(1), drain()))
    lost = 0
    for _ in range(70):
        before = e.ready()
        drained.clear()
        sent = e.schedule()
        if before - e.ready():
            lost += isinstance(sent.metadata, QuietStep)
            assert drained
        e.run(sent)
    assert lost
