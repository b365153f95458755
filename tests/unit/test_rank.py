"""kvshm._rank.rank_half: a rank whose peers hang, end or go wrong, and whose own epoch fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from kvshm._base.ids import BlockId, Epoch, LeaseBit, Rank
from kvshm._engine.load_plan import NO_TICKET, LoadFailure, LoadOrder, LoadReport, Piece
from kvshm._rank.attachments import FAILED_SECONDS, AttachmentCache
from kvshm._rank.rank_half import RankHalf
from kvshm._rank.rank_load import RankLoad
from kvshm._shm.layout import TICKETS_OFFSET
from kvshm._shm.slot_table import PeerSlotTable
from kvshm._shm.statistics import RECHECK_FAILED
from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState

from ..waiting import until
from .exporters import FINGERPRINT, NUM_BLOCKS, Clock, Exporter, Make
from .played_transport import PlayedTransport, memory_of
from .served import AnyTable, ServedNode

OWN = Epoch(0x5000)
BIT = LeaseBit(3)


def piece_of(peer: Exporter, block: int, taken: bytes = b"\0") -> Piece:
    records = peer.publish(block)
    if any(taken):
        assert peer.table.lease(BIT, records) == (1, taken)
    memory = (memory_of(peer.info.epoch),)
    return Piece(Epoch(peer.info.epoch), memory, records, taken, (BlockId(block + 10),), 8)


def load_of(*pieces: Piece, ticket: int = NO_TICKET, name: str = "load") -> LoadOrder:
    return LoadOrder(name, OWN, ticket, BIT, pieces, ())


def reports(cache: RankHalf, number: int) -> dict[str, LoadReport]:
    found: dict[str, LoadReport] = {}

    def enough() -> bool:
        found.update((report.load_id, report) for report in cache.poll())
        return len(found) >= number

    until(enough)
    return found


@pytest.fixture
def own(served: ServedNode) -> AnyTable:
    return served.serve("own", OWN, NUM_BLOCKS, 2, FINGERPRINT).table


@pytest.fixture
def transport() -> PlayedTransport:
    return PlayedTransport()


@pytest.fixture
def cache(transport: PlayedTransport, served: ServedNode, clock: Clock) -> Iterator[RankHalf]:
    cache = RankHalf(transport, Rank(0), served.segments, clock=clock)
    yield cache
    for hung in transport.hung.values():
        hung.set()
    until(lambda: not cache._attachments._attaching)
    cache.close()
    assert not cache._thread.is_alive()
    assert all(memory.closed for memory in transport.memories.values())


@pytest.fixture
def opened(cache: RankHalf, own: AnyTable) -> RankHalf:
    cache.open_epoch(own.epoch)
    return cache


def in_use(table: AnyTable, ticket: int) -> int:
    return table._load(TICKETS_OFFSET + 8 * ticket)


# -- peers that hang or fail


def test_a_hung_peer_holds_only_its_own_loads_up(
    opened: RankHalf, transport: PlayedTransport, exporter: Make
) -> None:
    hung, fresh = exporter("hung"), exporter("fresh")
    transport.hung[hung.info.epoch] = threading.Event()
    transport.broken.add(hung.info.epoch)
    opened.begin_load(load_of(piece_of(hung, 1), name="stuck"))
    until(lambda: transport.attaches == [hung.info.epoch])
    for n in range(3):
        opened.begin_load(load_of(piece_of(fresh, n), name=f"good {n}"))
    good = reports(opened, 3)
    assert sorted(good) == ["good 0", "good 1", "good 2"]
    assert all(report.bad == () for report in good.values())
    transport.hung[hung.info.epoch].set()
    stuck = reports(opened, 1)["stuck"]
    assert stuck.bad == (11,)
    assert [failure.reason for failure in stuck.failures] == [LoadFailure.UNREACHABLE]


def test_a_load_reports_once_all_its_peers_have_been_tried(
    opened: RankHalf, transport: PlayedTransport, exporter: Make
) -> None:
    near, slow = exporter("near"), exporter("slow")
    transport.hung[slow.info.epoch] = threading.Event()
    opened.begin_load(load_of(piece_of(near, 1), piece_of(slow, 2)))
    until(lambda: len(transport.copies) == 1)
    assert opened.poll() == []
    transport.hung[slow.info.epoch].set()
    assert reports(opened, 1)["load"] == LoadReport("load", ())
    assert len(transport.copies) == 2


def test_a_failed_peer_is_not_asked_again_for_a_while(
    opened: RankHalf, transport: PlayedTransport, exporter: Make, clock: Clock
) -> None:
    peer = exporter()
    transport.broken.add(peer.info.epoch)
    for n in range(4):
        opened.begin_load(load_of(piece_of(peer, n), name=f"{n}"))
        assert reports(opened, 1)[f"{n}"].bad == (n + 10,)
    assert len(transport.attaches) == 1
    transport.broken.clear()
    clock.now += FAILED_SECONDS
    opened.begin_load(load_of(piece_of(peer, 4), name="again"))
    assert reports(opened, 1)["again"].bad == ()
    assert len(transport.attaches) == 2


def test_a_table_of_another_epoch_or_without_the_rank_is_not_attached(
    transport: PlayedTransport, served: ServedNode, exporter: Make
) -> None:
    peer = exporter()
    piece = piece_of(peer, 1)
    other = replace(piece, peer_epoch=Epoch(77))
    peer.served.path.with_name(peer.served.path.name.replace("0001", "004d")).hardlink_to(
        peer.served.path
    )
    attachments, second = (
        AttachmentCache(transport, Rank(rank), served.segments) for rank in (0, 1)
    )
    wrong = ((attachments, other, "is served here"), (second, piece, "has no rank 1"))
    for asked, wanted, why in wrong:
        assert asked.find(wanted) is None
        until(lambda asked=asked: asked._failed)  # type: ignore[misc]
        with pytest.raises(TransportError, match=why):
            asked.find(wanted)
    assert transport.attaches == []


def test_closing_waits_for_no_hung_peer(
    opened: RankHalf, transport: PlayedTransport, exporter: Make
) -> None:
    """What is attached after all is let go again: the fixture sees to that."""
    peer = exporter()
    transport.hung[peer.info.epoch] = threading.Event()
    opened.begin_load(load_of(piece_of(peer, 1)))
    until(lambda: transport.attaches)
    opened.close()
    assert not opened._thread.is_alive()
    assert reports(opened, 1)["load"].bad == (11,)


def test_nothing_is_copied_into_memory_whose_epoch_ended_meanwhile(
    opened: RankHalf, transport: PlayedTransport, exporter: Make
) -> None:
    peer = exporter()
    transport.hung[peer.info.epoch] = threading.Event()
    opened.begin_load(load_of(piece_of(peer, 1)))
    until(lambda: transport.attaches)
    opened.end_epoch()
    transport.hung[peer.info.epoch].set()
    [failure] = reports(opened, 1)["load"].failures
    assert failure.reason is LoadFailure.OWN_RESET
    assert transport.copies == []


# -- leases of a rank without a table


def leased(cache: RankHalf, own: AnyTable, exporter: Make) -> tuple[Exporter, int]:
    peer, ticket = exporter(), own.take_ticket(1)
    assert ticket is not None
    cache.begin_load(load_of(piece_of(peer, 1, b"\1"), ticket=ticket))
    return peer, ticket


def test_a_rank_with_a_table_counts_the_ticket_and_releases(
    opened: RankHalf, own: AnyTable, exporter: Make
) -> None:
    peer, ticket = leased(opened, own, exporter)
    assert reports(opened, 1)["load"].bad == ()
    assert peer.table.slot(1).leases == 0
    assert in_use(own, ticket) == 0


def test_only_the_last_rank_of_a_load_gives_its_leases_back(
    opened: RankHalf, own: AnyTable, exporter: Make
) -> None:
    peer, ticket = exporter(), own.take_ticket(2)
    assert ticket is not None
    opened.begin_load(load_of(piece := piece_of(peer, 1, b"\1"), ticket=ticket))
    assert reports(opened, 1)["load"].bad == ()
    assert peer.table.slot(1).leases == 1 << BIT, "the other rank still copies"
    opened.begin_load(load_of(piece, ticket=ticket))
    reports(opened, 1)
    assert peer.table.slot(1).leases == 0


def test_a_rank_without_a_table_gives_its_leases_back(
    cache: RankHalf, own: AnyTable, exporter: Make
) -> None:
    peer, _ = leased(cache, own, exporter)
    [failure] = reports(cache, 1)["load"].failures
    assert failure.reason is LoadFailure.OWN_RESET
    until(lambda: peer.table.slot(1).leases == 0)  # asked for on a thread of its own


def test_a_load_of_an_earlier_epoch_leaves_the_tickets_of_this_one_alone(
    cache: RankHalf, own: AnyTable, served: ServedNode, exporter: Make
) -> None:
    table = served.serve("next", OWN + 1, NUM_BLOCKS, 1, FINGERPRINT).table
    cache.open_epoch(table.epoch)
    other = table.take_ticket(1)
    peer, ticket = leased(cache, own, exporter)
    assert other == ticket
    assert reports(cache, 1)["load"].bad == (11,)
    until(lambda: peer.table.slot(1).leases == 0)  # asked for on a thread of its own
    assert in_use(table, ticket) == 1
    cache.end_epoch()


@pytest.mark.parametrize("withdraws", [False, True])
def test_only_what_a_rank_withdraws_may_be_kept_by_nobody(
    opened: RankHalf, own: AnyTable, withdraws: bool
) -> None:
    opened.withdraw() if withdraws else opened.end_epoch()
    assert not own.alive
    assert own.withdrawn == withdraws


def test_one_peer_that_has_gone_keeps_no_other_lease(
    opened: RankHalf, own: AnyTable, transport: PlayedTransport, exporter: Make
) -> None:
    gone, peer = exporter("gone"), exporter()
    ticket = own.take_ticket(1)
    assert ticket is not None
    pieces = (piece_of(gone, 1, b"\1"), piece_of(peer, 2, b"\1"))
    gone.end()
    opened.begin_load(load_of(*pieces, ticket=ticket))
    assert reports(opened, 1)["load"].bad == (11,)
    assert peer.table.slot(2).leases == 0
    assert not [e for e in own.errors() if "leases" in e.text], "a peer that has gone is no error"


def test_why_a_rank_exports_nothing_is_said_until_it_does(
    cache: RankHalf, own: AnyTable, transport: PlayedTransport
) -> None:
    assert cache.failed == ""
    transport.export_error = TransportError("no room for a socket")
    with pytest.raises(TransportError):
        cache.open_epoch(own.epoch)
    assert "rank 0" in cache.failed
    assert "no room for a socket" in cache.failed
    assert cache.table is None
    transport.export_error = None
    cache.open_epoch(own.epoch)
    assert cache.failed == ""


# -- peers that have ended


def test_an_ended_peer_is_unmapped_by_a_rank_that_is_never_idle(
    opened: RankHalf, transport: PlayedTransport, exporter: Make, clock: Clock
) -> None:
    ended, living = exporter("ended"), exporter("living")
    opened.begin_load(load_of(piece_of(ended, 1), piece_of(living, 2)))
    reports(opened, 1)
    memory = transport.memories[ended.info.epoch]
    ended.table.end_life(0)
    transport.state = CopyState.PENDING
    opened.begin_load(load_of(piece_of(living, 3)))
    until(lambda: len(transport.copies) == 3)  # busy from here on
    clock.now += 2
    until(lambda: memory.closed)
    assert not transport.memories[living.info.epoch].closed
    transport.copies[-1].state = CopyState.DONE
    assert reports(opened, 1)["load"].bad == ()


def test_an_ended_peer_stays_mapped_while_a_load_has_yet_to_check_it(
    opened: RankHalf, own: AnyTable, transport: PlayedTransport, exporter: Make, clock: Clock
) -> None:
    transport.state = CopyState.PENDING
    peer, _ = leased(opened, own, exporter)
    until(lambda: transport.copies)
    peer.table.end_life(0)
    ticks = count()
    tidied = opened._attachments.unmap_ended
    opened._attachments.unmap_ended = lambda used: (tidied(used), next(ticks))[0]  # type: ignore[method-assign]
    clock.now += 2
    until(lambda: opened._tidying._due_at > clock.now)
    until(lambda: repr(ticks) != "count(0)")
    assert not transport.memories[peer.info.epoch].closed
    transport.copies[0].state = CopyState.DONE
    [failure] = reports(opened, 1)["load"].failures
    assert failure.reason is LoadFailure.RECLAIMED
    assert peer.table.slot(1).leases == 0
    clock.now += 2
    until(lambda: transport.memories[peer.info.epoch].closed)


# -- what must not happen, happens


def test_the_load_thread_outlives_what_cannot_be_unmapped(
    opened: RankHalf,
    exporter: Make,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def fail(used: object) -> None:
        calls.append(used)
        raise OSError("munmap")

    monkeypatch.setattr(opened._attachments, "unmap_ended", fail)
    with caplog.at_level(logging.ERROR):
        for n in range(3):
            clock.now += 100
            opened.begin_load(load_of(piece_of(exporter(f"e{n}"), n), name=f"{n}"))
            assert reports(opened, 1)[f"{n}"].bad == ()
    assert len(calls) == 3
    assert len([r for r in caplog.records if "unmapped" in r.message]) == 1


def test_a_spoilt_load_reports_all_its_targets_once_nothing_can_write(
    opened: RankHalf,
    own: AnyTable,
    transport: PlayedTransport,
    exporter: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One copy's poll fails while the other still writes; even the note of it fails."""
    transport.state = CopyState.PENDING
    peer, ticket = exporter(), own.take_ticket(1)
    assert ticket is not None
    pieces = (piece_of(peer, 1, b"\1"), piece_of(peer, 2, b"\1"))
    opened.begin_load(load_of(*pieces, ticket=ticket))
    until(lambda: len(transport.copies) == 2)
    table = opened.table
    assert table is not None
    table.log_error = own.slot  # type: ignore[method-assign,assignment]  # raises when called so
    first, second = transport.copies
    first.error = RuntimeError("driver")
    until(lambda: "driver" in caplog.text)
    first.error, first.state = None, CopyState.DONE
    opened.begin_load(load_of(name="behind"))
    assert list(reports(opened, 1)) == ["behind"], "the thread went round, and did not report"
    second.state = CopyState.DONE
    assert reports(opened, 1)["load"].bad == (11, 12)
    assert peer.table.slot(1).leases == peer.table.slot(2).leases == 0
    assert in_use(own, ticket) == 0
    assert len([r for r in caplog.records if "discarded" in r.message]) == 1


