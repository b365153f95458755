"""How long fetches from a store take.  Pure: the caller measures."""

from __future__ import annotations

from kvshm._engine.costs import REFUSALS_PER_TRIAL, LinearFit


class FetchTimes:
    """Nothing is assumed of a store before it was measured: networks differ by a factor of 100."""

    def __init__(self) -> None:
        self._fit = LinearFit()
        self._refused = 0

    def add(self, nbytes: int, seconds: float) -> None:
        """A call has fetched so many bytes."""
        if nbytes > 0 and seconds > 0:
            self._fit.add(nbytes, seconds)

    def seconds(self, nbytes: int) -> float | None:
        """Return what fetching takes; None before the first."""
        if (line := self._fit.fit()) is not None:
            return line[0] + line[1] * nbytes
        if not (means := self._fit.means()):
            return None
        count, mean = max(means)
        return mean * max(nbytes / count, 1.0)

    def are_less(self, seconds: float, computing: float) -> bool:
        """Whether to fetch rather than compute; every 64th fetch that seems too slow is made, to
        learn whether it still is."""
        if seconds < computing:
            return True
        self._refused = (self._refused + 1) % REFUSALS_PER_TRIAL
        return self._refused == 0
