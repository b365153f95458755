"""A peer that loses events again and again, and what mending that may cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvshm._base.timing import TIMING
from kvshm._engine.roster_handler import RosterHandler
from kvshm._node.coordinator_session import CoordinatorSession
from kvshm._node.event_order import EventOrder, Verdict
from kvshm._node.peers import Peers
from kvshm._node.protocol import PROTOCOL_VERSION, EngineEvents, Joined
from kvshm._node.scan_queue import BURST_SCANS, ScanQueue
from kvshm._shm.statistics import RESYNCS

from .exporters import Clock, Exporter, Make, offered


class Hearing:
    """An engine that hears another one, of whose messages each second one is lost."""

    def __init__(self, peers: Peers, own: Exporter, peer: Exporter) -> None:
        self._own, self._peer, self._peers = own, peer, peers
        state: Any = SimpleNamespace(table=own.table, peers=peers)
        self._order, self._handler = EventOrder(), RosterHandler(lambda: None, lambda: state)
        roster = Joined(
            protocol=PROTOCOL_VERSION,
            coordinator_epoch=1,
            engine_epoch=own.info.epoch,
            lease_bit=0,
            sequence=0,
            roster=[peer.info],
            sequences={peer.info.epoch: 0},
            suspected=[],
            incompatible=[],
        )
        self._order.begin(roster)
        self._heard = 0

    def hear(self, records: bytes) -> None:
        self._heard += 1
        epoch = self._peer.info.epoch
        numbers = {"coordinator_epoch": 1, "sequence": self._heard, "epoch": epoch}
        events = EngineEvents(**numbers, engine_sequence=2 * self._heard, records=records)
        assert self._order.receive(events) is Verdict.MEMBER

    def scan_due(self) -> int:
        before = self._own.table.counters.read(RESYNCS)
        for news in self._order.take_updates():
            self._handler.apply(news)
        self._handler.scan_again(lambda: False)
        return self._own.table.counters.read(RESYNCS) - before


def test_any_number_of_gaps_is_mended_by_one_scan_and_after_some_by_none_for_a_second(
    peers: Peers, exporter: Make, clock: Clock
) -> None:
    a = exporter("a")
    hearing = Hearing(peers, exporter("me"), a)
    a.publish(1)
    for n in range(10, 15):
        hearing.hear(a.publish(n))
    assert hearing.scan_due() == 1
    assert offered(peers, 1) == [(1, 1, 0)], "the first gap is mended at once"
    for _ in range(BURST_SCANS - 1):
        hearing.hear(a.publish(14))
        assert hearing.scan_due() == 1, "and so are a few more"
    a.publish(2)
    a.reuse(10)
    clock.now += TIMING.rescan_pause_seconds - 0.01
    for n in range(15, 20):
        hearing.hear(a.publish(n))
        assert hearing.scan_due() == 0
    assert offered(peers, 19) == [(1, 19, 0)], "what is not lost is heard at once"
    assert (offered(peers, 2), offered(peers, 10)) == ([], [(1, 10, 0)]), "a lease will tell"
    clock.now += 0.01
    assert (hearing.scan_due(), hearing.scan_due()) == (1, 0)
    assert (offered(peers, 2), offered(peers, 10)) == ([(1, 2, 0)], [])


def test_senseless_events_cost_no_more_scans_than_lost_ones(
    peers: Peers, exporter: Make, clock: Clock
) -> None:
    a = exporter("a")
    hearing = Hearing(peers, exporter("me"), a)
    assert hearing.scan_due() == 0
    for scans in (*[1] * BURST_SCANS, 0, 0):
        peers.apply_events([(1, b"torn")] * 3)
        assert hearing.scan_due() == scans
    clock.now += TIMING.rescan_pause_seconds
    assert hearing.scan_due() == 1


def test_who_has_gone_is_not_scanned(peers: Peers, exporter: Make) -> None:
    a = exporter("a")
    peers.joined(a.info)
    peers.scan_queue.add(a.info.epoch)
    peers.gone(a.info.epoch)
    assert peers.scan_queue.scan_due(peers.rescan, lambda: False) == 0


def test_when_it_is_enough_the_others_are_first_the_next_time(clock: Clock) -> None:
    scan_queue, scanned = ScanQueue(clock), []
    for turn in range(3):
        for epoch in (1, 2, 3):
            scan_queue.add(epoch)
        assert scan_queue.scan_due(scanned.append, lambda: True) == 1
        clock.now += TIMING.rescan_pause_seconds
        assert len(scanned) == turn + 1
    assert sorted(scanned) == [1, 2, 3]


def test_scans_end_for_the_heartbeat(tmp_path: Path, clock: Clock) -> None:
    said: list[bool] = []

    class Scanning:
        def scan_again(self, enough: Callable[[], bool]) -> None:
            for _ in range(3):
                said.append(enough())
                clock.now += 0.5

        def beat(self) -> None: ...

        def describe(self) -> None: ...

    session = CoordinatorSession(tmp_path, "ns", Scanning(), clock, lambda: 1.0)  # type: ignore[arg-type]  # it has the methods that are called
    session.open((), lambda: None)
    try:
        session.work()
        assert said == [True] * 3, "the first heartbeat is due at once"
        said.clear()
        session.work()
        assert said == [False, False, True]
    finally:
        session.close()
