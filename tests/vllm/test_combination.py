"""Which connector of a MultiConnector loads, and what the others hear: vLLM's scheduler and its
MultiConnector with a connector of a store that keeps nothing, in both orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.request import RequestStatus

from kvshm._engine.load_plan import LoadReport
from kvshm.hooks.vllm.combination import KV_EVENTS, Offer, choose
from kvshm.hooks.vllm.imports.importer import SECONDS_BEGUN

from .scheduling import BLOCK_SIZE, Make, imagined_cache, prompt
from .several_connectors import PeeredEngine, config_of
from .store_connector import StoreConnector

THEIRS = {
    "kv_connector": "StoreConnector",
    "kv_connector_module_path": StoreConnector.__module__,
}
BOTH_ORDERS = pytest.mark.parametrize("ours_first", [True, False])


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        ([], None),
        ([(0, False, True), (0, False, False)], None),
        ([(32, True, True), (64, True, False)], 1),
        ([(64, True, True), (32, False, False)], 0),
        ([(64, True, False), (64, True, True)], 1),  # a copy in place is cheaper
        ([(64, False, False), (48, True, True)], 1),  # a block more is no longer prefix
        ([(65, True, False), (48, True, True)], 0),
        ([(16, True, False), (0, False, True)], 0),  # nothing is not nearly a block
        ([(64, True, False), (64, False, False)], 1),  # no step is lost
        ([(64, True, False), (64, True, False)], 0),
    ],
)  # fmt: skip
def test_the_longest_is_loaded_and_of_equal_ones_the_cheapest(
    offers: list[tuple[int, bool, bool]], chosen: int | None
) -> None:
    assert choose([Offer(*offer) for offer in offers], 16) == chosen


def store_of(engine: PeeredEngine) -> StoreConnector:
    found: StoreConnector = engine.other
    return found


MakeEngine = Callable[..., PeeredEngine]


@pytest.fixture
def combined(model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Makes engines that end with the test; ``engine`` sets the run directory."""
    made: list[PeeredEngine] = []

    def make(ours_first: bool, longest: bool = True) -> PeeredEngine:
        monkeypatch.setenv("KVSHM_BESIDE", str(int(longest)))
        made.append(PeeredEngine(config_of(model, THEIRS, ours_first)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@BOTH_ORDERS
@pytest.mark.parametrize(
    ("theirs", "longest", "ours"),
    [
        ((48, True), True, False),  # theirs is longer by a block: see below
        ((64, True), True, False),
        ((16, True), True, True),
        ((32, True), True, True),
        ((0, False), True, True),
        ((16, True), False, None),
        ((64, True), False, None),
    ],
)  # fmt: skip
def test_the_longer_prefix_is_loaded_in_both_orders(
    combined: MakeEngine, ours_first: bool, theirs: Any, longest: bool, ours: bool | None
) -> None:
    """kvshm has 32 tokens.  Without KVSHM_BESIDE the order decides, as in vLLM."""
    e = combined(ours_first, longest)
    e.held = 2 if theirs != (48, True) else 1
    store_of(e).has = [theirs]
    e.add("a", prompt(5))
    sent = e.schedule()
    mine = ours_first if ours is None else ours
    assert bool(e.loads(sent)) == mine
    assert e.scheduler.requests["a"].num_computed_tokens == (32 if mine else theirs[0])
    assert store_of(e).told["a"] == ([] if mine else [theirs[0]])
    imports = e.connector._scheduler.importer.imports
    assert ("a" in imports) == mine  # what was matched in vain is forgotten


@BOTH_ORDERS
def test_who_asks_for_time_is_asked_again(combined: MakeEngine, ours_first: bool) -> None:
    e = combined(ours_first)
    store_of(e).has = [(None, False), (None, True), (64, True)]
    e.add("a", prompt(5))
    for _ in range(2):
        sent = e.step()
        assert not sent.output.num_scheduled_tokens
        assert not e.loads(sent)
        assert store_of(e).told == {}
    e.step()
    assert store_of(e).told == {"a": [64]}


@BOTH_ORDERS
def test_the_others_hear_of_blocks_once_they_are_full(
    combined: MakeEngine, ours_first: bool
) -> None:
    """What they have locked for the request they give back then."""
    e = combined(ours_first)
    store_of(e).has = [(16, True)]
    e.add("a", prompt(3))
    sent = e.schedule()
    assert e.loads(sent)
    assert (store_of(e).told, store_of(e).locked) == ({}, {"a"})
    e.report(sent, {"a"}, LoadReport("a", ()))
    sent = e.step()
    assert sent.output.num_scheduled_tokens == {"a": 3 + BLOCK_SIZE}
    assert (store_of(e).told, store_of(e).locked) == ({"a": [0]}, set())
    assert store_of(e).blocks["a"] == e.tables_of("a")
    assert store_of(e).asked == 1


@BOTH_ORDERS
@pytest.mark.parametrize("longest", [True, False])
def test_blocks_that_a_lost_load_leaves_are_remembered_by_no_store(
    combined: MakeEngine, ours_first: bool, longest: bool
) -> None:
    """vLLM frees them, and hands them to other requests: with their contents a store would answer
    this prompt."""
    e = combined(ours_first, longest)
    e.add("a", prompt(3))
    sent = e.schedule()
    (load,) = e.loads(sent)
    lost = e.blocks_of("a")
    e.report(sent, {"a"}, LoadReport("a", tuple(load.lost)), bad=load.lost)
    e.held = 0
    e.step()
    assert e.blocks_of("a")[:3] != lost[:3]
    assert store_of(e).blocks["a"] == e.tables_of("a")


@BOTH_ORDERS
def test_after_a_lost_load_the_store_is_asked_again(combined: MakeEngine, ours_first: bool) -> None:
    e = combined(ours_first)
    store_of(e).has = [(16, True)]
    e.add("a", prompt(3))
    sent = e.schedule()
    (load,) = e.loads(sent)
    e.report(sent, {"a"}, LoadReport("a", tuple(load.lost)), bad=load.lost)
    e.step()
    assert store_of(e).told == {"a": [16]}
    assert e.scheduler.requests["a"].num_computed_tokens == 16


@BOTH_ORDERS
def test_a_load_of_the_stores_that_is_lost_may_come_from_a_peer(
    combined: MakeEngine, ours_first: bool
) -> None:
    e = combined(ours_first)
    store_of(e).has = [(64, True), (0, False)]
    e.add("a", prompt(5))
    sent = e.schedule()
    assert not e.loads(sent)
    e.report(sent, {"a"}, bad=e.blocks_of("a"))
    (load,) = e.loads(e.schedule())
    assert len(load.lost) == 2  # of a peer that is none


@BOTH_ORDERS
def test_an_aborted_request_leaves_nothing(combined: MakeEngine, ours_first: bool) -> None:
    e = combined(ours_first)
    store_of(e).has = [(16, True)]
    e.add("a", prompt(3))
    sent = e.schedule()
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert (store_of(e).locked, store_of(e).blocks) == (set(), {})
    e.report(sent, {"a"}, LoadReport("a", ()))
    assert not e.scheduler.requests
    assert not e.connector._scheduler.importer.imports


@BOTH_ORDERS
@pytest.mark.parametrize("saved", ["before", "with", "after"])
def test_blocks_of_an_aborted_request_are_freed_once_when_its_import_has_ended(
    combined: MakeEngine, ours_first: bool, saved: str
) -> None:
    """A store that saves (LMCache's does) gives such a request back in the next step: the copy
    would go on into blocks of others, or vLLM end at a request that it no longer has."""
    e = combined(ours_first)
    store_of(e).saves = True
    pool = e.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    e.add("a", prompt(3))
    sent = e.schedule()
    assert e.loads(sent)
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    e.report(sent, set())
    if saved == "before":
        e.report(e.schedule(), set(), saved={"a"})
        assert pool.get_num_free_blocks() < before
    e.report(e.schedule(), {"a"}, LoadReport("a", ()), saved={"a"} if saved == "with" else ())
    if saved == "after":
        e.report(e.schedule(), set(), saved={"a"})
    e.step()
    assert not e.scheduler.requests
    assert pool.get_num_free_blocks() == before


@BOTH_ORDERS
def test_a_request_without_an_import_is_freed_when_it_was_saved(
    combined: MakeEngine, ours_first: bool
) -> None:
    e = combined(ours_first)
    e.held, store_of(e).saves = 0, True
    e.add("a", prompt(3), max_tokens=1)
    e.step()
    assert e.scheduler.requests
    e.report(e.schedule(), set(), saved={"a"})
    assert not e.scheduler.requests


@BOTH_ORDERS
def test_a_preempted_request_is_asked_for_anew(combined: MakeEngine, ours_first: bool) -> None:
    e = combined(ours_first)
    store_of(e).has = [(16, True), (64, True)]
    e.add("a", prompt(5))
    sent = e.schedule()
    e.report(sent, {"a"}, LoadReport("a", ()))
    e.step()
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(2):
        sent = e.step()
    assert store_of(e).asked == 2
    assert store_of(e).told["a"] == [0, 64]
    assert not e.loads(sent)


def test_a_match_that_is_not_loaded_takes_nothing_of_the_steps_copies(
    combined: MakeEngine,
) -> None:
    """Else a second request would wait for a step, though the first one's copy is the store's."""
    e = combined(ours_first=False)
    costs = e.connector._scheduler.cache.planner.costs
    e.nbytes = int(SECONDS_BEGUN * 0.9 * 2e9)
    assert SECONDS_BEGUN / 2 < costs.load_seconds(e.nbytes) < SECONDS_BEGUN
    store_of(e).has = [(64, True), (0, False)]
    e.add("a", prompt(5))
    e.add("b", prompt(5, first=900))
    sent = e.schedule()
    assert [load.load_id for load in e.loads(sent)] == ["b"]


def test_a_multiconnector_that_decides_by_itself_keeps_its_decision(
    combined: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MultiConnector.get_num_new_matched_tokens

    class Own(MultiConnector):
        def get_num_new_matched_tokens(self, *about: Any) -> Any:
            return first(self, *about)

    registry = "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory._registry"
    monkeypatch.setitem(_at(registry), "MultiConnector", lambda: Own)
    e = combined(ours_first=True)
    store_of(e).has = [(64, True)]
    e.add("a", prompt(5))
    assert e.loads(e.schedule())


def _at(path: str) -> Any:
    import pkgutil

    return pkgutil.resolve_name(path.replace(".KVConnectorFactory", ":KVConnectorFactory"))


@BOTH_ORDERS
def test_the_events_of_a_worker_reach_the_scheduler(
    model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch, ours_first: bool
) -> None:
    """vLLM's MultiConnector has no such method."""
    events = object()
    monkeypatch.setattr(StoreConnector, KV_EVENTS, lambda _: events)
    config = config_of(model, THEIRS, ours_first)
    group = MultiConnector(config, KVConnectorRole.WORKER, imagined_cache(8))
    assert group.get_kv_connector_kv_cache_events() is None
    group.register_kv_caches({})
    assert group.get_kv_connector_kv_cache_events() is events
    group.shutdown()
