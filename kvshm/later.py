"""Engines that could not be attached yet, and when each is tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .protocol import EngineInfo

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 30.0


@dataclass
class _Waiting:
    info: EngineInfo
    due: float
    pause: float
    suspected: bool = False


class Later:
    """By epoch; each waits twice as long as the time before.  Used by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}

    def put(self, info: EngineInfo) -> None:
        """Have an engine tried again."""
        known = self._waiting.get(info.epoch)
        pause = FIRST_SECONDS if known is None else min(LONGEST_SECONDS, 2 * known.pause)
        suspected = known is not None and known.suspected
        self._waiting[info.epoch] = _Waiting(info, self._clock() + pause, pause, suspected)

    def suspect(self, epoch: int, suspected: bool) -> None:
        """Whoever is suspected is not tried until it has recovered."""
        if (waiting := self._waiting.get(epoch)) is not None:
            waiting.suspected = suspected

    def forget(self, epoch: int) -> None:
        """It was attached, or has gone."""
        self._waiting.pop(epoch, None)

    def due(self) -> list[EngineInfo]:
        """Those whose time has come."""
        now = self._clock()
        return [w.info for w in self._waiting.values() if now >= w.due and not w.suspected]
