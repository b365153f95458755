"""What could not be done yet, and when it is tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvshm.timing import TIMING, Timing

from .protocol import EngineInfo


class Pause:
    """Between two tries: after each twice as long as the time before."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._first, self._longest = timing.retry_seconds
        self._seconds = 0.0
        self._until: float | None = None

    def tried(self) -> None:
        """It is tried now, or was just now."""
        self._seconds = min(self._longest, 2 * self._seconds or self._first)
        self._until = self._clock() + self._seconds

    @property
    def over(self) -> bool:
        """Whether to try; so it is at first."""
        return self._until is None or self._clock() >= self._until


@dataclass
class _Waiting:
    info: EngineInfo
    pause: Pause
    suspected: bool = False


class Later:
    """Engines that could not be attached, by epoch.  Used by one thread."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._timing = timing
        self._waiting: dict[int, _Waiting] = {}

    def put(self, info: EngineInfo) -> None:
        """Have an engine tried again."""
        new = _Waiting(info, Pause(self._clock, self._timing))
        waiting = self._waiting.setdefault(info.epoch, new)
        waiting.info = info
        waiting.pause.tried()

    def suspect(self, epoch: int, suspected: bool) -> None:
        """Whoever is suspected is not tried until it has recovered."""
        if (waiting := self._waiting.get(epoch)) is not None:
            waiting.suspected = suspected

    def forget(self, epoch: int) -> None:
        """It was attached, or has gone."""
        self._waiting.pop(epoch, None)

    def due(self) -> list[EngineInfo]:
        """Those whose time has come."""
        return [w.info for w in self._waiting.values() if w.pause.over and not w.suspected]
