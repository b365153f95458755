"""kvshm._rank.rank_half: loads that a step waits for, and those it cannot wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvshm._base.ids import Rank
from kvshm._base.syncpoints import SyncPoint
from kvshm._engine.load_plan import LoadFailure
from kvshm._rank.rank_half import RankHalf
from kvshm._shm.slot_table import PeerSlotTable
from kvshm._shm.statistics import LOADS_TOO_LATE
from kvshm.errors import CorruptSegment, MemoryInUse
from kvshm.interfaces import CopyState

from ..waiting import until
from .exporters import Clock, Make
from .played_transport import PlayedCopy, PlayedMemory, PlayedTransport
from .served import AnyTable
from .test_rank import BIT, cache, load_of, own, piece_of, reports, transport

__all__ = ["cache", "own", "transport"]


@pytest.fixture
def attached(cache: RankHalf, own: AnyTable, exporter: Make) -> Make:
    cache.open_epoch(own.epoch)

    def make():  # type: ignore[no-untyped-def]  # an Exporter
        peer = exporter()
        cache.begin_load(load_of(piece_of(peer, 1), name="attaches"))
        reports(cache, 1)
        return peer

    return make


def test_a_load_of_an_attached_peer_has_ended_when_the_call_returns(
    cache: RankHalf, attached: Make
) -> None:
    piece = piece_of(attached(), 2)
    (report,) = cache.load_at_once([load_of(piece)], 1.0)
    assert (report.load_id, report.bad) == ("load", ())
    assert cache.poll() == []  # vLLM knows nothing of it


def test_the_sync_points_of_a_load_are_reached_in_order(
    cache: RankHalf, own: AnyTable, attached: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that stops a rank at one of them would otherwise wait in vain."""
    reached: list[tuple[SyncPoint, int]] = []

    def note(point: SyncPoint) -> None:
        reached.append((point, peer.table.slot(2).leases))

    peer, ticket = attached(), own.take_ticket(1)
    assert ticket is not None
    monkeypatch.setattr("kvshm._rank.rank_load.sync_point", note)
    cache.load_at_once([load_of(piece_of(peer, 2, b"\1"), ticket=ticket)], 1.0)
    assert reached == [
        (SyncPoint.COPY_BEGINS, 1 << BIT),
        (SyncPoint.COPIED, 1 << BIT),
        (SyncPoint.RELEASED, 0),
    ]


def test_no_one_waits_for_an_attach(cache: RankHalf, own: AnyTable, exporter: Make) -> None:
    cache.open_epoch(own.epoch)
    piece = piece_of(exporter(), 2)
    (report,) = cache.load_at_once([load_of(piece)], 1000.0)
    assert report.bad == piece.targets
    assert report.failures[0].reason is LoadFailure.NOT_ATTACHED
    until(cache.attached)


def test_a_peer_that_was_let_go_is_not_attached_by_a_load_that_does_not_say_where_it_lies(
    cache: RankHalf, own: AnyTable, transport: PlayedTransport, exporter: Make
) -> None:
    """Else the attach would fail, and be remembered as the peer's failure."""
    cache.open_epoch(own.epoch)
    piece = piece_of(exporter(), 2)
    (report,) = cache.load_at_once([load_of(replace(piece, memory=()))], 1000.0)
    assert report.failures[0].reason is LoadFailure.NOT_ATTACHED
    assert transport.attaches == []
    cache.begin_load(load_of(piece))
    assert reports(cache, 1)["load"].bad == ()


