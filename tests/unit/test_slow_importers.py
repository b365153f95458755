"""What an importer that does not release its leases costs an exporter: one drain budget, once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvshm._base.roles import Decision
from kvshm._engine import publisher as module
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.publisher import DRAIN_POLL_SECONDS, Publisher
from kvshm._node.peers import Peers
from kvshm._shm.statistics import FORCED

from .exporters import Clock, Exporter, Make

BUDGET = 1000 * DRAIN_POLL_SECONDS


class Reuse:
    """An engine that reuses blocks on which importers hold leases.  Time goes on only while its
    publisher sleeps."""

    def __init__(self, own: Exporter, peers: Peers, clock: Clock) -> None:
        self.own, self.clock = own, clock
        state = EpochState(own.table, peers, None, None)  # type: ignore[arg-type]  # not touched
        cache = SimpleNamespace(epoch_state=state, role=Decision("", ""))
        self.publisher = Publisher(cache, lambda batch: None, BUDGET, clock)

    def __call__(self, *holders: Exporter) -> float:
        """Each of the ``holders`` leases a block of its own, then all blocks are reused.  Returns
        for how long the publisher waits."""
        for block, holder in enumerate(holders):
            record = self.own.publish(block)
            assert self.own.table.lease(holder.info.lease_bit, record)[0] == 1
        self.publisher.retract(range(len(holders)))
        began = self.clock.now
        self.publisher.drain_before_dispatch()
        return self.clock.now - began


@pytest.fixture
def importers(exporter: Make, peers: Peers) -> list[Exporter]:
    made = [exporter(name) for name in ("stopped", "busy")]
    for importer in made:
        peers.joined(importer.info)
    return made


@pytest.fixture
def reuse(exporter: Make, peers: Peers, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Reuse:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    return Reuse(exporter("me"), peers, clock)


def test_a_stopped_importer_is_waited_for_once(reuse: Reuse, importers: list[Exporter]) -> None:
    stopped, _ = importers
    assert reuse(stopped) == pytest.approx(BUDGET, rel=0.01)
    assert [reuse(stopped) for _ in range(3)] == [0, 0, 0]
    assert reuse.own.table.counters.read(FORCED) == 4, "its copies are discarded all the same"


def test_beside_a_stopped_importer_another_one_is_waited_for(
    reuse: Reuse, importers: list[Exporter]
) -> None:
    stopped, busy = importers
    reuse(stopped)
    assert reuse(stopped, busy) == pytest.approx(BUDGET, rel=0.01)


def test_an_importer_that_goes_on_is_waited_for_again(
    reuse: Reuse, importers: list[Exporter]
) -> None:
    """Its heartbeat alone does not show that it copies again."""
    stopped, _ = importers
    reuse(stopped)
    stopped.table.beat()
    assert reuse(stopped) == 0
    stopped.table.count_lease_batch()
    assert reuse(stopped) == pytest.approx(BUDGET, rel=0.01)
