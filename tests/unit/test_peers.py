"""kvshm.peers: what one engine knows of the others, over real slot tables."""

from __future__ import annotations

import hashlib
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from kvshm import segment as segments
from kvshm.index import Replica
from kvshm.peers import QUARANTINE_SECONDS, Peers, PeersStats
from kvshm.protocol import EngineInfo, RankInfo
from kvshm.records import (
    NUM_ROWS,
    VERSION_OFFSET,
    BlockRecord,
    pack_records,
    unpack_records,
)
from kvshm.slots import SlotTable, TableSpec

OWN_EPOCH = 0xFFFF
FINGERPRINT = bytes(range(32))
NUM_BLOCKS = 64
HASHES = [hashlib.sha256(bytes([n])).digest() for n in range(200)]


class Exporter:
    """Another engine, as far as this one can see it: a slot table and its events."""

    def __init__(self, namespace: str, epoch: int, name: str = "a", ranks: int = 1) -> None:
        spec = TableSpec(namespace, name, NUM_BLOCKS, 16, ranks, FINGERPRINT)
        self.table = SlotTable.create(spec, epoch, segments.identity_of())
        for rank in range(ranks):
            self.table.set_life(rank)
        self.info = EngineInfo(
            epoch=epoch,
            name=name,
            pid=1000 + epoch,
            start_time=1,
            fingerprint=FINGERPRINT,
            fields={},
            table=self.table.name,
            num_blocks=NUM_BLOCKS,
            ranks=[RankInfo(pid=1, start_time=1, memory=None)] * ranks,
            lease_bit=epoch % 28,
        )

    def publish(self, *contents: int, shift: int = 0) -> bytes:
        """Block ``n + shift`` gets content ``n``; returns the event."""
        records = [BlockRecord(HASHES[n], n + shift, 0, n) for n in contents]
        return self.table.publish(pack_records(records), bytes(8 * len(contents)))

    def reuse(self, *blocks: int) -> bytes:
        """Retract; returns the event."""
        return self.table.retract(list(blocks))[0]

    def end(self) -> None:
        self.table.unlink()
        self.table.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def namespace() -> Iterator[str]:
    name = "t" + uuid.uuid4().hex[:10]
    yield name
    left = segments.list_segments(name)
    for leftover in left:
        segments.unlink(str(leftover))
    assert left == []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(namespace: str, clock: Clock) -> Iterator[Peers]:
    peers = Peers(namespace, "me", OWN_EPOCH, clock=clock)
    yield peers
    if not peers._closed:
        assert peers._replica.check_integrity() == []
    peers.close()