@pytest.mark.parametrize("fenced", [False, True])
def test_a_copy_that_lasts_too_long_is_lost_and_harmless(
    cache: RankHalf,
    own: AnyTable,
    transport: PlayedTransport,
    attached: Make,
    clock: Clock,
    fenced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the model's stream can wait for the copy, no one else does; where it cannot, the
    caller waits until the cancelled copy has stopped.  The leases go when it has ended."""
    peer = attached()
    piece = piece_of(peer, 2, taken=b"\1")
    transport.state = CopyState.PENDING
    polls = 0

    def poll(copy: PlayedCopy) -> CopyState:
        nonlocal polls
        polls += 1
        clock.now += 1.0
        copy.fenced = fenced
        if copy.cancelled and not fenced:
            copy.state = CopyState.FAILED
        return copy.state

    monkeypatch.setattr(PlayedCopy, "poll", poll)
    ticket = own.take_ticket(1)
    assert ticket is not None
    (report,) = cache.load_at_once([load_of(piece, ticket=ticket)], 5.0)
    copy = transport.copies[-1]
    assert copy.cancelled
    assert copy.fences
    assert (copy.state is CopyState.PENDING) is fenced
    assert report.bad == piece.targets
    assert [failure.reason for failure in report.failures] == [LoadFailure.TOO_LATE]
    assert own.counters.read(LOADS_TOO_LATE) == 1
    assert report.seconds >= 5.0  # it takes longer than that
    if fenced:
        assert peer.table.slot(2).leases == 1 << BIT
        copy.state = CopyState.DONE
    until(lambda: not peer.table.slot(2).leases)
    assert cache.poll() == []


def test_who_copies_for_a_step_stops_when_its_time_is_up(
    cache: RankHalf,
    own: AnyTable,
    attached: Make,
    transport: PlayedTransport,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copies(
        memory: PlayedMemory, source: object, target: object, keep_going: Callable[[], bool]
    ) -> PlayedCopy:
        while keep_going():
            clock.now += 1.0
        return PlayedCopy(CopyState.FAILED)

    piece = piece_of(attached(), 2)
    begun = clock.now
    monkeypatch.setattr(PlayedMemory, "begin_copy", copies)
    (report,) = cache.load_at_once([load_of(piece)], 5.0)
    assert clock.now == begun + 5.0
    assert report.seconds > 0.0, "the next is expected to take as long at least"
    assert report.bad == piece.targets
    assert [failure.reason for failure in report.failures] == [LoadFailure.TOO_LATE]
    assert own.counters.read(LOADS_TOO_LATE) == 1


def test_a_load_none_of_whose_copies_got_a_turn_says_nothing_of_how_long_it_takes(
    cache: RankHalf, attached: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a copy is expected to take the microseconds in which it was found to be late."""
    peer = attached()
    loads = [load_of(piece_of(peer, n), name=name) for n, name in ((2, "first"), (3, "second"))]

    def copies(
        memory: PlayedMemory, source: object, target: object, keep_going: Callable[[], bool]
    ) -> PlayedCopy:
        clock.now += 3.0
        return PlayedCopy(CopyState.DONE if keep_going() else CopyState.FAILED)

    def read() -> float:
        clock.now += 0.001
        return clock.now

    monkeypatch.setattr(PlayedMemory, "begin_copy", copies)
    cache._clock = read
    first, second = cache.load_at_once(loads, 2.0)
    assert first.seconds > 2.0, "it had a turn, and takes longer"
    assert (second.load_id, second.seconds) == ("second", 0.0)
    for report in (first, second):
        assert [failure.reason for failure in report.failures] == [LoadFailure.TOO_LATE]


def test_a_step_goes_on_only_when_the_cancelled_copy_writes_no_more(
    cache: RankHalf,
    attached: Make,
    transport: PlayedTransport,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that is in the middle of a block ends a while after it was told to."""
    piece = piece_of(attached(), 2)
    transport.state, step, polls = CopyState.PENDING, threading.current_thread(), 10

    def poll(copy: PlayedCopy) -> CopyState:
        nonlocal polls
        if threading.current_thread() is step:
            clock.now += 1.0
            polls -= copy.cancelled
            if not polls:
                copy.state = CopyState.FAILED
        return copy.state

    monkeypatch.setattr(PlayedCopy, "poll", poll)
    cache.load_at_once([load_of(piece)], 5.0)
    copy = transport.copies[-1]
    still_writes, copy.state = copy.state is CopyState.PENDING, CopyState.FAILED
    assert copy.cancelled
    assert not still_writes


def test_a_rank_does_not_wait_for_ever_for_a_copy_that_cannot_be_stopped(
    cache: RankHalf,
    own: AnyTable,
    attached: Make,
    transport: PlayedTransport,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may write over what the model computes: the rank ends, and others read nothing of it."""
    piece = piece_of(attached(), 2)
    transport.state = CopyState.PENDING

    def poll(copy: PlayedCopy) -> CopyState:
        clock.now += 1.0
        if copy.cancelled and copy is transport.copies[-1]:
            raise RuntimeError("the device is gone")
        return copy.state

    monkeypatch.setattr(PlayedCopy, "poll", poll)
    with pytest.raises(MemoryInUse, match="may still write"):
        cache.load_at_once([load_of(piece)], 5.0)
    assert own.life(Rank(0)) == 0


def test_a_process_that_was_stopped_has_not_waited(
    cache: RankHalf,
    attached: Make,
    transport: PlayedTransport,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piece = piece_of(attached(), 2)
    transport.state, polls = CopyState.PENDING, 0

    def poll(copy: PlayedCopy) -> CopyState:
        nonlocal polls
        if copy is transport.copies[-1] and copy.cancelled:
            polls += 1
            clock.now += 1000.0
            if polls > 20:
                copy.state = CopyState.FAILED
        else:
            clock.now += 1.0
        return copy.state

    monkeypatch.setattr(PlayedCopy, "poll", poll)
    (report,) = cache.load_at_once([load_of(piece)], 5.0)
    assert report.bad == piece.targets


def test_a_peer_is_not_unmapped_while_a_step_waits_for_it(
    cache: RankHalf, transport: PlayedTransport, attached: Make
) -> None:
    peer = attached()
    epoch = peer.info.epoch
    with cache._attachments.pinned([epoch]):
        peer.table.end_life(Rank(0))
        cache._attachments.unmap_ended(())
        assert not transport.memories[epoch].closed
    cache._attachments.unmap_ended(())
    assert transport.memories[epoch].closed


def test_asked_to_linger_poll_waits_for_what_is_under_way(cache: RankHalf, attached: Make) -> None:
    cache.begin_load(load_of(piece_of(attached(), 2)))
    cache._clock = lambda: 0.0  # however long it takes
    assert [report.load_id for report in cache.poll(1.0)] == ["load"]


@pytest.mark.parametrize("second_is_awaited", [False, True])
def test_a_load_behind_anothers_copies_says_nothing_of_how_long_it_takes(
    cache: RankHalf,
    attached: Make,
    transport: PlayedTransport,
    clock: Clock,
    second_is_awaited: bool,
) -> None:
    """A rank makes one copy after the other: what the second waits for the first is not its own."""
    began = time.time()
    peer = attached()
    pieces = [piece_of(peer, block) for block in (2, 3, 4)]
    transport.state = CopyState.PENDING
    cache.begin_load(load_of(pieces[0], name="first"))
    until(lambda: len(transport.copies) == 2)
    found = {}
    if second_is_awaited:
        transport.state = CopyState.DONE
        found["second"] = cache.load_at_once([load_of(pieces[1], name="second")], 1.0)[0]
    else:
        cache.begin_load(load_of(pieces[1], name="second"))
        until(lambda: len(transport.copies) == 3)
    clock.now += 5.0
    for copy in transport.copies:
        copy.state = CopyState.DONE
    found |= reports(cache, 2 - second_is_awaited)
    assert found["first"].seconds == 5.0
    times = found["first"].times
    assert times is not None
    assert times == pytest.approx((times.checked - 5.0, times.checked, times.checked), abs=1e-6)
    assert began <= times.checked <= time.time(), "of the wall clock, whatever the own one says"
    assert found["second"].seconds == 0.0
    transport.state = CopyState.PENDING
    cache.begin_load(load_of(pieces[2], name="third"))
    until(lambda: len(transport.copies) == 4)
    clock.now += 3.0
    transport.copies[-1].state = CopyState.DONE
    assert reports(cache, 1)["third"].seconds == 3.0


def test_the_load_thread_unmaps_no_one_of_a_load_that_a_step_waits_for(
    cache: RankHalf, attached: Make, transport: PlayedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = attached()
    piece = piece_of(peer, 2)
    memory = transport.memories[peer.info.epoch]
    unmapped: list[bool] = []

    def copies(*given: object) -> PlayedCopy:
        peer.table.end_life(Rank(0))
        cache._attachments.unmap_ended(())
        unmapped.append(memory.closed)
        return PlayedCopy(CopyState.DONE)

    monkeypatch.setattr(PlayedMemory, "begin_copy", copies)
    cache.load_at_once([load_of(piece)], 1.0)
    assert unmapped == [False]


def test_nothing_is_delivered_if_the_own_epoch_ended_during_the_copy(
    cache: RankHalf, attached: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = piece_of(attached(), 2)

    def copies(*given: object) -> PlayedCopy:
        cache.end_epoch()
        return PlayedCopy(CopyState.DONE)

    monkeypatch.setattr(PlayedMemory, "begin_copy", copies)
    (report,) = cache.load_at_once([load_of(piece)], 1.0)
    assert report.bad == piece.targets
    assert [failure.reason for failure in report.failures] == [LoadFailure.OWN_RESET]


def test_all_copies_of_a_load_are_stopped_at_once(
    cache: RankHalf,
    attached: Make,
    transport: PlayedTransport,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step would wait for each of them else, one after the other."""
    pieces = piece_of(attached(), 2), piece_of(attached(), 3)
    transport.state, step = CopyState.PENDING, threading.current_thread()
    stopping: list[list[bool]] = []

    def poll(copy: PlayedCopy) -> CopyState:
        if threading.current_thread() is step:
            clock.now += 1.0
        if copy.cancelled:
            stopping.append([each.cancelled for each in transport.copies[-2:]])
            copy.state = CopyState.FAILED if len(stopping) > 4 else CopyState.PENDING
        return copy.state

    monkeypatch.setattr(PlayedCopy, "poll", poll)
    cache.load_at_once([load_of(*pieces)], 5.0)
    assert stopping[1] == [True, True]
    for copy in transport.copies:
        copy.state = CopyState.FAILED


def test_a_load_that_cannot_be_checked_is_its_peers_fault(
    cache: RankHalf, attached: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that one would be asked again and again, and what it took be learnt."""

    def recheck(*_: object) -> list[bool]:
        raise CorruptSegment("not what it was")

    peer = attached()
    monkeypatch.setattr(PeerSlotTable, "recheck", recheck)
    (report,) = cache.load_at_once([load_of(piece := piece_of(peer, 2))], 1.0)
    assert report.bad == piece.targets
    assert [(f.peer_epoch, f.reason) for f in report.failures] == [
        (piece.peer_epoch, LoadFailure.COPY_FAILED)
    ]
