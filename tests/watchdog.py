"""Ends a process whose test goes on long after its time limit.

The limit (pytest-timeout) raises an exception in the main thread.  That ends neither a call into C
that does not return nor, since it comes once, a clean-up that waits for ever behind it.  So later
a thread of faulthandler's, which needs no lock of Python's, writes where all threads are and ends
the process.
"""

from __future__ import annotations

import faulthandler
import os
from typing import TextIO

import pytest

GRACE_SECONDS = 600.0
"""What a test may take beyond its limit, and its clean-up at most, which waits for engines that
hang."""


class Watchdog:
    """A plugin of pytest's: each test is watched from its set-up to the end of its clean-up."""

    def __init__(self, config: pytest.Config) -> None:
        given = config.getoption("timeout", None)
        self._limit = float(config.getini("timeout") if given is None else given)
        """Of tests without one of their own; 0, by --timeout=0: none is watched."""
        self._stderr: TextIO = os.fdopen(os.dup(2), "w")  # 2 is another file while a test runs

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        marker = item.get_closest_marker("timeout")
        self._watch(float(marker.args[0]) if marker else self._limit)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_unconfigure(self) -> None:
        self._stderr.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Once a test has failed, pytest has stopped what watched it."""
        self._watch(0.0)

    def _watch(self, limit: float) -> None:
        if self._limit:
            faulthandler.dump_traceback_later(limit + GRACE_SECONDS, exit=True, file=self._stderr)
