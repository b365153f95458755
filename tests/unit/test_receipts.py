"""A receipt is read only in the form in which it was written, and it is known when the event that
it names has been applied, or will never be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshm._base.ids import BlockId, Epoch, Generation
from kvshm._node.peers import Peers
from kvshm._node.receipt import Receipt
from kvshm._replica.index import Replica

from .exporters import Exporter, Make
from .pulsing import pulsing
from .replicas import RETRACT, packed

WORD = (1 << 32) - 1


def receipt_of(a: Exporter, block: int) -> Receipt:
    return Receipt(Epoch(a.info.epoch), BlockId(block), a.table.slot(block).generation)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 24) - 1), st.integers(0, WORD))
def test_what_was_written_is_read_again(epoch: int, block: int, generation: int) -> None:
    receipt = Receipt(Epoch(epoch), BlockId(block), Generation(generation))
    assert Receipt.read(str(receipt)) == receipt


@pytest.mark.parametrize(
    "text",
    [
        None, 3, True, [], {}, b"0000000000000001.2.3", "", "1.2.3", "0000000000000001.2",
        "0000000000000001.2.3\n", " 0000000000000001.2.3", "000000000000000G.2.3",
        "0000000000000001.-2.3", "0000000000000001.2.4294967296", "0000000000000001.123456789.3",
        "0000000000000001.\u0662.3", "0000000000000001.2.3" * 1000,
    ],
)  # fmt: skip
def test_anything_else_is_no_receipt(text: Any) -> None:
    assert Receipt.read(text) is None


def test_a_publication_has_been_heard_from_the_event_on(replica: Replica, row: int) -> None:
    assert not replica.has_heard(row, 7, 0)
    replica.apply(row, packed([7], generation=3))
    assert [replica.has_heard(row, 7, g) for g in (2, 3, 4)] == [True, True, False]
    replica.apply(row, packed([7], generation=3, kind=RETRACT))
    assert [replica.has_heard(row, 7, g) for g in (3, 4)] == [True, False]
    assert not replica.has_heard(row, 8, 0)
    assert not replica.has_heard(row, 4096, 0), "the engine has no such block"
    assert not replica.has_heard(row + 1, 7, 3), "no engine has this row"


def test_generations_wrap(replica: Replica, row: int) -> None:
    replica.apply(row, packed([7], generation=WORD))
    assert not replica.has_heard(row, 7, 0)
    replica.apply(row, packed([7], generation=0))
    assert replica.has_heard(row, 7, WORD)


def test_an_event_is_to_hear_until_it_was_applied_or_its_table_was_scanned(
    peers: Peers, exporter: Make
) -> None:
    a = exporter()
    peers.joined(a.info)
    events = [a.publish(n) for n in (1, 2)]
    assert [peers.is_to_hear(receipt_of(a, n)) for n in (1, 2)] == [True, True]
    peers.apply_events([(a.info.epoch, events[0])])
    assert [peers.is_to_hear(receipt_of(a, n)) for n in (1, 2)] == [False, True]
    peers.rescan(Epoch(a.info.epoch))  # as after events that were lost
    assert not peers.is_to_hear(receipt_of(a, 2))


def test_nothing_is_to_hear_of_whoever_cannot_be_imported_from(
    peers: Peers, exporter: Make
) -> None:
    a = exporter()
    receipt = receipt_of(a, 1)
    assert not peers.is_to_hear(receipt), "an engine that is not known, as of another namespace"
    peers.joined(a.info)
    a.publish(1)
    assert peers.is_to_hear(receipt)
    assert not peers.is_to_hear(receipt._replace(block=BlockId(a.info.num_blocks)))
    peers.suspected(receipt.epoch)
    assert not peers.is_to_hear(receipt)
    peers.recovered(receipt.epoch)
    assert peers.is_to_hear(receipt)
    a.table.retire()
    assert not peers.is_to_hear(receipt), "its epoch has ended, and nobody has said so"
    peers.gone(receipt.epoch)
    assert not peers.is_to_hear(receipt)


def test_nothing_is_to_hear_of_the_dead(peers: Peers, exporter: Make) -> None:
    a = exporter()
    with pulsing(a.table) as process:
        peers.joined(a.info)
        a.publish(1)
        assert peers.is_to_hear(receipt_of(a, 1))
        process.kill()
        process.wait()
        assert not peers.is_to_hear(receipt_of(a, 1))
