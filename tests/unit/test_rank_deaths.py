"""A rank, the peers it is told of, and the deaths of exporters: real processes, played memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvshm._base.ids import Rank
from kvshm._base.log import REPEAT_SECONDS, LogLimit
from kvshm._engine.load_plan import LoadFailure, LoadReport
from kvshm._node.peer_list import PeerList, PeerListReader
from kvshm._node.protocol import EngineInfo, RankInfo
from kvshm._rank.attachments import (
    ATTACH_WAIT_SECONDS,
    FAILED_SECONDS,
    MAX_ATTACHING,
    MAX_TRIES,
    AttachmentCache,
)
from kvshm._rank.rank_load import RankLoad
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState

from ..waiting import until
from .exporters import FINGERPRINT, NUM_BLOCKS, Clock, Exporter, Make
from .played_transport import PlayedTransport, memory_of
from .pulsing import pulsing
from .served import AnyTable, ServedNode
from .test_rank import OWN, load_of, piece_of, transport

__all__ = ["transport"]

RANK = Rank(0)


@pytest.fixture
def table(served: ServedNode) -> AnyTable:
    table = served.serve("own", OWN, NUM_BLOCKS, 1, FINGERPRINT).table
    table.set_life(RANK)
    return table


@pytest.fixture
def listed(tmp_path: Path) -> PeerList:
    return PeerList(tmp_path / "peers")


@pytest.fixture
def attachments(
    transport: PlayedTransport, served: ServedNode, clock: Clock, tmp_path: Path
) -> Iterator[AttachmentCache]:
    attachments = AttachmentCache(transport, RANK, served.segments, clock)
    attachments.follow(PeerListReader(tmp_path / "peers"))
    yield attachments
    for hung in transport.hung.values():
        hung.set()
    until(lambda: not attachments._attaching)
    attachments.close()


def listing(peer: Exporter) -> EngineInfo:
    rank = RankInfo(os.getpid(), memory_of(peer.info.epoch))
    return msgspec.structs.replace(peer.info, ranks=[rank])


# -- attached when they join


def test_who_is_listed_is_attached_a_few_at_a_time(
    attachments: AttachmentCache, listed: PeerList, transport: PlayedTransport, exporter: Make
) -> None:
    attachments.attach_listed()
    peers = [exporter(f"e{n}") for n in range(MAX_ATTACHING + 2)]
    for peer in peers:
        transport.hung[peer.info.epoch] = threading.Event()
    listed.write(listing(peer) for peer in peers)
    for _ in range(3):
        attachments.attach_listed()
    until(lambda: len(transport.attaches) == MAX_ATTACHING)
    for peer in peers:
        transport.hung[peer.info.epoch].set()
    until(lambda: len(attachments.attached) == MAX_ATTACHING)
    attachments.attach_listed()
    until(lambda: attachments.attached == {peer.info.epoch for peer in peers})
    attachments.attach_listed()
    assert len(transport.attaches) == len(peers), "each once"


def test_a_list_that_is_followed_no_more_while_it_is_read_names_no_one(
    attachments: AttachmentCache,
    listed: PeerList,
    transport: PlayedTransport,
    exporter: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The epoch ends on the main thread, the list is read on the load thread."""
    listed.write([listing(exporter())])
    read = PeerListReader.read_new

    def read_new(reader: PeerListReader) -> object:
        found = read(reader)
        attachments.follow(None)
        return found

    monkeypatch.setattr(PeerListReader, "read_new", read_new)
    attachments.attach_listed()
    attachments.attach_listed()
    assert not attachments._attaching
    assert transport.attaches == []


def test_a_peer_is_attached_once_its_rank_serves(
    attachments: AttachmentCache, listed: PeerList, transport: PlayedTransport, exporter: Make
) -> None:
    early, importing = exporter("early"), exporter("importing")
    early.table.end_life(None)
    listed.write([listing(early), msgspec.structs.replace(listing(importing), imports_only=True)])
    attachments.attach_listed()
    until(lambda: attachments._early and not attachments._attaching)
    assert list(attachments._early) == [early.info.epoch], "its table is looked at from now on"
    assert transport.attaches == []
    early.table.set_life(RANK)
    attachments.attach_listed()
    until(lambda: attachments.attached == {early.info.epoch})


