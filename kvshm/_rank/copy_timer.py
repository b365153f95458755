"""The times of one load on one rank."""

from __future__ import annotations

from collections.abc import Callable

from kvshm._engine.load_plan import CopyTimes


class CopyTimer:
    """How long a load has taken, and how long it may."""

    def __init__(
        self, clock: Callable[[], float], wall_clock: Callable[[], float], until: float | None
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self.until = until
        """When the step stops waiting for the load.  None if no step waits."""
        self.begun_at = 0.0
        """When the first of its copies began; 0 before."""
        self._copied_at = 0.0
        self._queued = False

    def begin(self, queued: bool) -> None:
        """The first copy begins.  ``queued``: behind another load's, so that it cannot be timed."""
        self._queued = queued
        self.begun_at = self._clock()

    def copied(self) -> None:
        self._copied_at = self._clock()

    def in_time(self) -> bool:
        return self.until is None or self._clock() < self.until

    @property
    def elapsed(self) -> float:
        """Seconds since the first copy began; 0 before, and if it cannot be timed."""
        return self._clock() - self.begun_at if self.begun_at and not self._queued else 0.0

    @property
    def times(self) -> CopyTimes | None:
        """When copies began and ended, by the wall clock.  None if there were none."""
        if not (self.begun_at and self._copied_at):
            return None
        since = self._wall_clock() - self._clock()
        return CopyTimes(self.begun_at + since, self._copied_at + since, self._clock() + since)
