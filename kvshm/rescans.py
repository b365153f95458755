"""The engines of which events were lost, and when their slot tables are scanned again.

A scan takes milliseconds for each million blocks, and a confused engine may lose events with each
message: so its table is scanned once for all that was lost so far, and then not again for a while.
What the replica says of it meanwhile may be stale, which costs misses: a lease decides.
"""

from __future__ import annotations

from collections.abc import Callable

from .terms import Epoch

PAUSE_SECONDS = 1.0
"""Between two scans of one table: the first loss after that is mended at once."""


class Rescans:
    """By epoch, in the order in which they were asked for.  Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wanted: dict[Epoch, None] = {}
        self._not_before: dict[Epoch, float] = {}

    def ask(self, epoch: Epoch) -> None:
        """Have an engine's table scanned when that is due."""
        self._wanted[epoch] = None

    def forget(self, epoch: Epoch) -> None:
        """The engine is not attached any more."""
        self._wanted.pop(epoch, None)
        self._not_before.pop(epoch, None)

    def work_off(self, scan: Callable[[Epoch], None], enough: Callable[[], bool]) -> int:
        """Scan the tables that are due until it is ``enough``, but one at least; returns how many
        were scanned.  The others are first the next time."""
        now, scans = self._clock(), 0
        for epoch in list(self._wanted):
            if now < self._not_before.get(epoch, now):
                continue
            del self._wanted[epoch]
            self._not_before[epoch] = self._clock() + PAUSE_SECONDS
            scan(epoch)  # which forgets it if it fails
            scans += 1
            if enough():
                break
        return scans
