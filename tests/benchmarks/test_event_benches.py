"""The benches of events, growth and copies: their arithmetic, what they send, and that what would
fail after minutes is refused at once."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_copy
import bench_events
import bench_growth
import pytest
from copy_peers import PEERS, Failed
from event_traffic import MARK_EVERY, batches, churn, mark

from kvshm._base.ids import Epoch, LeaseBit
from kvshm._replica.index import Replica
from kvshm._shm.layout import unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec

BENCHMARKS = Path(bench_copy.__file__).parent


@pytest.mark.parametrize(
    ("program", "options", "said"),
    [
        ("bench_client.py", ["--rounds", "1"], "at least 2 rounds"),
        ("bench_client.py", ["--records", "20000"], "fewer records than --blocks"),
        ("bench_client.py", ["--hz", "0"], "some hz"),
        ("bench_events.py", ["visibel"], "wanted rows of visible"),
        ("bench_events.py", ["--subscribers", "0"], "a subscriber"),
        ("bench_growth.py", ["--entries", "70000"], "twice as many"),
        ("bench_copy.py", ["--rounds", "1"], "two rounds"),
        ("bench_copy.py", ["--ways", "kvshm"], "memcpy among"),
        ("bench_copy.py", ["--mooncake", "/nowhere"], "there is no mooncake in it"),
    ],
)
def test_what_would_fail_after_minutes_is_refused(
    program: str, options: list[str], said: str
) -> None:
    argv = [sys.executable, str(BENCHMARKS / program), *options]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert not ended.stdout


def test_each_batch_is_newer_than_what_was_sent_of_its_blocks_and_some_say_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = itertools.count(7)
    monkeypatch.setattr("event_traffic.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    replica = Replica.create("t", "e", Epoch(1), 64)
    row = replica.add_row(Epoch(2), "s", 33, LeaseBit(0))
    sent = list(itertools.islice(batches("s", 8, 33), 2 * MARK_EVERY + 1))
    assert [replica.apply(row, batch).ignored for batch in sent] == [0] * len(sent)
    marked = [number for number, batch in enumerate(sent) if len(set(blocks(batch)) & {32})]
    assert marked == [0, MARK_EVERY, 2 * MARK_EVERY]
    ((_, found),) = replica.lookup([mark(2)], 0, 1, 1 << row)
    assert [(r.block_id, r.generation) for r in unpack_records(found)] == [(32, 9000)]
    replica.close()


def blocks(batch: bytes) -> list[int]:
    return [record.block_id for record in unpack_records(batch)]


def test_churn_leaves_a_table_that_a_replica_of_its_events_equals() -> None:
    table = OwnSlotTable.create(TableSpec("t", "s", 64, 16, 1, bytes(32)), Epoch(2))  # type: ignore[arg-type]  # 32 bytes
    source = churn(table, "s", 8)
    replica = Replica.create("t", "e", Epoch(1), 64)
    row = replica.add_row(Epoch(2), "s", 64, LeaseBit(0))
    peer = SimpleNamespace(table=table, row=row)
    assert not bench_events.is_equal(replica, peer)
    replica.resync(row, replica.tombstones(row), table.scan())
    assert bench_events.is_equal(replica, peer)
    for batch in itertools.islice(source, 40):
        assert len(blocks(batch)) == 8
        replica.apply(row, batch)
    assert bench_events.is_equal(replica, peer)
    lost = next(source)
    assert not bench_events.is_equal(replica, peer)
    replica.apply(row, lost)
    assert bench_events.is_equal(replica, peer)
    table.retract([63])
    assert not bench_events.is_equal(replica, peer), "one too many"
    replica.close()
    table.close()


def test_a_peer_that_does_not_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="mooncake_master cannot be started: No such file"):
        PEERS["mooncake"](tmp_path, 65536, 4, 2)
    assert set(PEERS) == {"mooncake", "lmcache"}


def test_latencies_are_of_all_engines_the_first_and_the_last() -> None:
    applied = [{1: 10, 2: 30, 3: 5}, {1: 20, 2: 40}]
    found = bench_events.latencies([1, 2, 3], applied)
    assert (found["first"]["p50"], found["last"]["p50"], found["all"]["p50"]) == (10, 20, 20)
    assert found["never"] == 1


def test_rounds_that_overlap_a_growth_are_told_from_others() -> None:
    rounds = [(0.0, 1.0, 1.0), (1.5, 2.5, 0.5), (2.6, 2.7, 0.1), (3.0, 4.0, 1.0), (9.0, 9.5, 0.5)]
    during, between = bench_growth.stalls(rounds, [(2.0, 2.65), (3.9, 8.0)])
    assert (during, between) == ([500.0, 100.0, 1000.0], [1000.0, 500.0])


def test_shares_of_memcpy_are_those_of_the_same_round() -> None:
    took = {"memcpy": [1.0, 2.0, 4.0], "kvshm": [2.0, 4.0, 8.0]}
    found = bench_copy.rates(took, 4 * 10**9)
    assert found["share"]["kvshm"]["p50"] == found["share"]["kvshm"]["p99"] == 0.5
    assert found["gb_per_second"]["memcpy"]["p50"] == 2.0
    assert set(found["share"]) == {"kvshm"}


def test_layouts_fit_and_choose_blocks_that_exist_once(subtests: pytest.Subtests) -> None:
    for layout in bench_copy.layouts():
        with subtests.test(layout.name):
            regions = layout.regions()
            end = max(r.offset + (r.num_blocks - 1) * r.stride + r.block_bytes for r in regions)
            assert end <= layout.nbytes
            chosen = layout.choose(random.Random(0))
            assert len(set(chosen)) == len(chosen) == layout.num_copied
            assert max(chosen) < layout.num_blocks
            assert 0.9 < bench_copy.bytes_of(layout) / bench_copy.COPIED_BYTES <= 1.1
