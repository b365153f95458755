"""Counters: their ids are fixed for good, and no process loses another's counts."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from kvshm._base.ids import Epoch, Fingerprint
from kvshm._shm import statistics
from kvshm._shm.layout import NUM_COUNTERS
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.slot_table import SlotTableView
from kvshm._shm.statistics import PUBLISHED, Counter

from .served import AnyTable, again


@pytest.fixture
def table() -> Iterator[AnyTable]:
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    spec = TableSpec(namespace, "e", 1, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(1))
    yield table
    table.close()


def test_ids_are_never_renumbered() -> None:
    """Tools of one version read tables of another: a number below may be added, not changed."""
    assert {counter.label: int(counter) for counter in Counter.REGISTRY.values()} == {
        "published": 0, "retracted": 1, "drained": 2, "forced": 3, "drain_wait_us": 4,
        "events_sent": 5, "events_dropped": 6, "events_unheard": 7, "kept": 8,
        "prompt_tokens_local": 9, "prompt_tokens_peer": 10, "prompt_tokens_computed": 11,
        "bad_options": 12, "miss_not_importing": 13, "miss_not_shared": 14, "miss_failed": 15,
        "lookups": 16, "lookup_hits": 17, "blocks_matched": 18, "miss_no_peer": 19,
        "miss_no_owner": 20, "miss_too_short": 21, "miss_lease_lost": 22, "miss_quarantined": 23,
        "miss_fingerprint": 24, "miss_cheaper": 25,
        "tried": 26, "miss_no_room": 27, "miss_too_long": 28, "miss_not_read": 29, "miss_own": 30,
        "miss_in_drain": 31,
        "leases_taken": 32, "lease_lost": 33, "loads_started": 34, "loads_done": 35,
        "loads_failed": 36, "imported_blocks": 37, "blocks_copied": 38, "bytes_copied": 39,
        "recheck_failed": 40, "discarded": 41, "verified": 42, "mismatched": 43,
        "quarantines": 44, "estimated_us": 45, "measured_us": 46, "computing_us": 47,
        "loads_at_once": 48, "loads_too_late": 49, "imported_tokens": 50, "loads_lost": 51,
        "duplicates_reused": 52, "last_copies_reused": 53, "duplicates_lost": 54,
        "evicted": 55, "evicted_us": 64,
        "index_full": 56, "resyncs": 57, "rejoins": 58, "bad_messages": 59, "swept": 60,
        "hook_errors": 61,
        "weights_written": 62, "still_mapped": 63,
        "store_asked": 65, "store_came": 66, "store_waited_us": 67, "store_written": 68,
        "store_fetched": 69, "store_damaged": 70, "store_failed": 71,
    }  # fmt: skip


def test_every_counter_is_explained_and_named_after_its_label() -> None:
    for counter in Counter.REGISTRY.values():
        assert getattr(statistics, counter.label.upper()) is counter
        assert counter.meaning[0].isupper()
        assert counter.meaning.endswith(".")
    assert repr(PUBLISHED) == "<Counter 0 published>"


@pytest.mark.parametrize("number", [int(PUBLISHED), -1, NUM_COUNTERS])
def test_an_id_is_given_once(number: int) -> None:
    with pytest.raises(ValueError, match="taken"):
        Counter(number, "again", "Again.")


def test_counters_are_read_by_label_from_another_mapping(table: AnyTable) -> None:
    table.counters.add(PUBLISHED)
    table.counters.add(statistics.HOOK_ERRORS, 2**33)
    reader = again(table, SlotTableView)
    snapshot = reader.counters.snapshot()
    assert (snapshot["published"], snapshot["hook_errors"]) == (1, 2**33)
    assert sum(snapshot.values()) == 1 + 2**33
    assert reader.counters.read(PUBLISHED) == 1
    reader.close()


def test_only_known_counters_count_and_only_upwards(table: AnyTable) -> None:
    with pytest.raises(KeyError):
        table.counters.add(99)
    with pytest.raises(KeyError):
        table.counters.read(99)
    with pytest.raises(ValueError, match="cannot count -1"):
        table.counters.add(PUBLISHED, -1)


ADD = """
import sys
from kvshm._shm.statistics import PUBLISHED
from kvshm._shm.own_slot_table import RankSlotTable
table = RankSlotTable.from_fd("table", int(sys.argv[1]))
for _ in range(20_000):
    table.counters.add(PUBLISHED)
"""


def test_processes_that_count_at_once_lose_nothing(table: AnyTable) -> None:
    fd = table.descriptor(True)
    argv = [sys.executable, "-c", ADD, str(fd)]
    adding = [subprocess.Popen(argv, pass_fds=[fd]) for _ in range(3)]
    os.close(fd)
    assert [process.wait() for process in adding] == [0, 0, 0]
    assert table.counters.read(PUBLISHED) == 60_000
