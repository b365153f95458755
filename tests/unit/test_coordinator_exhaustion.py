"""When the coordinator's bounds on descriptors and memory are reached, and what it says then."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import nullcontext

import pytest

from kvshm.coordinator import bounds as module
from kvshm.coordinator.__main__ import (
    EXIT_RUN_DIRECTORY,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
    _exit_status,
)
from kvshm.coordinator.bounds import EXHAUSTED_SECONDS, MAX_DESCRIPTORS, Bounds, Exhausted
from kvshm.coordinator.bounds import num_open_descriptors as real_number
from kvshm.errors import ConfigError, KvshmError, RunDirectoryError

LIMIT = 4000
AT_ONCE, LOW = 3000, 1920


class Process:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit, self.used, self.memory, self.now = LIMIT, 10, 0, 0.0
        monkeypatch.setattr(resource, "getrlimit", lambda _: (self.limit, self.limit))
        monkeypatch.setattr(module, "num_open_descriptors", lambda: self.used)
        monkeypatch.setattr(module, "private_bytes", lambda: self.memory)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def bounds_of(process: Process, max_memory: int | None = None) -> Bounds:
    return Bounds(MAX_DESCRIPTORS, max_memory, process.clock)


def test_bound_may_be_exceeded_for_a_moment_only(process: Process) -> None:
    bounds = bounds_of(process)
    process.used = MAX_DESCRIPTORS
    bounds.check()
    process.now += 0.9 * EXHAUSTED_SECONDS
    bounds.check()
    process.now += 0.1 * EXHAUSTED_SECONDS
    with pytest.raises(Exhausted, match="2048 descriptors are open, 2048 are permitted"):
        bounds.check()


@pytest.mark.parametrize(
    ("between", "raises"), [(LOW - 1, False), (LOW, True), (MAX_DESCRIPTORS - 1, True)]
)
def test_moment_starts_again_only_well_below_the_bound(
    process: Process, between: int, raises: bool
) -> None:
    bounds = bounds_of(process)
    for used in (MAX_DESCRIPTORS, between):
        process.used = used
        bounds.check()
        process.now += 0.5 * EXHAUSTED_SECONDS
    process.used = MAX_DESCRIPTORS
    with pytest.raises(Exhausted) if raises else nullcontext():
        bounds.check()


def test_there_is_no_waiting_where_the_limit_is_near(process: Process) -> None:
    process.used = AT_ONCE - 1
    bounds_of(process).check()
    process.used = AT_ONCE
    with pytest.raises(Exhausted):
        bounds_of(process).check()


def test_bounds_follow_the_limit(process: Process) -> None:
    bounds = bounds_of(process)
    process.used = 500
    bounds.check()
    assert bounds.has_room
    process.limit = 600
    assert not bounds.has_room
    with pytest.raises(Exhausted):
        bounds.check()


@pytest.mark.parametrize(
    ("limit", "used", "may_help"),
    [(1000, 750, True), (100_000, 90_000, False), (resource.RLIM_INFINITY, 1 << 30, False)],
)
def test_higher_limit_is_advised_only_where_it_would_help(
    process: Process, limit: int, used: int, may_help: bool
) -> None:
    process.limit, process.used = limit, used
    with pytest.raises(Exhausted) as raised:
        bounds_of(process).check()
    assert ("ulimit -n" in str(raised.value)) == may_help


def test_memory_has_a_bound_unless_it_is_a_programs(process: Process) -> None:
    process.memory = 600 << 20
    Bounds.within_a_program(process.clock).check()
    bounds = bounds_of(process, 600 << 20)
    bounds.check()
    process.memory += 1 << 20
    with pytest.raises(Exhausted, match="601 MiB of memory are in use, 600 MiB are permitted"):
        bounds.check()


def test_descriptors_of_the_program_come_on_top(process: Process) -> None:
    process.limit, process.used = 100_000, 300
    bounds = Bounds.within_a_program(process.clock)
    process.used = (300 + MAX_DESCRIPTORS) * 15 // 16
    assert bounds.has_room
    process.used += 1
    assert not bounds.has_room


@pytest.mark.parametrize(("number", "used"), [(errno.EMFILE, LIMIT), (errno.ENOENT, 0)])
def test_unknown_number_counts_only_where_no_descriptor_is_left(
    process: Process, monkeypatch: pytest.MonkeyPatch, number: int, used: int
) -> None:
    def fail(path: str) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        assert real_number() == used


def caused_by(error: KvshmError, number: int) -> KvshmError:
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError(errno.ENFILE, "too many"), EXIT_UNEXPECTED),
        (caused_by(RunDirectoryError("socket"), errno.ENOSPC), EXIT_UNEXPECTED),
        (caused_by(RunDirectoryError("socket"), errno.EDQUOT), EXIT_UNEXPECTED),
        (caused_by(KvshmError("descriptors"), errno.EMFILE), EXIT_UNEXPECTED),
        (caused_by(RunDirectoryError("socket"), errno.EISDIR), EXIT_RUN_DIRECTORY),
        (RunDirectoryError("mode"), EXIT_RUN_DIRECTORY),
        (ConfigError("setting"), EXIT_USAGE),
    ],
)
def test_status_says_whether_another_start_may_help(error: Exception, status: int) -> None:
    """systemd does not start it again after the last two."""
    assert _exit_status(error) == status
