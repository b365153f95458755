"""Which connector of a MultiConnector loads, and what the others hear: vLLM's scheduler and its
MultiConnector with a connector of a store that keeps nothing, in both orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

from kvshm._engine.load_plan import LoadReport
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES
from kvshm.hooks.vllm.combination import KV_EVENTS, Offer, choose
from kvshm.hooks.vllm.imports.importer import SECONDS_BEGUN
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import BLOCK_SIZE, Make, Sent, imagined_cache, plan_of, prompt
from .several_connectors import BesideEngine, config_of
from .store_connector import StoreConnector

THEIRS = {
    "kv_connector": "StoreConnector",
    "kv_connector_module_path": StoreConnector.__module__,
}
PEER: Any = SimpleNamespace(info=SimpleNamespace(epoch=77, ranks=[]), row=-1)
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


class Engine(BesideEngine):
    """Peers hold the first blocks of every prompt, and the store what the test says."""

    held = 2
    nbytes = 0

    @property
    def store(self) -> StoreConnector:
        found: StoreConnector = self.scheduler.connector.sub_connectors[1 - self.place]
        return found

    def lookup(self, chain: list[bytes], start: int, stop: int) -> Any:
        length = min(stop, self.held) - start
        if length <= 0:
            return None
        runs = (PlannedRun(PEER, bytes(RECORD_BYTES * length)),)
        return plan_of(self.table.epoch, start, runs, nbytes=self.nbytes)

    def loads(self, sent: Sent) -> list[Any]:
        found: list[Any] = sent.metadata.metadata[self.place].loads
        return found

    def report(self, sent: Sent, finished: set[str], *loads: LoadReport, bad: Any = ()) -> None:
        """The step's output comes back, with the end of these loads."""
        step = sent.metadata.metadata[self.place].step
        output = KVConnectorOutput(
            finished_recving=finished or None,
            kv_connector_worker_meta=self.reported(RankReport(step, loads=list(loads))),
            invalid_block_ids=set(bad),
        )
        self.answer(sent, output)


MakeEngine = Callable[..., Engine]


@pytest.fixture
def combined(model: Path, engine: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    """Makes engines that end with the test; ``engine`` sets the run directory."""
    made: list[Engine] = []

    def make(ours_first: bool, longest: bool = True) -> Engine:
        monkeypatch.setenv("KVSHM_BESIDE", str(int(longest)))
        e = Engine(config_of(model, THEIRS, ours_first))
        made.append(e)
        planner = e.connector._scheduler.cache.planner
        monkeypatch.setattr(planner, "has_peers", lambda: True)
        monkeypatch.setattr(planner, "lookup", e.lookup)
        return e

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
    e.store.has = [theirs]
    e.add("a", prompt(5))
    sent = e.schedule()
    mine = ours_first if ours is None else ours
    assert bool(e.loads(sent)) == mine
    assert e.scheduler.requests["a"].num_computed_tokens == (32 if mine else theirs[0])
    assert e.store.told["a"] == ([] if mine else [theirs[0]])
    imports = e.connector._scheduler.importer.imports
    assert ("a" in imports) == mine  # what was matched in vain is forgotten


@BOTH_ORDERS
def test_who_asks_for_time_is_asked_again(combined: MakeEngine, ours_first: bool) -> None:
    e = combined(ours_first)
    e.store.has = [(None, False), (None, True), (64, True)]
    e.add("a", prompt(5))
    for _ in range(2):
        sent = e.step()
        assert not sent.output.num_scheduled_tokens
        assert not e.loads(sent)
        assert e.store.told == {}
    e.step()
    assert e.store.told == {"a": [64]}


@BOTH_ORDERS
def test_the_others_hear_of_blocks_once_they_are_full(
    combined: MakeEngine, ours_first: bool
) -> None:
    """What they have locked for the request they give back then."""
    e = combined(ours_first)
    e.store.has = [(16, True)]
    e.add("a", prompt(3))
    sent = e.schedule()
    assert e.loads(sent)
    assert (e.store.told, e.store.locked) == ({}, {"a"})
    e.report(sent, {"a"}, LoadReport("a", ()))
    sent = e.step()
    assert sent.output.num_scheduled_tokens == {"a": 3 + BLOCK_SIZE}
    assert (e.store.told, e.store.locked) == ({"a": [0]}, set())
    assert e.store.blocks["a"] == e.blocks_of("a")
    assert e.store.asked == 1


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
    e.add("b", prompt(1, first=900))  # takes some of them
    e.scheduler.waiting.prepend_request(e.scheduler.waiting.pop_request())
    e.held = 0
    for _ in range(2):
        e.step()
    assert e.blocks_of("a")[:2] != lost[:2] or e.blocks_of("b"), "nothing was handed out anew"
    for name in ("a", "b"):
        assert e.store.blocks[name] == e.blocks_of(name)[: len(e.store.blocks[name])]


@BOTH_ORDERS
def test_after_a_lost_load_the_store_is_asked_again(combined: MakeEngine, ours_first: bool) -> None:
    e = combined(ours_first)
    e.store.has = [(16, True)]
    e.add("a", prompt(3))
    sent = e.schedule()
    (load,) = e.loads(sent)
    e.report(sent, {"a"}, LoadReport("a", tuple(load.lost)), bad=load.lost)
    e.step()
    assert e.store.told == {"a": [16]}
    assert e.scheduler.requests["a"].num_computed_tokens == 16


@BOTH_ORDERS
def test_a_load_of_the_stores_that_is_lost_may_come_from_a_peer(
    combined: MakeEngine, ours_first: bool
) -> None:
    e = combined(ours_first)
    e.store.has = [(64, True), (0, False)]
    e.add("a", prompt(5))
    sent = e.schedule()
    assert not e.loads(sent)
    e.report(sent, {"a"}, bad=e.blocks_of("a"))
    (load,) = e.loads(e.schedule())
    assert len(load.lost) == 2  # of a peer that is none


@BOTH_ORDERS
def test_an_aborted_request_leaves_nothing(combined: MakeEngine, ours_first: bool) -> None:
    from vllm.v1.request import RequestStatus

    e = combined(ours_first)
    e.store.has = [(16, True)]
    e.add("a", prompt(3))
    sent = e.schedule()
    e.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert (e.store.locked, e.store.blocks) == (set(), {})
    e.report(sent, {"a"}, LoadReport("a", ()))
    assert not e.scheduler.requests
    assert not e.connector._scheduler.importer.imports


@BOTH_ORDERS
def test_a_preempted_request_is_asked_for_anew(combined: MakeEngine, ours_first: bool) -> None:
    e = combined(ours_first)
    e.store.has = [(16, True), (64, True)]
    e.add("a", prompt(5))
    sent = e.schedule()
    e.report(sent, {"a"}, LoadReport("a", ()))
    e.step()
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(2):
        sent = e.step()
    assert e.store.asked == 2
    assert e.store.told["a"] == [0, 64]
    assert not e.loads(sent)


def test_a_match_that_is_not_loaded_takes_nothing_of_the_steps_copies(
    combined: MakeEngine,
) -> None:
    """Else a second request would wait for a step, though the first one's copy is the store's."""
    e = combined(ours_first=False)
    costs = e.connector._scheduler.cache.planner.costs
    e.nbytes = int(SECONDS_BEGUN * 0.9 * 2e9)
    assert SECONDS_BEGUN / 2 < costs.load_seconds(e.nbytes) < SECONDS_BEGUN
    e.store.has = [(64, True), (0, False)]
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
    e.store.has = [(64, True)]
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
