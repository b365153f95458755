"""The words of a slot table's header: life, heartbeat, lease bit, load tickets, error log."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from kvshm._base.ids import (
    NO_LEASE_BIT,
    Epoch,
    Fingerprint,
    LeaseBit,
    Rank,
)
from kvshm._shm.layout import NUM_ERRORS, NUM_TICKETS
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.slot_table import SlotTableView

from ..waiting import NanosecondClock as Clock
from .served import AnyTable, again

EPOCH = Epoch(0xFEED_0000_0000_0001)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Iterator[AnyTable]:
    spec = TableSpec(f"test-{uuid.uuid4().hex[:12]}", "e", 1, 16, 2, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, EPOCH, clock=clock)
    for rank in range(table.num_ranks):
        table.set_life(rank)
    yield table
    table.close()


def test_the_life_of_a_rank_ends_alone_or_with_all(table: AnyTable, held: bytes) -> None:
    assert table.alive
    table.end_life(1)
    assert (table.life(0), table.life(1), table.alive) == (EPOCH, 0, False)
    assert table.lease(LeaseBit(0), held)[0] == 0
    assert table.recheck(Rank(0), held) == [True]
    assert table.recheck(Rank(1), held) == [False]
    table.set_life(1)
    table.end_life(0)
    assert not table.alive
    table.end_life(None)
    assert table.recheck(Rank(0), held) == [False]


def test_the_owner_shows_that_it_is_alive_and_leases(table: AnyTable) -> None:
    table.beat()
    table.beat()
    table.count_lease_batch()
    other = again(table)
    assert (other.heartbeat, other.leases_taken) == (2, 1)
    other.close()


def test_leasing_from_a_table_is_not_counted_as_leasing_by_its_owner(
    table: AnyTable, held: bytes
) -> None:
    table.lease(LeaseBit(0), held)
    assert table.leases_taken == 0


def test_a_lease_bit_is_kept_beside_the_number_of_ranks(table: AnyTable) -> None:
    assert table.lease_bit == NO_LEASE_BIT
    for bit in (0, 27, NO_LEASE_BIT):
        table.set_lease_bit(LeaseBit(bit))
        assert table.lease_bit == bit
    for bit in (28, -2):
        with pytest.raises(IndexError):
            table.set_lease_bit(LeaseBit(bit))
    other = again(table)
    assert other.num_ranks == 2
    other.close()


def test_the_last_rank_of_a_load_knows_that_it_is(table: AnyTable) -> None:
    rank = again(table)
    first, second = table.take_ticket(2), table.take_ticket(1)
    assert first is not None
    assert second is not None
    assert first != second
    assert not rank.finish_ticket(first)
    assert rank.finish_ticket(second)
    assert table.finish_ticket(first)
    assert not table.finish_ticket(first), "finished once too often"
    rank.close()


def test_tickets_run_out_and_come_back_in_turn(table: AnyTable) -> None:
    taken = [table.take_ticket(1) for _ in range(NUM_TICKETS)]
    assert sorted(t for t in taken if t is not None) == list(range(NUM_TICKETS))
    assert table.take_ticket(1) is None
    for ticket in (9, 5):
        table.finish_ticket(ticket)
    assert (table.take_ticket(64), table.take_ticket(64)) == (5, 9)


def test_there_are_no_such_tickets(table: AnyTable) -> None:
    for ranks in (0, 65):
        with pytest.raises(ValueError, match="ranks"):
            table.take_ticket(ranks)
    for ticket in (-1, NUM_TICKETS):
        with pytest.raises(IndexError):
            table.finish_ticket(ticket)


# -- error log


def test_errors_are_kept_apart_and_counted(table: AnyTable, clock: Clock) -> None:
    table.log_error("copy failed")
    clock.now += 5
    table.log_error("é" * 100)
    clock.now += 5
    table.log_error("copy failed")
    reader = again(table, SlotTableView)
    long, failed = reader.errors()
    reader.close()
    assert failed[:4] == (2, 1_000_000_000, 1_000_000_010, "copy failed")
    assert long.text == "é" * 52


def test_a_full_error_log_forgets_the_oldest(table: AnyTable, clock: Clock) -> None:
    for i in range(NUM_ERRORS):
        clock.now += 1
        table.log_error(f"error {i}")
    clock.now += 1
    table.log_error("error 0")
    table.log_error("new")
    texts = [error.text for error in table.errors()]
    assert len(texts) == NUM_ERRORS
    assert "error 1" not in texts
    assert {"error 0", "new"} <= set(texts)