def test_the_table_of_a_peer_that_leaves_before_its_rank_serves_is_closed(
    attachments: AttachmentCache, listed: PeerList, exporter: Make
) -> None:
    early = exporter()
    early.table.end_life(None)
    listed.write([listing(early)])
    attachments.attach_listed()
    until(lambda: attachments._early and not attachments._attaching)
    (table,) = attachments._early.values()
    listed.write([])
    attachments.attach_listed()
    assert not attachments._early
    assert "[closed]" in repr(table)


def test_a_load_does_not_wait_for_a_rank_that_serves_no_memory(
    attachments: AttachmentCache, table: AnyTable, transport: PlayedTransport, exporter: Make
) -> None:
    """The peer's epoch ended between lease and attach.  Without a coordinator no one says so."""
    ended = exporter()
    load = RankLoad(load_of(piece_of(ended, 1)), attachments, table)
    ended.table.end_life(None)
    until(load.advance)
    (failure,) = load.report.failures
    assert failure.reason is LoadFailure.NOT_ATTACHED
    assert transport.attaches == []


def test_who_can_be_read_at_once_is_said(
    attachments: AttachmentCache, transport: PlayedTransport, exporter: Make
) -> None:
    a, hung = exporter("a"), exporter("hung")
    answers = transport.hung[hung.info.epoch] = threading.Event()
    assert attachments.attached == frozenset()
    for peer in (hung, a):
        assert attachments.find(piece_of(peer, 1)) is None
    until(lambda: attachments.attached == {a.info.epoch})
    answers.set()
    until(lambda: attachments.attached == {a.info.epoch, hung.info.epoch})
    a.table.retire()
    attachments.unmap_ended(())
    assert attachments.attached == {hung.info.epoch}
    attachments.close()
    assert attachments.attached == frozenset()


def test_one_load_waits_for_a_peer_that_hangs_those_after_it_not_and_the_attach_goes_on(
    attachments: AttachmentCache,
    table: AnyTable,
    transport: PlayedTransport,
    exporter: Make,
    clock: Clock,
) -> None:
    hung = exporter()
    answers = transport.hung[hung.info.epoch] = threading.Event()

    def load(block: int) -> RankLoad:
        return RankLoad(load_of(piece_of(hung, block)), attachments, table)

    first = load(1)
    assert not first.advance()
    until(lambda: transport.attaches)
    clock.now += ATTACH_WAIT_SECONDS - 0.1
    assert not first.advance()
    clock.now += 0.2
    second = load(2)
    for given_up, target in ((first, 11), (second, 12)):
        assert given_up.advance()
        assert given_up.report.bad == (target,)
        (failure,) = given_up.report.failures
        assert failure.reason is LoadFailure.NOT_ATTACHED
    answers.set()
    until(lambda: not attachments._attaching)
    third = load(3)
    until(third.advance)
    assert third.report == LoadReport("load", ())
    assert len(transport.attaches) == 1


def test_a_peer_that_cannot_be_attached_is_left_to_its_first_load(
    attachments: AttachmentCache,
    listed: PeerList,
    transport: PlayedTransport,
    exporter: Make,
    clock: Clock,
) -> None:
    broken = exporter()
    transport.broken.add(broken.info.epoch)
    listed.write([listing(broken)])
    for n in range(1, MAX_TRIES + 3):
        attachments.attach_listed()
        until(lambda: not attachments._attaching)
        assert len(transport.attaches) == min(n, MAX_TRIES)
        clock.now += FAILED_SECONDS + 1
        attachments.unmap_ended(())
    transport.broken.clear()
    assert attachments.find(piece_of(broken, 1)) is None
    until(lambda: attachments.attached == {broken.info.epoch})


def test_a_list_that_makes_no_sense_or_has_gone_names_no_one(
    attachments: AttachmentCache,
    listed: PeerList,
    tmp_path: Path,
    exporter: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "peers").write_bytes(b"\xc1 no msgpack")
    for _ in range(2):
        attachments.attach_listed()
    assert caplog.text.count("cannot be read") == 1
    listed.write([listing(exporter())])
    listed.end()
    listed.write([listing(exporter())])
    assert list(tmp_path.iterdir()) == []
    attachments.attach_listed()
    assert not attachments._attaching


