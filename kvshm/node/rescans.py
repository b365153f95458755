"""The engines of which events were lost, and when their slot tables are scanned again.

A scan takes milliseconds for each million blocks, and a confused engine may lose events with each
message: so its table is scanned once for all that was lost so far, and not again and again.  What
the replica says of it meanwhile may be stale, which costs misses: a lease decides.
"""

from __future__ import annotations

from collections.abc import Callable

from kvshm.ids import Epoch
from kvshm.timing import TIMING, Timing

AT_ONCE = 8
"""Scans of one table that need not wait for a pause: after a restart of the coordinator each engine
is met as it joins, having published more since."""


class Rescans:
    """By epoch, in the order in which they were asked for.  Used by one thread."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._pause = timing.rescan_pause_seconds
        self._wanted: dict[Epoch, None] = {}
        self._paid_until: dict[Epoch, float] = {}
        """When all scans so far would have been due, one in each pause."""

    def ask(self, epoch: Epoch) -> None:
        """Have an engine's table scanned when that is due."""
        self._wanted[epoch] = None

    def forget(self, epoch: Epoch) -> None:
        """The engine is not attached any more."""
        self._wanted.pop(epoch, None)
        self._paid_until.pop(epoch, None)

    def work_off(self, scan: Callable[[Epoch], None], enough: Callable[[], bool]) -> int:
        """Scan the tables that are due until it is ``enough``, but one at least; returns how many
        were scanned.  The others are first the next time."""
        now, scans = self._clock(), 0
        for epoch in list(self._wanted):
            paid_until = max(now, self._paid_until.get(epoch, now))
            if paid_until > now + (AT_ONCE - 1) * self._pause:
                continue
            del self._wanted[epoch]
            self._paid_until[epoch] = paid_until + self._pause
            scan(epoch)  # which forgets it if it fails
            scans += 1
            if enough():
                break
        return scans
