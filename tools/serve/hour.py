"""What a node has counted in the last hour, in points of half a minute.  Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..node.reading import NodeReading
from ..top.rates import Rates, measure

POINT_SECONDS = 30.0
MOST_POINTS = 120


class Point(NamedTuple):
    """Sums over all engines between two looks."""

    time: float
    """Of the second look, in seconds since 1970."""
    seconds: float
    local: int
    """Prompt tokens that were hits in an engine's own cache."""
    peer: int
    """Those that came from other engines."""
    computed: int
    copied_bytes: int
    discarded: int
    """Imported blocks that were thrown away."""


class Hour:
    """Makes a point of each half minute of looks, and forgets those of more than an hour ago."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)
        self._began: NodeReading | None = None
        self._made = 0

    def add(self, now: NodeReading) -> None:
        """Count what has changed since the last point, if that is half a minute ago."""
        if self._began is None:
            self._began = now
        elif now.at_ns - self._began.at_ns >= POINT_SECONDS * 1e9:
            self._points.append(_point(measure(self._began, now), now.real_ns / 1e9))
            self._made += 1
            self._began = now

    def since(self, seen: int) -> tuple[int, list[Point]]:
        """Return how many points there have been, and those of them after the first ``seen``."""
        new = min(self._made - seen, len(self._points))
        return self._made, list(self._points)[len(self._points) - new :]


def _point(rates: Rates, time: float) -> Point:
    changes = rates.engines.values()

    def counted(name: str) -> int:
        return sum(change.counted(name) for change in changes)

    copied = sum(
        row.nbytes
        for (_, epoch), change in rates.engines.items()
        for row in change.traffic
        if row.peer_epoch != epoch
    )
    return Point(
        time,
        rates.seconds or 0.0,
        local=counted("prompt_tokens_local"),
        peer=counted("prompt_tokens_peer"),
        computed=counted("prompt_tokens_computed"),
        copied_bytes=copied,
        discarded=counted("discarded"),
    )