# -- exporters that die


PROCESSES = pytest.mark.parametrize("who", [None, RANK], ids=["engine", "rank"])


@PROCESSES
def test_no_copy_from_a_dead_exporter_is_begun(
    attachments: AttachmentCache,
    listed: PeerList,
    transport: PlayedTransport,
    exporter: Make,
    table: AnyTable,
    who: Rank | None,
) -> None:
    peer = exporter()
    with pulsing(peer.table, who):
        listed.write([listing(peer)])
        attachments.attach_listed()
        until(lambda: attachments.attached)
        before, during = (RankLoad(load_of(piece_of(peer, n)), attachments, table) for n in (1, 2))
        assert before.advance()
        assert before.report == LoadReport("load", ())
    assert during.advance()
    assert during.report.bad == (12,)
    assert during.report.failures[0].reason is LoadFailure.UNREACHABLE
    assert len(transport.copies) == 1
    attachments.unmap_ended(())
    assert attachments.attached == frozenset()
    assert transport.memories[peer.info.epoch].closed


@PROCESSES
def test_what_was_copied_from_a_rank_that_died_meanwhile_does_not_count(
    attachments: AttachmentCache,
    transport: PlayedTransport,
    exporter: Make,
    table: AnyTable,
    who: Rank | None,
) -> None:
    """Its memory may have gone.  That of a rank whose engine died has not."""
    transport.state = CopyState.PENDING
    peer = exporter()
    attachments.find(piece_of(peer, 1))
    until(lambda: attachments.attached)
    load = RankLoad(load_of(piece_of(peer, 2)), attachments, table)
    with pulsing(peer.table, who):
        assert not load.advance()
    transport.copies[0].state = CopyState.DONE
    assert load.advance()
    died = who is not None
    assert load.report.bad == ((12,) if died else ())
    assert [f.reason for f in load.report.failures] == [LoadFailure.RECLAIMED] * died


@PROCESSES
def test_who_stands_still_is_not_dead(
    attachments: AttachmentCache, exporter: Make, table: AnyTable, clock: Clock, who: Rank | None
) -> None:
    """However long: its memory is what it was."""
    peer = exporter()
    with pulsing(peer.table, who) as child:
        attachments.find(piece_of(peer, 1))
        until(lambda: attachments.attached)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        clock.now += 1000
        attachments.unmap_ended(())
        load = RankLoad(load_of(piece_of(peer, 2)), attachments, table)
        assert load.advance()
        assert load.report == LoadReport("load", ())


def test_who_has_ended_its_export_is_let_go(
    attachments: AttachmentCache, transport: PlayedTransport, exporter: Make, table: AnyTable
) -> None:
    peer = exporter()
    attachments.find(piece_of(peer, 1))
    until(lambda: attachments.attached)
    transport.memories[peer.info.epoch].ended = True
    load = RankLoad(load_of(piece_of(peer, 2)), attachments, table)
    assert load.advance()
    assert load.report.bad == (12,)
    attachments.unmap_ended(())
    assert attachments.attached == frozenset()


def test_a_peer_that_hangs_fails_many_loads_and_a_few_of_them_are_logged(
    attachments: AttachmentCache,
    transport: PlayedTransport,
    exporter: Make,
    table: AnyTable,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = exporter()
    monkeypatch.setattr(attachments, "log_limit", LogLimit(clock=clock))
    monkeypatch.setattr(attachments, "find", refuse)
    for _ in range(100):
        assert RankLoad(load_of(piece_of(peer, 1)), attachments, table).advance()
    assert len(caplog.records) == 1
    clock.now += REPEAT_SECONDS
    assert RankLoad(load_of(piece_of(peer, 1)), attachments, table).advance()
    assert len(caplog.records) == 2
    assert [error.times for error in table.errors()] == [101], "each is counted"


def refuse(piece: object) -> None:
    raise TransportError("no answer within 5 s")
