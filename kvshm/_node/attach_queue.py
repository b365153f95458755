"""The engines of the roster that could not be attached, and when each is tried again."""

from __future__ import annotations

from collections.abc import Callable

from kvshm._base.timing import RetryPause, Timing

from .protocol import EngineInfo


class AttachQueue:
    """Used by one thread."""

    def __init__(self, clock: Callable[[], float], timing: Timing) -> None:
        self._clock = clock
        self._timing = timing
        self._waiting: dict[int, tuple[EngineInfo, RetryPause]] = {}
        self._closed_until = 0.0

    def __contains__(self, epoch: int) -> bool:
        return epoch in self._waiting

    def add(self, info: EngineInfo) -> None:
        """Have an engine tried again after a pause, which grows with each call."""
        _, pause = self._waiting.get(info.epoch, (info, RetryPause(self._clock, self._timing)))
        pause.tried()
        self._waiting[info.epoch] = info, pause

    def remove(self, epoch: int) -> None:
        self._waiting.pop(epoch, None)

    def due(self) -> list[EngineInfo]:
        return [info for info, pause in self._waiting.values() if pause.over]

    def close_for_a_while(self) -> None:
        """The coordinator has just not answered: a thread that waits for it sends no heartbeats."""
        self._closed_until = self._clock() + self._timing.handout_pause_seconds

    @property
    def is_closed(self) -> bool:
        return self._clock() < self._closed_until
