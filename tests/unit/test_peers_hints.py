"""kvshm._node.peers: hints that are stale, raced by scans, or of peers that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvshm._base.timing import TIMING
from kvshm._node.peers import QUARANTINE_FAILURES, Peers, PeersStats
from kvshm._node.protocol import EngineInfo
from kvshm._replica.index import StaleRecords
from kvshm._shm.layout import block_ids
from kvshm._shm.slot_table import PeerSlotTable
from kvshm._shm.statistics import MISS_FINGERPRINT, MISS_NO_OWNER, MISS_NO_PEER, MISS_QUARANTINED

from .exporters import HASHES, OWN_EPOCH, Clock, Make, offered
from .pulsing import pulsing
from .replicas import wrong_in
from .served import ServedNode, read_again

# -- scans that race with events


class RacingTable(PeerSlotTable):
    """A table whose engine goes on working while it is scanned."""

    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)

    def scan(self, first: int = 0, stop: int | None = None) -> bytes:
        type(self).before()
        found = super().scan(first, stop)
        type(self).after()
        return found


@pytest.fixture
def racing(served: ServedNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setattr("kvshm._node.segment_server.PeerSlotTable", RacingTable)
    peers = Peers(served.namespace, "racer", OWN_EPOCH, served.segments)
    monkeypatch.setattr(RacingTable, "before", RacingTable.before)
    monkeypatch.setattr(RacingTable, "after", RacingTable.after)
    yield peers
    assert wrong_in(peers.replica) == []
    peers.close()


def test_a_retract_that_follows_a_scan_counts(racing: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    on_its_way: list[bytes] = []
    RacingTable.after = staticmethod(lambda: on_its_way.append(a.reuse(1)))
    racing.joined(a.info)
    assert offered(racing, 1) == [(1, 1, 0)], "seen READY, not yet heard otherwise"
    for event in on_its_way:
        racing.apply_events([(1, event)])
    assert offered(racing, 1) == []


def test_what_the_scan_saw_may_be_heard_again(racing: Peers, exporter: Make) -> None:
    a = exporter()
    on_its_way: list[bytes] = []
    RacingTable.before = staticmethod(lambda: on_its_way.append(a.publish(1)))
    racing.joined(a.info)
    for event in on_its_way:
        racing.apply_events([(1, event)])
    assert offered(racing, 1) == [(1, 1, 0)]
    assert racing.replica.count == 1


def test_a_publish_heard_after_the_scan_passed_its_slot_stays(
    racing: Peers, exporter: Make
) -> None:
    a = exporter()
    racing.joined(a.info)
    RacingTable.after = staticmethod(lambda: racing.apply_events([(1, a.publish(1))]))
    racing.rescan(1)
    assert offered(racing, 1) == [(1, 1, 0)]


def test_a_forget_during_a_scan_holds(racing: Peers, exporter: Make) -> None:
    """The scheduler finds a lease impossible while the client's thread scans."""
    a = exporter()
    event = a.publish(1)
    racing.joined(a.info)
    RacingTable.after = staticmethod(lambda: racing.forget(1, event))
    racing.rescan(1)
    assert offered(racing, 1) == []


def test_a_reuse_during_a_scan_leaves_the_newest(racing: Peers, exporter: Make) -> None:
    a = exporter()
    first = a.publish(1)
    racing.joined(a.info)
    events: list[bytes] = []

    def reuse() -> None:
        events.extend([a.reuse(1), a.publish(9, shift=-8)])

    RacingTable.before = staticmethod(reuse)
    racing.rescan(1)
    assert (offered(racing, 1), offered(racing, 9)) == ([], [(1, 1, 1)])
    for event in [first, *events]:
        racing.apply_events([(1, event)])
    assert (offered(racing, 1), offered(racing, 9)) == ([], [(1, 1, 1)])


