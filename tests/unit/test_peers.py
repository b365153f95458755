"""kvshm._node.peers: engines that join, send events, cannot be used and go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvshm._node.peers import Peers, PeersStats
from kvshm._node.protocol import EngineInfo
from kvshm._replica import index
from kvshm._shm.layout import (
    NUM_ROWS,
    BlockRecord,
    pack_records,
    unpack_records,
)
from kvshm._shm.statistics import MISS_NO_OWNER

from .exporters import (
    HASHES,
    NUM_BLOCKS,
    OWN_EPOCH,
    Clock,
    Exporter,
    Make,
    break_version,
    mend_version,
    offered,
)
from .replicas import wrong_in
from .served import ServedNode

# -- joining


def test_who_joins_late_finds_what_is_there(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(0, 1, 2)
    peers.joined(a.info)
    [run] = peers.lookup(HASHES, 0, 10)
    assert run.peer.info == a.info
    assert [r.block_id for r in unpack_records(run.records)] == [0, 1, 2]


def test_an_engine_that_joins_is_scanned(peers: Peers, exporter: Make) -> None:
    a, b = exporter("a"), exporter("b")
    peers.joined(b.info)
    a.publish(4)
    peers.joined(a.info)
    assert offered(peers, 4) == [(1, 4, 0)]


def test_the_own_epoch_is_no_peer(peers: Peers, served: ServedNode) -> None:
    own = Exporter(served, OWN_EPOCH, "me")
    own.publish(1)
    peers.joined(own.info)
    assert offered(peers, 1) == []
    assert peers.stats() == PeersStats(0, 0)


def test_who_has_gone_is_dropped(peers: Peers, exporter: Make) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    b.publish(2)
    peers.joined(a.info)
    peers.joined(b.info)
    assert peers.gone(a.info.epoch) == a.info.log_name
    assert peers.gone(a.info.epoch) == f"(epoch {a.info.epoch:016x})"
    assert (offered(peers, 1), offered(peers, 2)) == ([], [(2, 2, 0)])
    assert peers.stats().attached == 1


def test_joining_again_repairs_what_was_missed(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    a.reuse(1)
    a.publish(2)
    peers.joined(a.info)
    assert peers.scan_queue.scan_due(peers.rescan, lambda: False) == 1
    assert (offered(peers, 1), offered(peers, 2)) == ([], [(1, 2, 0)])


def test_a_changed_entry_of_the_roster_is_taken_over(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    changed = EngineInfo(**{**{f: getattr(a.info, f) for f in a.info.__struct_fields__},
                            "lease_bit": 27})  # fmt: skip
    peers.joined(changed)
    assert list(peers.tables_by_bit()) == [27]
    assert offered(peers, 1) == [(1, 1, 0)]


# -- events


def test_events_are_followed(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.joined(a.info)
    peers.apply_events([(1, a.publish(1, 2))])
    assert offered(peers, 1) == [(1, 1, 0)]
    peers.apply_events([(1, a.reuse(1))])
    assert offered(peers, 1) == []
    peers.apply_events([(1, a.publish(5, shift=-4))])
    assert offered(peers, 5) == [(1, 1, 1)]


def test_events_of_an_unknown_epoch_are_dropped(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.apply_events([(1, a.publish(1))])
    peers.apply_events([(77, a.publish(2))])
    assert (offered(peers, 1), offered(peers, 2)) == ([], [])


def test_events_after_the_end_of_an_epoch_do_not_resurrect_it(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.joined(a.info)
    late = a.publish(1)
    peers.gone(1)
    peers.apply_events([(1, late)])
    assert offered(peers, 1) == []
    assert peers.stats().attached == 0


def test_senseless_events_are_dropped_and_the_truth_is_scanned(
    peers: Peers, exporter: Make, caplog: pytest.LogCaptureFixture
) -> None:
    a = exporter()
    peers.joined(a.info)
    a.publish(3)
    beyond = pack_records([BlockRecord(HASHES[0], NUM_BLOCKS, 1, 0)])
    for _ in range(3):
        peers.apply_events([(1, beyond)])
    peers.apply_events([(1, beyond[:-1])])
    assert peers.scan_queue.scan_due(peers.rescan, lambda: False) == 1
    assert offered(peers, 3) == [(1, 3, 0)]
    assert caplog.text.count("make no sense") == 1


def test_an_engine_that_restarts_in_its_place_is_another_one(peers: Peers, exporter: Make) -> None:
    """Same name, generations from the start, and the old one's events still on their way."""
    old = exporter("a")
    peers.joined(old.info)
    for _ in range(5):
        peers.apply_events([(1, old.publish(1))])
        peers.apply_events([(1, old.reuse(1))])
    last = old.publish(1)
    new = exporter("a")
    peers.joined(new.info)
    peers.apply_events([(2, new.publish(1))])
    peers.gone(1)
    peers.apply_events([(1, last)])
    assert offered(peers, 1) == [(2, 1, 0)]
    peers.gone(1)
    assert offered(peers, 1) == [(2, 1, 0)]