@pytest.fixture
def exporter(namespace: str) -> Iterator[Callable[..., Exporter]]:
    made: list[Exporter] = []
    epochs = count(1)

    def make(name: str = "a", **more: int) -> Exporter:
        made.append(Exporter(namespace, next(epochs), name, **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


Make = Callable[..., Exporter]


def offered(peers: Peers, content: int) -> list[tuple[int, int, int]]:
    """(epoch, block, generation) that a lookup of one block names."""
    return [
        (run.peer.info.epoch, r.block_id, r.generation)
        for run in peers.lookup(HASHES, content, content + 1)
        for r in unpack_records(run.records)
    ]


# -- joining


def test_who_joins_late_finds_what_is_there(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(0, 1, 2)
    peers.reset_roster([a.info])
    [run] = peers.lookup(HASHES, 0, 10)
    assert run.peer.info == a.info
    assert [r.block_id for r in unpack_records(run.records)] == [0, 1, 2]


def test_an_engine_that_joins_is_scanned(peers: Peers, exporter: Make) -> None:
    peers.reset_roster([])
    a = exporter()
    a.publish(4)
    peers.joined(a.info)
    assert offered(peers, 4) == [(1, 4, 0)]


def test_the_own_epoch_is_no_peer(peers: Peers, exporter: Make, namespace: str) -> None:
    own = Exporter(namespace, OWN_EPOCH, "me")
    own.publish(1)
    peers.reset_roster([own.info])
    peers.joined(own.info)
    assert offered(peers, 1) == []
    assert peers.stats() == PeersStats(0, 0, 0, 0, 0)
    own.end()


def test_who_is_not_in_the_roster_any_more_is_dropped(peers: Peers, exporter: Make) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    b.publish(2)
    peers.reset_roster([a.info, b.info])
    peers.reset_roster([b.info])
    assert (offered(peers, 1), offered(peers, 2)) == ([], [(2, 2, 0)])
    assert peers.stats().attached == 1


def test_a_roster_repairs_what_was_missed(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.reset_roster([a.info])
    a.reuse(1)
    a.publish(2)
    peers.reset_roster([a.info])
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
    peers.events(1, a.publish(1, 2))
    assert offered(peers, 1) == [(1, 1, 0)]
    peers.events(1, a.reuse(1))
    assert offered(peers, 1) == []
    peers.events(1, a.publish(5, shift=-4))
    assert offered(peers, 5) == [(1, 1, 1)]


def test_a_replayed_publish_does_not_resurrect(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.joined(a.info)
    published = a.publish(1)
    peers.events(1, published)
    peers.events(1, a.reuse(1))
    peers.events(1, published)
    assert offered(peers, 1) == []


def test_events_of_an_unknown_epoch_are_dropped(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.events(1, a.publish(1))
    peers.events(77, a.publish(2))
    assert (offered(peers, 1), offered(peers, 2)) == ([], [])
    assert peers.stats().strange_events == 2


def test_events_after_the_end_of_an_epoch_do_not_resurrect_it(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.joined(a.info)
    late = a.publish(1)
    peers.gone(1)
    peers.events(1, late)
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
        peers.events(1, beyond)
    peers.events(1, beyond[:-1])
    assert offered(peers, 3) == [(1, 3, 0)]
    assert peers.stats().strange_events == 4
    assert caplog.text.count("make no sense") == 1


def test_an_engine_that_restarts_in_its_place_is_another_one(peers: Peers, exporter: Make) -> None:
    """Same name, generations from the start, and the old one's events still on their way."""
    old = exporter("a")
    peers.joined(old.info)
    for _ in range(5):
        peers.events(1, old.publish(1))
        peers.events(1, old.reuse(1))
    last = old.publish(1)
    new = exporter("a")
    peers.joined(new.info)
    peers.events(2, new.publish(1))
    peers.gone(1)
    peers.events(1, last)
    assert offered(peers, 1) == [(2, 1, 0)]
    peers.gone(1)
    assert offered(peers, 1) == [(2, 1, 0)]


# -- scans that race with events


class RacingTable(SlotTable):
    """A table whose engine goes on working while it is scanned."""

    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)

    def scan(self) -> bytes:
        type(self).before()
        found = super().scan()
        type(self).after()
        return found


@pytest.fixture
def racing(namespace: str, exporter: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    peers = Peers(namespace, "racer", OWN_EPOCH, open_table=RacingTable.open)
    monkeypatch.setattr(RacingTable, "before", RacingTable.before)
    monkeypatch.setattr(RacingTable, "after", RacingTable.after)
    yield peers
    assert peers._replica.check_integrity() == []
    peers.close()


def test_a_retract_that_follows_a_scan_counts(racing: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    on_its_way: list[bytes] = []
    RacingTable.after = staticmethod(lambda: on_its_way.append(a.reuse(1)))
    racing.joined(a.info)
    assert offered(racing, 1) == [(1, 1, 0)], "seen READY, not yet heard otherwise"
    for event in on_its_way:
        racing.events(1, event)
    assert offered(racing, 1) == []


def test_what_the_scan_saw_may_be_told_again(racing: Peers, exporter: Make) -> None:
    a = exporter()
    on_its_way: list[bytes] = []
    RacingTable.before = staticmethod(lambda: on_its_way.append(a.publish(1)))
    racing.joined(a.info)
    for event in on_its_way:
        racing.events(1, event)
    assert offered(racing, 1) == [(1, 1, 0)]
    assert racing._replica.count == 1


def test_a_publish_heard_after_the_scan_passed_its_slot_stays(
    racing: Peers, exporter: Make
) -> None:
    a = exporter()
    racing.joined(a.info)
    RacingTable.after = staticmethod(lambda: racing.events(1, a.publish(1)))
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
        racing.events(1, event)
    assert (offered(racing, 1), offered(racing, 9)) == ([], [(1, 1, 1)])


def test_a_rescan_sweeps_what_lost_retracts_left(peers: Peers, exporter: Make) -> None:
    a = exporter()
    peers.joined(a.info)
    peers.events(1, a.publish(1, 2, 3))
    a.reuse(1, 3)
    peers.rescan(1)
    assert [offered(peers, n) for n in (1, 2, 3)] == [[], [(1, 2, 0)], []]
    peers.rescan(99)


# -- stale hints and failing peers


def test_after_a_lost_retract_the_next_owner_is_offered(peers: Peers, exporter: Make) -> None:
    a, b = exporter("a"), exporter("b")
    for one in (a, b):
        peers.joined(one.info)
        peers.events(one.info.epoch, one.publish(1))
    [run] = peers.lookup(HASHES, 1, 2)
    stale = a if run.peer.info.epoch == 1 else b
    stale.reuse(1)
    assert run.peer.table.lease(3, run.records)[0] == 0
    peers.forget(run.peer.info.epoch, run.records)
    [second] = peers.lookup(HASHES, 1, 2)
    assert second.peer is not run.peer
    assert second.peer.table.lease(3, second.records)[0] == 1
    assert second.peer.table.release(3, second.records) == 1


def test_forgetting_a_peer_that_has_gone_hits_nobody(peers: Peers, exporter: Make) -> None:
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
    peers.events(1, a.publish(1))
    assert offered(peers, 1) == []
    assert not peers.any_usable()
    peers.recovered(1)
    assert offered(peers, 1) == [(1, 1, 0)]
    assert peers.any_usable()
    peers.suspected(99)


def test_other_processes_see_who_is_suspected(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    reader = Replica.open(peers.replica_name)
    assert len(reader.lookup(HASHES, 1, 2)) == 1
    peers.suspected(1)
    assert reader.lookup(HASHES, 1, 2) == []
    reader.close()


def test_three_failures_in_a_row_mean_quarantine(
    peers: Peers, exporter: Make, clock: Clock
) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    b.publish(1, 2)
    peers.reset_roster([a.info, b.info])
    peers.fail(1)
    peers.fail(1)
    peers.fine(1)
    peers.fail(1)
    peers.fail(1)
    assert peers.stats().usable == 2
    peers.fail(1)
    assert peers.stats().usable == 1
    assert offered(peers, 1) == [(2, 1, 0)], "the other owner is offered meanwhile"
    clock.now += QUARANTINE_SECONDS - 0.001
    assert peers.stats().usable == 1
    clock.now += 0.002
    assert peers.stats().usable == 2
    peers.fail(1)
    assert peers.stats().usable == 2, "it takes three again"
    peers.fail(99)
    peers.fine(99)


def test_a_retired_table_is_not_offered(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    a.table.retire()
    assert offered(peers, 1) == []
    assert not peers.any_usable()


def test_an_engine_that_only_imports_is_watched_but_not_asked(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.publish(1)
    info = EngineInfo(**{**{f: getattr(a.info, f) for f in a.info.__struct_fields__},
                         "imports_only": True})  # fmt: skip
    peers.joined(info)
    assert offered(peers, 1) == []
    assert not peers.any_usable()
    assert peers.tables_by_bit()[1].name == a.table.name


# -- engines that cannot be used


def break_version(a: Exporter) -> None:
    struct.pack_into("<I", a.table._segment.buffer, VERSION_OFFSET, 99)


def mend_version(a: Exporter) -> None:
    struct.pack_into("<I", a.table._segment.buffer, VERSION_OFFSET, 1)


def test_a_table_that_cannot_be_opened_is_skipped_and_tried_again(
    peers: Peers, exporter: Make, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    b.publish(2)
    break_version(a)
    peers.reset_roster([a.info, b.info])
    peers.reset_roster([a.info, b.info])
    assert (offered(peers, 1), offered(peers, 2)) == ([], [(2, 2, 0)])
    assert peers.stats().skipped == 2
    [said] = [r for r in caplog.records if "left out" in r.message]
    assert said.name == "vllm.kvshm.peers"
    assert "layout 99" in said.message
    mend_version(a)
    peers.reset_roster([a.info, b.info])
    assert offered(peers, 1) == [(1, 1, 0)]


def test_a_table_that_has_gone_is_skipped(peers: Peers, exporter: Make) -> None:
    a = exporter()
    a.table.unlink()
    peers.joined(a.info)
    assert peers.stats() == PeersStats(0, 0, 1, 0, 0)


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
    assert peers.stats() == PeersStats(0, 0, 1, 0, 0)
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
    for _ in range(2):
        peers.reset_roster([e.info for e in engines])
    assert peers.stats().attached == NUM_ROWS
    assert caplog.text.count("64 rows") == 1
    engines[-1].publish(1)
    peers.gone(engines[0].info.epoch)
    peers.reset_roster([e.info for e in engines[1:]])
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


def test_closed_peers_answer_nothing_and_raise_nothing(
    peers: Peers, exporter: Make, namespace: str
) -> None:
    a = exporter()
    event = a.publish(1)
    peers.joined(a.info)
    [run] = peers.lookup(HASHES, 1, 2)
    peers.close()
    peers.close()
    assert [s.kind for s in segments.list_segments(namespace)] == ["slots"]
    peers.reset_roster([a.info])
    peers.joined(a.info)
    peers.events(1, event)
    peers.rescan(1)
    peers.forget(1, event)
    peers.fail(1)
    peers.gone(1)
    assert (peers.lookup(HASHES, 0, 9), peers.tables_by_bit()) == ([], {})
    assert peers.stats() == PeersStats(0, 0, 0, 1, 0)
    assert run.peer.table.epoch == 1


def test_repr_counts(peers: Peers, exporter: Make) -> None:
    peers.joined(exporter().info)
    peers.suspected(1)
    assert repr(peers) == "<Peers [1 attached, 0 usable]>"


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
                peers.events(2, event)
                peers.events(2, coming.publish(20 + turn % 40))
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