def test_a_block_that_is_reused_under_its_copy_is_bad_and_counted(
    opened: RankHalf, own: AnyTable, transport: PlayedTransport, exporter: Make
) -> None:
    transport.state = CopyState.PENDING
    peer = exporter()
    opened.begin_load(load_of(piece_of(peer, 1), piece_of(peer, 2)))
    until(lambda: len(transport.copies) == 2)
    peer.reuse(1)
    peer.publish(5, shift=-4)
    for copy in transport.copies:
        copy.state = CopyState.DONE
    assert reports(opened, 1)["load"].bad == (11,)
    assert own.counters.read(RECHECK_FAILED) == 1


def test_a_load_whose_check_fails_is_bad_and_gives_its_leases_back(
    opened: RankHalf, own: AnyTable, exporter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> list[bool]:
        raise StaleAttachment("recheck")

    monkeypatch.setattr(PeerSlotTable, "recheck", fail)
    peer, ticket = leased(opened, own, exporter)
    assert reports(opened, 1)["load"].bad == (11,)
    assert peer.table.slot(1).leases == 0
    assert in_use(own, ticket) == 0


def test_a_load_says_which_peers_it_needs(
    exporter: Make, served: ServedNode, transport: PlayedTransport
) -> None:
    a, b = exporter("a"), exporter("b")
    load = load_of(piece_of(a, 1), piece_of(b, 2), piece_of(a, 3))
    assert RankLoad(load, AttachmentCache(transport, Rank(0), served.segments), None).peers == {
        1,
        2,
    }
