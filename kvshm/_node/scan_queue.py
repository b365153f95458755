"""The engines whose events were lost, and when their slot tables are scanned again.

A scan takes milliseconds for each million blocks, so one serves for all events lost so far, and
scans of one table have pauses.  Until then misses are possible.
"""

from __future__ import annotations

from collections.abc import Callable

from kvshm._base.ids import Epoch
from kvshm._base.timing import TIMING, Timing

BURST_SCANS = 8
"""Scans of one table without a pause: a restart of the coordinator needs one for each join."""


class ScanQueue:
    """Epochs to scan, in the order in which they were added.  Used by one thread."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._pause = timing.rescan_pause_seconds
        self._wanted: dict[Epoch, None] = {}
        self._next_free: dict[Epoch, float] = {}
        """When the next scan would be due if each scan so far had waited for its pause."""

    def add(self, epoch: Epoch) -> None:
        self._wanted[epoch] = None

    def remove(self, epoch: Epoch) -> None:
        self._wanted.pop(epoch, None)
        self._next_free.pop(epoch, None)

    def scan_due(self, scan: Callable[[Epoch], None], should_stop: Callable[[], bool]) -> int:
        """Scan the tables that are due, at least one, until ``should_stop``; return how many."""
        now, scans = self._clock(), 0
        for epoch in list(self._wanted):
            next_free = max(now, self._next_free.get(epoch, now))
            if next_free > now + (BURST_SCANS - 1) * self._pause:
                continue
            del self._wanted[epoch]
            self._next_free[epoch] = next_free + self._pause
            scan(epoch)  # removes the epoch if the scan fails
            scans += 1
            if should_stop():
                break
        return scans