# -- engines that cannot be used


def test_a_table_that_cannot_be_opened_is_skipped_and_tried_again(
    peers: Peers, exporter: Make, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    b.publish(2)
    break_version(a)
    for _ in range(2):
        peers.joined(a.info)
        peers.joined(b.info)
    assert (offered(peers, 1), offered(peers, 2)) == ([], [(2, 2, 0)])
    assert peers.stats().attached == 1
    [said] = [r for r in caplog.records if "left out" in r.message]
    assert said.name == "vllm.kvshm._node.peers"
    assert "layout 99" in said.message
    mend_version(a)
    peers.joined(a.info)
    assert offered(peers, 1) == [(1, 1, 0)]


@pytest.mark.parametrize(
    "wrong", [{"epoch": 9}, {"num_blocks": 63}, {"fingerprint": bytes(32)}, {"ranks": []}]
)
def test_a_table_that_is_not_the_rosters_is_skipped(
    peers: Peers, exporter: Make, wrong: dict[str, object]
) -> None:
    a = exporter()
    a.publish(1)
    fields = {f: getattr(a.info, f) for f in a.info.__struct_fields__}
    peers.joined(EngineInfo(**{**fields, **wrong}))
    assert peers.stats() == PeersStats(0, 0)
    assert offered(peers, 1) == []


def test_a_table_that_breaks_later_drops_its_peer(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    break_version(a)
    peers.rescan(1)
    assert peers.stats().attached == 0
    assert offered(peers, 1) == []
    mend_version(a)


def test_engines_beyond_the_rows_are_left_out(
    peers: Peers, exporter: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [exporter(f"e{n}") for n in range(NUM_ROWS + 1)]
    for engine in 2 * engines:
        peers.joined(engine.info)
    assert peers.stats().attached == NUM_ROWS
    assert caplog.text.count("64 rows") == 1
    engines[-1].publish(1)
    peers.gone(engines[0].info.epoch)
    peers.joined(engines[-1].info)
    assert offered(peers, 1) == [(NUM_ROWS + 1, 1, 0)], "once there is a row it is attached"


# -- lifetimes


def test_a_plan_keeps_its_peers_table_mapped(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    [run] = peers.lookup(HASHES, 1, 2)
    a.end()
    peers.gone(1)
    assert run.peer.table.lease(2, run.records)[0] == 1
    table = weakref.ref(run.peer.table)
    del run
    assert table() is None, "and nobody else does"


def test_closed_peers_answer_nothing_and_raise_nothing(peers: Peers, exporter: Make) -> None:
    a = exporter()
    event = a.publish(1)
    peers.joined(a.info)
    [run] = peers.lookup(HASHES, 1, 2)
    peers.close()
    peers.close()
    assert peers.replica._segment.closed
    peers.joined(a.info)
    peers.apply_events([(1, event)])
    peers.rescan(1)
    peers.forget(1, event)
    peers.load_failed(1)
    peers.gone(1)
    assert (peers.lookup(HASHES, 0, 9), peers.tables_by_bit()) == ([], {})
    assert peers.stats() == PeersStats(0, 0)
    assert run.peer.table.epoch == 1


def test_repr_counts(peers: Peers, exporter: Make) -> None:
    peers.joined(exporter().info)
    peers.suspected(1)
    assert repr(peers) == "<Peers [1 attached, 0 usable]>"


@contextmanager
def growing(peers: Peers, writer: Exporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While the client's thread enlarges the replica for what the writer has published."""
    began, go_on = threading.Event(), threading.Event()
    make = index._new_segment

    def slowly(*arguments: Any) -> Any:
        began.set()
        assert go_on.wait(100)
        return make(*arguments)

    monkeypatch.setattr(index, "_new_segment", slowly)
    client = threading.Thread(target=peers.rescan, args=(writer.info.epoch,))
    client.start()
    try:
        assert began.wait(100)
        yield
    finally:
        go_on.set()
        client.join()


@pytest.fixture
def small(served: ServedNode, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    monkeypatch.setattr("kvshm._node.peers.INITIAL_CAPACITY", 8)
    peers = Peers(served.namespace, "me", OWN_EPOCH, served.segments, clock=clock)
    yield peers
    peers.close()


def test_the_schedulers_thread_waits_for_no_scan_and_no_growth(
    small: Peers, exporter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, large = exporter("a"), exporter("b"), exporter("large")
    for peer in (a, b, large):
        small.joined(peer.info)
    stale = a.publish(1)
    small.apply_events([(1, stale)])
    small.apply_events([(2, b.publish(1, shift=3))])
    large.publish(*range(2, 20))
    with growing(small, large, monkeypatch):
        [run] = small.lookup(HASHES, 1, 2)
        assert run.peer.info == a.info
        small.forget(1, stale)
        [run] = small.lookup(HASHES, 1, 2)
        assert run.peer.info == b.info, "at once, although the replica still has it"
        small.forget(2, run.records)
        assert small.lookup(HASHES, 1, 2) == []
        assert small.why_missed(HASHES, 1) is MISS_NO_OWNER
        small.load_succeeded(1)
        assert not small.load_failed(1)
        assert (small.stats().usable, len(small.tables_by_bit())) == (3, 3)
        assert len(small.replica.stale_records) == 2
    assert not small.replica.stale_records, "the client's thread has done it"
    assert small.lookup(HASHES, 1, 2) == []
    assert offered(small, 2) == [(3, 2, 0)]
    assert wrong_in(small.replica) == []


def test_an_end_does_not_wait_for_a_growth_and_leaves_nothing(
    small: Peers, exporter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = exporter("large")
    small.joined(large.info)
    large.publish(*range(20))
    with growing(small, large, monkeypatch):
        small.close()
        assert small.lookup(HASHES, 1, 2) == []
        small.forget(1, large.reuse(1))
    assert small.replica._segment.closed


def test_lookups_beside_the_clients_thread(peers: Peers, exporter: Make) -> None:
    """The scheduler asks and forgets while peers come, go, grow and are scanned."""
    steady, coming = exporter("a"), exporter("b")
    steady.publish(*range(20))
    coming.publish(*range(20, 60))
    peers.joined(steady.info)
    failures: list[BaseException] = []
    done = threading.Event()

    def client() -> None:
        try:
            for turn in range(150):
                peers.joined(coming.info)
                event = coming.reuse(20 + turn % 40)
                peers.apply_events([(2, event)])
                peers.apply_events([(2, coming.publish(20 + turn % 40))])
                peers.suspected(2)
                peers.rescan(1)
                peers.gone(2)
        except BaseException as exc:
            failures.append(exc)
        finally:
            done.set()

    thread = threading.Thread(target=client)
    thread.start()
    lookups = 0
    while not done.is_set() or not lookups:
        runs = peers.lookup(HASHES, 0, 60)
        found = [r for run in runs for r in unpack_records(run.records)]
        assert [r.block_hash for r in found] == HASHES[: len(found)]
        for run in runs:
            if run.peer.info.epoch == 2:
                peers.forget(2, run.records)
        lookups += 1
    thread.join()
    assert failures == []
    assert len(peers.lookup(HASHES, 0, 20)) == 1