def test_a_table_is_scanned_in_parts_as_it_is_as_a_whole(
    peers: Peers, exporter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvshm._node.peers.SCANNED_AT_ONCE", 3)
    a = exporter()
    a.publish(20)
    assert (a.table.scan(0, 20), a.table.scan(21)) == (b"", b""), "of that part only"
    assert block_ids(a.table.scan(20, 21)) == block_ids(a.table.scan(3)) == [20]
    a.reuse(20)
    a.publish(*range(8))
    peers.joined(a.info)
    assert [n for n in range(9) if offered(peers, n)] == [*range(8)]
    a.reuse(0, 2, 3, 7)
    a.publish(3, 8)
    peers.rescan(1)
    found = {n: offered(peers, n) for n in range(9) if offered(peers, n)}
    assert found == {n: [(1, n, int(n == 3))] for n in (1, 3, 4, 5, 6, 8)}


def test_a_rescan_sweeps_what_lost_retracts_left(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.joined(a.info)
    peers.apply_events([(1, a.publish(1, 2, 3))])
    a.reuse(1, 3)
    peers.rescan(1)
    assert [offered(peers, n) for n in (1, 2, 3)] == [[], [(1, 2, 0)], []]
    peers.rescan(99)


# -- stale hints and failing peers


def test_after_a_lost_retract_the_next_owner_is_offered(peers: Peers, exporter: Make) -> None:
    a, b = exporter("a"), exporter("b")
    for one in (a, b):
        peers.joined(one.info)
        peers.apply_events([(one.info.epoch, one.publish(1))])
    [run] = peers.lookup(HASHES, 1, 2)
    stale = a if run.peer.info.epoch == 1 else b
    stale.reuse(1)
    assert run.peer.table.lease(3, run.records)[0] == 0
    peers.forget(run.peer.info.epoch, run.records)
    [second] = peers.lookup(HASHES, 1, 2)
    assert second.peer is not run.peer
    assert second.peer.table.lease(3, second.records)[0] == 1
    assert second.peer.table.release(3, second.records) == 1


def test_forgetting_a_peer_that_has_gone_hits_no_one(peers: Peers, exporter: Make) -> None:
    a, b = exporter("a"), exporter("b")
    records = a.publish(1)
    peers.joined(a.info)
    peers.gone(1)
    b.publish(1)
    peers.joined(b.info)
    peers.forget(1, records)
    assert offered(peers, 1) == [(2, 1, 0)]


def test_suspected_means_do_not_use_but_keep(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.joined(a.info)
    peers.suspected(1)
    peers.apply_events([(1, a.publish(1))])
    assert offered(peers, 1) == []
    assert peers.stats().usable == 0
    peers.recovered(1)
    assert offered(peers, 1) == [(1, 1, 0)]
    assert peers.stats().usable == 1
    peers.suspected(99)


def test_other_processes_see_suspected_engines(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    reader = read_again(peers.replica)
    assert len(reader.lookup(HASHES, 1, 2)) == 1
    peers.suspected(1)
    assert reader.lookup(HASHES, 1, 2) == []
    reader.close()


def test_three_failures_in_a_row_mean_quarantine(
    peers: Peers, exporter: Make, clock: Clock
) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1, 3)
    b.publish(1, 2)
    peers.joined(a.info)
    peers.joined(b.info)
    assert not peers.load_failed(1)
    assert not peers.load_failed(1)
    peers.load_succeeded(1)
    assert not peers.load_failed(1)
    assert not peers.load_failed(1)
    assert peers.stats().usable == 2
    assert peers.load_failed(1)
    assert peers.stats().usable == 1
    assert peers.why_missed(HASHES, 3) is MISS_QUARANTINED
    assert offered(peers, 1) == [(2, 1, 0)], "the other owner is offered meanwhile"
    clock.now += TIMING.quarantine_seconds - 0.001
    assert peers.stats().usable == 1
    clock.now += 0.002
    assert peers.stats().usable == 2
    peers.load_failed(1)
    assert peers.stats().usable == 2, "it takes three again"
    peers.load_failed(99)
    peers.load_succeeded(99)


def test_a_retired_table_is_not_offered(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    a.table.retire()
    assert offered(peers, 1) == []
    assert peers.stats().usable == 0


def test_an_engine_that_only_imports_is_watched_but_not_asked(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    info = EngineInfo(**{**{f: getattr(a.info, f) for f in a.info.__struct_fields__},
                         "imports_only": True})  # fmt: skip
    peers.joined(info)
    assert offered(peers, 1) == []
    assert peers.stats().usable == 0
    assert peers.tables_by_bit()[1].epoch == a.info.epoch


def test_a_miss_has_a_reason(peers: Peers, exporter: Make) -> None:
    assert peers.why_missed(HASHES, 1) is MISS_NO_PEER
    peers.num_incompatible = 1
    assert peers.why_missed(HASHES, 1) is MISS_FINGERPRINT
    a = exporter()
    peers.joined(a.info)
    assert peers.why_missed(HASHES, 1) is MISS_NO_OWNER
    peers.suspected(1)
    assert peers.why_missed(HASHES, 1) is MISS_FINGERPRINT


def test_nothing_is_planned_from_a_peer_that_is_being_attached(
    peers: Peers, exporter: Make, clock: Clock
) -> None:
    """Else each match would lease, wait and fail again."""
    a, b = exporter("a"), exporter("b")
    for one in (a, b):
        peers.joined(one.info)
    peers.apply_events([(1, a.publish(1))])
    peers.rank_not_attached(1)
    assert offered(peers, 1) == []
    peers.apply_events([(2, b.publish(1))])
    assert offered(peers, 1) == [(2, 1, 0)]
    peers.ranks_attached({1})
    assert len(peers.lookup(HASHES, 1, 2)) == 1
    assert peers.stats().usable == 2
    peers.rank_not_attached(1)
    peers.rank_not_attached(99)
    clock.now += TIMING.attach_pause_seconds + 0.001
    assert peers.stats().usable == 2


def test_an_attached_peer_stays_in_quarantine(peers: Peers, exporter: Make, clock: Clock) -> None:
    a = exporter()
    peers.joined(a.info)
    for _ in range(QUARANTINE_FAILURES):
        peers.load_failed(1)
    peers.rank_not_attached(1)
    peers.ranks_attached({1})
    clock.now += TIMING.attach_pause_seconds + 0.001
    assert peers.stats().usable == 0
    clock.now += TIMING.quarantine_seconds
    assert peers.stats().usable == 1


# -- engines that die while no one tells


@pytest.mark.multiprocess
@pytest.mark.parametrize("who", ["engine", "rank"])
def test_a_dead_engine_is_offered_no_more_and_comes_back_as_another(
    peers: Peers, exporter: Make, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = exporter("a"), exporter("b")
    with pulsing(a.table, 0 if who == "rank" else None):
        a.publish(1)
        peers.joined(a.info)
        peers.look_for_deaths()
        assert offered(peers, 1) == [(1, 1, 0)]
    peers.look_for_deaths()
    assert offered(peers, 1) == []
    peers.recovered(1)
    peers.look_for_deaths()
    assert offered(peers, 1) == []
    assert caplog.text.count("has died") == 1
    peers.gone(1)
    b.publish(1)
    peers.joined(b.info)
    peers.look_for_deaths()
    assert offered(peers, 1) == [(2, 1, 0)]


@pytest.mark.multiprocess
def test_an_epoch_that_ends_in_order_is_offered_no_more_and_called_no_death(
    peers: Peers, exporter: Make, caplog: pytest.LogCaptureFixture
) -> None:
    a = exporter()
    a.publish(1)
    with pulsing(a.table):
        peers.joined(a.info)
        a.table.retire()
    peers.look_for_deaths()
    assert peers._peers[a.info.epoch].dead
    assert offered(peers, 1) == []
    assert "has died" not in caplog.text


def test_a_table_that_has_gone_is_skipped_and_no_one_is_warned(
    peers: Peers, exporter: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine was reset before others heard of its old epoch."""
    a = exporter()
    a.end()
    with caplog.at_level("INFO", logger="vllm.kvshm"):
        peers.joined(a.info)
    assert peers.stats() == PeersStats(0, 0)
    [said] = [record for record in caplog.records if "no such engine" in record.message]
    assert said.levelname == "INFO"


def test_what_was_forgotten_of_one_epoch_is_found_in_the_next(peers: Peers, exporter: Make) -> None:
    """The same block of the same generation, in the table of another epoch."""
    old, new = exporter("a"), exporter("b")
    records = old.publish(1)
    assert new.publish(1) == records
    peers.joined(new.info)
    row = peers._view.peers[new.info.epoch].row
    peers.replica.stale_records.append(StaleRecords(row, old.info.epoch, records))
    assert offered(peers, 1)
    peers.forget(new.info.epoch, records)
    assert not offered(peers, 1)
