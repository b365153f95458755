"""The engines that could not be attached, and when the next try is due."""

from __future__ import annotations

from collections.abc import Callable

from kvshm.timing import TIMING, Timing

from .protocol import EngineInfo


class RetryPause:
    """The pause between two tries: twice as long after each try, up to a bound."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._first, self._longest = timing.retry_seconds
        self._seconds = 0.0
        self._until: float | None = None

    def tried(self) -> None:
        """Begin the next pause; call it with each try."""
        self._seconds = min(self._longest, 2 * self._seconds or self._first)
        self._until = self._clock() + self._seconds

    @property
    def over(self) -> bool:
        """Whether a try is due; True before the first try."""
        return self._until is None or self._clock() >= self._until


class RetryQueue:
    """Engines that could not be attached, by epoch.  Used by one thread."""

    def __init__(self, clock: Callable[[], float], timing: Timing = TIMING) -> None:
        self._clock = clock
        self._timing = timing
        self._waiting: dict[int, tuple[EngineInfo, RetryPause]] = {}

    def add(self, info: EngineInfo) -> None:
        """Have an engine tried again after a pause."""
        new = info, RetryPause(self._clock, self._timing)
        _, pause = self._waiting.get(info.epoch, new)
        pause.tried()
        self._waiting[info.epoch] = info, pause

    def remove(self, epoch: int) -> None:
        """Forget an engine that was attached or is gone."""
        self._waiting.pop(epoch, None)

    def due(self) -> list[EngineInfo]:
        """The engines to try now."""
        return [info for info, pause in self._waiting.values() if pause.over]
