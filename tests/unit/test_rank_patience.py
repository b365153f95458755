"""How long the loads of a rank wait for a peer that hangs while it is being attached."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvshm.plans import LoadFailure, LoadReport
from kvshm.rank_load import RankLoad
from kvshm.rank_peers import ATTACH_PATIENCE_SECONDS, PeerBook
from kvshm.segment import identity_of
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import Rank

from .exporters import FINGERPRINT, NUM_BLOCKS, Clock, Exporter, Make
from .played_transport import PlayedTransport
from .test_rank import OWN, load_of, piece_of, until

RANK = Rank(0)


@pytest.fixture
def table(namespace: str) -> Iterator[SlotTable]:
    spec = TableSpec(namespace, "own", NUM_BLOCKS, 16, 1, FINGERPRINT)
    table = SlotTable.create(spec, OWN, identity_of())
    table.set_life(RANK)
    yield table
    table.unlink()
    table.close()


def test_one_load_waits_a_while_those_after_it_not_and_the_attach_goes_on(
    table: SlotTable, exporter: Make, clock: Clock
) -> None:
    transport, hung = PlayedTransport(), exporter()
    answers = transport.hung[hung.info.epoch] = threading.Event()
    book = PeerBook(transport, RANK, clock)

    def load(peer: Exporter, block: int) -> RankLoad:
        return RankLoad(load_of(piece_of(peer, block)), book, table)

    first = load(hung, 1)
    assert not first.advance()
    until(lambda: transport.attaches)
    clock.now += ATTACH_PATIENCE_SECONDS - 0.1
    assert not first.advance()
    clock.now += 0.2
    second = load(hung, 2)
    for given_up, target in ((first, 11), (second, 12)):
        assert given_up.advance()
        assert given_up.report.bad == (target,)
        (failure,) = given_up.report.failures
        assert failure.reason is LoadFailure.NOT_ATTACHED
    answers.set()
    until(lambda: not book._attaching)
    third = load(hung, 3)
    until(third.advance)
    assert third.report == LoadReport("load", ())
    assert len(transport.attaches) == 1
    book.close()
