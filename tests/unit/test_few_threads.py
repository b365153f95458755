"""Where no thread is to be had: errors that name the remedy, nothing left open, and another try."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm import _native
from kvshm._base.ids import Rank
from kvshm._base.timing import TIMING
from kvshm._engine.epoch_state import EngineSpec
from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.protocol import RankInfo
from kvshm._node.segment_server import SegmentClient
from kvshm._rank.rank_half import RankHalf
from kvshm._shm.fd_server import FdServer
from kvshm.config import Config
from kvshm.errors import KvshmError, TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor
from kvshm.transport.copier import Copier, CopyPlan

from ..descriptors import left_open, open_files
from ..waiting import until
from .exporters import Clock
from .few_descriptors import descriptors
from .few_threads import no_threads


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        yield Path(directory)


@pytest.fixture
def nothing_opened() -> Iterator[None]:
    before = open_files()
    yield
    assert not left_open(before)


def test_a_descriptor_server_leaves_nothing_behind(place: Path, nothing_opened: None) -> None:
    with no_threads(), pytest.raises(TransportError, match="ulimit -u") as failed:
        FdServer(place / "fds", lambda request: (request, []))
    assert os.listdir(place) == []
    assert failed.value.__cause__ is not None


@pytest.mark.parametrize("short", [no_threads, lambda: descriptors(0), lambda: descriptors(1)])
def test_a_client_leaves_nothing_behind(place: Path, short: Any, nothing_opened: None) -> None:
    with short(), pytest.raises(KvshmError, match=r"ulimit -[nu]"):
        CoordinatorClient(place, "ns", None)  # type: ignore[arg-type]  # asked nothing


def test_a_rank_says_so(place: Path) -> None:
    with no_threads(), pytest.raises(TransportError, match="ulimit -u"):
        RankHalf(None, Rank(0), SegmentClient(place, "ns"))  # type: ignore[arg-type]  # asked nothing


def test_a_copy_that_got_no_thread_fails_and_the_next_does_not_wait_for_ever() -> None:
    memory = bytearray(b"abcdefgh")
    run = (_native.address(memory), 1, 1, 8)
    plan = CopyPlan([run], [0], [run], [7], keep=(memory,))
    copier = Copier()
    with no_threads(), pytest.raises(TransportError, match="ulimit -u"):
        copier.begin(plan)
    copy, done = copier.begin(plan), threading.Event()
    copier.submit(done.set)
    assert done.wait(60)
    assert copy.poll() is CopyState.DONE
    copier.close()


@pytest.fixture
def cache(place: Path, clock: Clock) -> Iterator[SchedulerHalf]:
    config = Config.from_env({"KVSHM_NAMESPACE": "ns"})
    cache = SchedulerHalf(config, EngineSpec("me", "model", 8, 16), place, clock)
    thread = cache._client._thread
    assert thread is not None
    yield cache
    cache.close()
    thread.join(60)  # ``close`` waits a second; other tests replace what this thread calls


def opening(cache: SchedulerHalf, asked: list[float], clock: Clock) -> Callable[[], None]:
    running, ready = threading.Event(), threading.Event()

    def fields() -> dict[str, str] | None:
        running.set()
        if not ready.is_set():
            return None
        asked.append(clock.now)
        return {"weights": "w"}

    memory = MemoryDescriptor("none", 0, 0, [], {})
    cache.open_epoch([RankInfo(os.getpid(), memory)], fields)
    assert running.wait(60)
    return ready.set


@pytest.mark.parametrize("short", [no_threads, lambda: descriptors(2)])
def test_an_epoch_that_could_not_begin_begins_when_the_shortage_is_over(
    cache: SchedulerHalf, clock: Clock, place: Path, short: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[float] = []
    begin = opening(cache, asked, clock)
    with short():
        begin()
        until(lambda: cache.failed)
        clock.now += TIMING.retry_seconds[0]
        until(lambda: len(asked) == 2)
        with cache._lock:  # until it has been tried
            pass
        clock.now += 2 * TIMING.retry_seconds[0] - 0.1
    assert os.listdir(place) == []
    assert cache._open_when_ready() is None, "as the client's thread asks, every 50 ms"
    assert asked == [1000.0, 1000.0 + TIMING.retry_seconds[0]]
    clock.now += 0.1
    until(lambda: cache.epoch_state)
    assert not cache.failed
    reported = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("not sharing the prefix cache" in line for line in reported) == 1


def test_an_engine_of_more_blocks_than_a_table_can_have_shares_nothing_and_says_so(
    place: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    too_many = EngineSpec("huge", "model", (1 << 24) + 1, 16)
    cache = SchedulerHalf(Config.from_env({"KVSHM_NAMESPACE": "ns"}), too_many, place, clock)
    try:
        opening(cache, [], clock)()
        until(lambda: cache.failed)
        assert cache.table is None
    finally:
        cache.close()
    [line] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "not sharing the prefix cache" in line
    assert "16777217 blocks" in line


def test_of_an_epoch_that_a_rank_cannot_open_there_is_another_after_a_pause(
    cache: SchedulerHalf, clock: Clock, place: Path
) -> None:
    asked: list[float] = []
    opening(cache, asked, clock)()
    until(lambda: cache.epoch_state)
    assert cache.table is not None
    first = cache.table.epoch
    assert not cache.not_opened(first + 1)
    assert cache.not_opened(first)
    assert (cache.table, cache.failed, os.listdir(place)) == (None, True, [])
    assert not cache.not_opened(first)
    assert cache._open_when_ready() is None, "not before the pause is over"
    clock.now += TIMING.retry_seconds[0]
    until(lambda: cache.epoch_state)
    assert cache.table.epoch != first
    assert not cache.failed
    cache.end_epoch()
    clock.now += 100
    assert cache._open_when_ready() is None, "what was ended is not tried again"
