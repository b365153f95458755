"""Tests of which one kills its worker or hangs: test_run_ends.py runs them by their path, in a
pytest of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .. import watchdog

HANGS = os.environ.get("HANGS", "")
"""What does not come to an end within the time limit, or ""."""
if HANGS:  # long enough for the clean-up of the other tests, where the machine stands still
    watchdog.GRACE_SECONDS = 5.0
KILLED = int(os.environ.get("KILLED", -1))
"""Number of the test whose worker dies."""


def hang() -> None:
    """Go on like a call in C: an exception that a signal's handler would raise does not come."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    while True:
        signal.pause()


@pytest.fixture
def cleaned() -> Iterator[None]:
    yield
    if HANGS == "clean-up":
        hang()


@pytest.mark.timeout(2)
def test_hangs(cleaned: None) -> None:
    if HANGS == "test":
        hang()
    raise AssertionError("then pytest watches no more")


@pytest.mark.parametrize("number", range(24))
def test_runs_once(number: int) -> None:
    with (Path(os.environ["SAYS_WHO_RUNS"])).open("a") as file:
        file.write(f"{number}\n")
    if number == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
