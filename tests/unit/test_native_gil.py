"""When the native module gives up the GIL: a scheduler must not stand still within a step."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from kvshm import _native

from .test_native import make_table

PATIENCE = 60.0
LARGE_BATCH = 512
"""KVSHM_LARGE_BATCH in py_module.h."""


class Waiter:
    """A thread that is woken through a timer, like the client's."""

    def __init__(self) -> None:
        self.fd = _native.timer()
        self.waits, self.ran = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._wait)
        self.thread.start()
        self.waits.wait()
        # It may not have got there yet, but whatever it does now it needs the GIL for.

    def _wait(self) -> None:
        self.waits.set()
        select.select([self.fd], [], [])
        self.ran.set()


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    """No thread is asked to give up the GIL while a test runs: it does so or it does not."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    waiter = Waiter()
    yield waiter
    sys.setswitchinterval(interval)
    _native.wake(waiter.fd, 0)
    waiter.thread.join()
    os.close(waiter.fd)


def test_a_woken_thread_does_not_run_before_the_caller_waits(waiter: Waiter) -> None:
    table = make_table()
    for _ in range(10_000):
        _native.wake(waiter.fd, 0)
        _native.retract(table, [0, 1, 2])
    assert not waiter.ran.is_set()
    assert waiter.ran.wait(PATIENCE)


def test_a_large_batch_lets_others_run(waiter: Waiter) -> None:
    table = make_table()
    _native.wake(waiter.fd, 0)
    deadline = time.monotonic() + PATIENCE
    while not waiter.ran.is_set():  # it needs a core, too, while the GIL is free
        assert time.monotonic() < deadline
        _native.retract(table, [0] * LARGE_BATCH)


def test_waking_a_thread_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.wake(-1, 0)


@pytest.mark.parametrize(("first", "then"), [(0, 0), (3_600_000_000, 0), (3_600_000_000, 1)])
def test_the_time_that_was_set_last_counts(first: int, then: int) -> None:
    fd = _native.timer()
    _native.wake(fd, first)
    _native.wake(fd, then)
    assert select.select([fd], [], [], PATIENCE)[0] == [fd]
    assert os.read(fd, 8) == (1).to_bytes(8, "little")
    _native.wake(fd, 0)
    _native.wake(fd, 3_600_000_000)
    with pytest.raises(BlockingIOError):
        os.read(fd, 8)
    os.close(fd)
