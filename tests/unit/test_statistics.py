"""Histograms, traffic and progress: what an engine writes is what a tool reads, in every bucket,
row and loop, also while several processes write."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from kvshm import _native
from kvshm._base.copy_path import PATHS, CopyPath, slowest
from kvshm._base.ids import Epoch, Fingerprint, Rank
from kvshm._shm import statistics
from kvshm._shm.histograms import NO_VALUES, Distribution
from kvshm._shm.layout import (
    LOOPS_OFFSET,
    NUM_BUCKETS,
    NUM_HISTOGRAMS,
    NUM_TICKETS,
    NUM_TRAFFIC_ROWS,
    TRAFFIC_OFFSET,
)
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.progress import (
    FIRST_LOAD_THREAD,
    NOTE_CLOCK_NS,
    SCHEDULER,
    OwnProgress,
)
from kvshm._shm.statistics import HOOKS, IMPORT_TIMES, Histogram
from kvshm._shm.traffic import Traffic

from .served import AnyTable, again

SPEC = TableSpec(f"test-{uuid.uuid4().hex[:12]}", "e", 1, 16, 2, Fingerprint(bytes(32)))


class Ticks:
    now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def table() -> Iterator[AnyTable]:
    table = AnyTable.create(SPEC, Epoch(1))
    yield table
    table.close()


def test_ids_are_never_renumbered() -> None:
    assert {histogram.label: int(histogram) for histogram in Histogram.REGISTRY.values()} == {
        "import_own": 0, "import_same_gpu": 1, "import_shm": 2, "import_nvlink": 3,
        "import_pcie": 4, "import_staged": 5, "import_other": 6, "match_length": 8,
        "drain_wait": 10, "hook_match": 16, "hook_allocated": 17, "hook_build": 18,
        "hook_output": 19, "hook_finished": 20, "hook_begin": 21, "hook_load_at_once": 22,
        "hook_collect": 23,
    }  # fmt: skip
    assert [path.value for path in PATHS] == [
        "own", "same_gpu", "shm", "nvlink", "pcie", "staged", "other",
    ]  # fmt: skip


def test_every_histogram_is_explained_and_named_after_its_label() -> None:
    for histogram in Histogram.REGISTRY.values():
        assert getattr(statistics, histogram.label.upper()) is histogram
        assert histogram.meaning.endswith(".")
    assert {f"import_{path}": path for path in PATHS} == {
        histogram.label: path for path, histogram in IMPORT_TIMES.items()
    }
    assert repr(HOOKS["build"]) == "<Histogram 18 hook_build>"


@pytest.mark.parametrize("number", [0, -1, NUM_HISTOGRAMS])
def test_an_id_is_given_once(number: int) -> None:
    with pytest.raises(ValueError, match=f"id {number} is taken or not below"):
        Histogram(number, "another", "Another.")


@pytest.mark.parametrize(
    ("value", "bucket"),
    [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (2**37, 38), (2**38 - 1, 38), (2**63, 38)],
)
def test_a_value_falls_into_the_bucket_of_its_bits(
    table: AnyTable, value: int, bucket: int
) -> None:
    table.histograms.observe(Histogram.REGISTRY[18], value)
    found = again(table).histograms.read(18)
    assert [place for place, count in enumerate(found.counts) if count] == [bucket]
    assert (found.count, found.total) == (1, value)
    assert table.histograms.read(17) == table.histograms.read(19) == NO_VALUES


def test_a_quantile_is_less_than_twice_the_true_one(table: AnyTable) -> None:
    for value in range(1, 1001):
        table.histograms.observe(Histogram.REGISTRY[0], value)
    found = table.histograms.read(0)
    assert [found.quantile(share) for share in (0.5, 0.99, 1.0)] == [511, 1023, 1023]
    assert NO_VALUES.quantile(0.5) is None


def test_the_difference_of_two_readings_has_what_came_between() -> None:
    def of(*counts: int) -> Distribution:
        return Distribution((*counts, *[0] * (NUM_BUCKETS - len(counts))), sum(counts))

    assert of(3, 5).since(of(1, 5)) == Distribution(of(2).counts, 2)
    assert of(1).since(of(4, 4)) == NO_VALUES  # another epoch
    assert of(1, 2) + of(0, 1) == of(1, 3)


def test_processes_that_observe_at_once_lose_nothing(table: AnyTable) -> None:
    fd = table.descriptor(writable=True)
    script = (
        "import sys, mmap\n"
        "from kvshm import _native\n"
        "memory = mmap.mmap(int(sys.argv[1]), 0)\n"
        f"for _ in range(20000): _native.observe(memory, {Histogram.REGISTRY[18].offset}, 7)\n"
    )
    command = [sys.executable, "-c", script, str(fd)]
    writers = [subprocess.Popen(command, pass_fds=[fd]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    found = table.histograms.read(18)
    assert (found.counts[3], found.total) == (40_000, 280_000)


# -- traffic


def test_traffic_is_kept_by_peer_and_path(table: AnyTable) -> None:
    add, ticks = table.traffic.add, Ticks()
    table.traffic._clock = ticks
    add("b", Epoch(7), CopyPath.SHM, loads=1, blocks=4, nbytes=400, seconds=0.5)
    add("b", Epoch(7), CopyPath.PCIE, loads=1, blocks=2, nbytes=200)
    ticks.now = 2000
    add("", Epoch(7), CopyPath.SHM, loads=1, failed=1, blocks=1, nbytes=100)
    add("c" * 40, Epoch(8), None, loads=1, failed=1)
    second = 10**9
    assert again(table).traffic.read() == [
        Traffic("b", 7, CopyPath.SHM, 2, 1, 5, 500, 400, second // 2, 2000),
        Traffic("b", 7, CopyPath.PCIE, 1, 0, 2, 200, 0, 0, 1000),
        Traffic("c" * 32, 8, CopyPath.OTHER, 1, 1, 0, 0, 0, 0, 2000),
    ]


def test_what_was_not_copied_counts_where_copies_from_that_peer_do(table: AnyTable) -> None:
    table.traffic.add("b", Epoch(7), CopyPath.NVLINK, loads=1)
    table.traffic.add("b", Epoch(7), None, loads=1, failed=1)
    [row] = table.traffic.read()
    assert (row.path, row.loads, row.failed) == (CopyPath.NVLINK, 2, 1)


def test_the_row_that_was_used_least_recently_makes_room(table: AnyTable) -> None:
    ticks = Ticks()
    table.traffic._clock = ticks
    for number in range(NUM_TRAFFIC_ROWS):
        ticks.now += 1
        table.traffic.add(f"e{number}", Epoch(number + 1), CopyPath.SHM, nbytes=10)
    ticks.now += 1
    table.traffic.add("e0", Epoch(1), CopyPath.SHM, nbytes=10)
    table.traffic.add("", Epoch(99), CopyPath.SHM, nbytes=5)
    found = {row.peer_epoch: (row.peer, row.nbytes) for row in table.traffic.read()}
    assert len(found) == NUM_TRAFFIC_ROWS
    assert (found[1], found[99]) == (("e0", 20), ("", 5))
    assert 2 not in found


def test_a_row_that_makes_no_sense_is_left_out(table: AnyTable) -> None:
    table.traffic.add("b", Epoch(7), CopyPath.SHM)
    table._segment.buffer[TRAFFIC_OFFSET + 40] = len(PATHS)
    assert table.traffic.read() == []


def test_the_slowest_path_is_that_through_the_host() -> None:
    assert slowest([CopyPath.STAGED, CopyPath.SAME_GPU, CopyPath.NVLINK]) is CopyPath.STAGED


# -- progress


def test_each_loop_shows_its_own_progress(table: AnyTable) -> None:
    ticks = Ticks()
    table.loops._clock = ticks
    table.loops.set_pending(SCHEDULER, 3)
    table.loops.went_round(FIRST_LOAD_THREAD + Rank(1))
    ticks.now = 5000
    table.beat()
    assert [
        (loop.loop, loop.pending, loop.last_ns, loop.idles) for loop in again(table).progress()
    ] == [
        ("scheduler", 3, 0, True),
        ("client", 0, 5000, False),
        ("coordinator", 0, 0, False),
        ("loads of rank 0", 0, 0, False),
        ("loads of rank 1", 0, 1000, False),
    ]


def test_each_loop_shows_the_offset_of_its_clock(table: AnyTable) -> None:
    """Whose process may be restored into another time namespace meanwhile."""
    ticks, offsets = Ticks(), [-200, None, 40_000, 40_000]
    loops = table.loops = OwnProgress(table._segment, ticks, lambda: offsets.pop(0))

    def shown() -> dict[str, int | None]:
        return {loop.loop: loop.clock_offset_ns for loop in again(table).progress()}

    loops.went_round(FIRST_LOAD_THREAD)
    assert shown()["loads of rank 0"] == -200
    ticks.now += NOTE_CLOCK_NS - 1
    loops.went_round(FIRST_LOAD_THREAD)  # a load thread goes round a thousand times a second
    assert (shown()["loads of rank 0"], len(offsets)) == (-200, 3)
    ticks.now += 1
    loops.went_round(FIRST_LOAD_THREAD)
    assert shown()["loads of rank 0"] is None
    table.beat()
    assert shown()["scheduler"] == 40_000, "the client's thread writes it"
    table.coordinator_went_round(7)
    assert shown()["coordinator"] == 7


def test_a_hook_shows_its_time_and_that_the_scheduler_goes_round(table: AnyTable) -> None:
    before = time.monotonic_ns()
    table.loops.hook_took(HOOKS["build"], before - 4_000_000, 3)
    after = time.monotonic_ns()
    seen = again(table)
    loop, *others = seen.progress()
    assert (loop.loop, loop.pending) == ("scheduler", 3)
    assert before <= loop.last_ns <= after
    assert not any(other.last_ns for other in others)
    took = seen.histograms.read(HOOKS["build"])
    assert took.count == 1
    assert took.total == loop.last_ns - (before - 4_000_000)
    table.loops.hook_took(HOOKS["build"], after + 10**12, -1)  # as if time had gone back
    assert seen.histograms.read(HOOKS["build"]).total == took.total
    assert seen.progress()[0].pending == 0
    with pytest.raises(IndexError):
        _native.hook_took(table._segment.buffer, 1 << 40, 0, LOOPS_OFFSET, 0)
    with pytest.raises(IndexError):
        _native.hook_took(table._segment.buffer, HOOKS["build"].offset, 0, 1 << 40, 0)


def test_the_oldest_load_under_way_is_known(table: AnyTable) -> None:
    ticks = Ticks()
    table._ticks = ticks  # type: ignore[method-assign]  # time as the test says
    oldest = table.take_ticket(2)
    ticks.now = 4000
    younger = table.take_ticket(1)
    assert isinstance(oldest, int)
    assert isinstance(younger, int)
    assert again(table).loads_since() == [1000, 4000]
    table.finish_ticket(oldest)
    assert table.loads_since() == [1000, 4000]  # another rank is still at work
    table.finish_ticket(oldest)
    assert table.loads_since() == [4000]


def test_no_time_of_a_load_under_way_changes_when_all_tickets_are_taken(table: AnyTable) -> None:
    ticks = Ticks()
    table._ticks = ticks  # type: ignore[method-assign]  # time as the test says
    assert None not in [table.take_ticket(1) for _ in range(NUM_TICKETS)]
    ticks.now = 9999
    assert table.take_ticket(1) is None
    assert table.loads_since() == [1000] * NUM_TICKETS
