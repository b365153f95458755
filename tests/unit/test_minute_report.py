"""Once a minute an engine logs what its lookups found, and why others imported nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvshm._base.ids import Epoch, Fingerprint
from kvshm._engine.minute_report import PERIOD_SECONDS, REASONS, MinuteReport
from kvshm._shm import statistics as c
from kvshm._shm.own_slot_table import TableSpec

from .exporters import OWN_EPOCH, Clock
from .served import AnyTable


@pytest.fixture
def table(namespace: str) -> Iterator[AnyTable]:
    spec = TableSpec(namespace, "me", 8, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(OWN_EPOCH))
    yield table
    table.close()


def test_each_minute_tells_of_hits_and_of_misses(table: AnyTable, clock: Clock) -> None:
    report = MinuteReport(clock)
    count = table.counters.add
    clock.now += PERIOD_SECONDS + 1
    assert report.line(table) is None, "nothing has happened"
    count(c.LOOKUPS, 16)
    count(c.LOOKUP_HITS, 12)
    count(c.IMPORTED_TOKENS, 18432)
    count(c.LOADS_FAILED, 3)
    count(c.MISS_NO_OWNER, 4)
    clock.now += PERIOD_SECONDS - 1
    assert report.line(table) is None, "not yet"
    clock.now += 1
    assert str(report.line(table)) == (
        "last 60 s: 12 of 16 lookups found a prefix, 18,432 tokens imported, 3 loads failed; "
        "not imported: no owner 4"
    )
    clock.now += PERIOD_SECONDS
    assert report.line(table) is None, "nothing has happened since"
    count(c.LOOKUPS, 2)
    count(c.LOOKUP_HITS, 2)
    count(c.IMPORTED_TOKENS, 16)
    clock.now += PERIOD_SECONDS + 30
    assert str(report.line(table)) == "last 90 s: 2 of 2 lookups found a prefix, 16 tokens imported"


def test_each_reason_for_a_miss_is_reported(table: AnyTable, clock: Clock) -> None:
    report = MinuteReport(clock)
    for number, reason in enumerate(REASONS, start=1):
        table.counters.add(c.LOOKUPS, number)
        table.counters.add(reason, number)
    clock.now += PERIOD_SECONDS
    assert str(report.line(table)) == (
        "last 60 s: 0 of 105 lookups found a prefix; not imported: no peer 1, fingerprint 2, "
        "too short 3, too long 4, no owner 5, lease lost 6, quarantined 7, computing is cheaper 8, "
        "no room 9, request not shared 10, failed before 11, cache must not be read 12, "
        "own block 13, in drain 14"
    )


@pytest.mark.parametrize(
    ("counter", "line"),
    [
        (c.MISS_NO_ROOM, "last 60 s: no lookups; not imported: no room 1"),
        (c.IMPORTED_TOKENS, "last 60 s: no lookups, 1 tokens imported"),
        (c.LOADS_FAILED, "last 60 s: no lookups, 1 load failed"),
    ],
)
def test_what_ends_in_a_minute_without_lookups_is_reported(
    table: AnyTable, clock: Clock, counter: c.Counter, line: str
) -> None:
    """A load takes until the next minute; without room nothing is looked up."""
    report = MinuteReport(clock)
    table.counters.add(counter)
    clock.now += PERIOD_SECONDS
    assert str(report.line(table)) == line


def test_another_epochs_counters_begin_at_zero(
    table: AnyTable, namespace: str, clock: Clock
) -> None:
    report = MinuteReport(clock)
    table.counters.add(c.LOOKUPS, 5)
    table.counters.add(c.MISS_NO_PEER, 5)
    clock.now += PERIOD_SECONDS
    assert "no peer 5" in str(report.line(table))
    spec = TableSpec(namespace, "me", 8, 16, 1, Fingerprint(bytes(32)))
    another = AnyTable.create(spec, Epoch(OWN_EPOCH + 1))
    another.counters.add(c.LOOKUPS)
    another.counters.add(c.MISS_NO_PEER)
    clock.now += PERIOD_SECONDS
    line = str(report.line(another))
    assert line == "last 60 s: 0 of 1 lookups found a prefix; not imported: no peer 1"
    another.close()
