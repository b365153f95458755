"""Finds asynchronous loads that are lost: the second line of defence.

vLLM holds a request back until every rank has reported its load, for ever if one does not.  Every
load is reported whatever happens to it, so none should be lost.  If one is not within LOST_SECONDS,
every rank ends and forgets it; when the steps under way have ended no report can arrive any more,
and vLLM computes the request.  What vLLM knows of it decides, not kvshm's records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set

from kvshm._base.log import LogLimit, logger

from ...log_lines import HookLine
from ..vllm_scheduler import VllmScheduler

log = logger(__name__)

LOST_SECONDS = 30.0
"""Far longer than a load takes: a copy of all blocks of a large request takes seconds."""
LOOK_SECONDS = 1.0
"""How often these requests are looked at."""


class HeldRequests:
    """The requests that vLLM holds back for loads of kvshm's.  EngineCore's main thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        """When they were held back, or when their load was last found to go on."""
        self._forgotten: dict[str, int] = {}  # by every rank; how many steps were built by then
        self._goes_on: dict[str, float] = {}  # after how many seconds it is tried again to end it
        self._looked_at = clock()
        self._log_limit = LogLimit(clock=clock)
        self._built = 0

    def __len__(self) -> int:
        return len(self._since)

    @property
    def hangs(self) -> bool:
        """Whether a load could not be ended and may hold up those behind it."""
        return bool(self._goes_on)

    def add(self, request_id: str) -> None:
        self.reported([request_id])  # of an earlier load nothing counts
        self._since[request_id] = self._clock()

    def reported(self, request_ids: Iterable[str]) -> None:
        """Forget these requests: vLLM knows that their loads have ended."""
        for request_id in request_ids:
            for table in (self._since, self._forgotten, self._goes_on):
                table.pop(request_id, None)

    def find_lost(
        self, vllm: VllmScheduler, end_loads: Callable[[Sequence[str]], Set[str]]
    ) -> list[str]:
        """Return, with each step, the requests whose load no rank will report, for vLLM to compute.
        ``end_loads`` has every rank end loads and forget them, and returns those that no rank
        carries out any more; it may wait for the ranks."""
        self._built += 1
        now = self._clock()
        if (since := now - self._looked_at) < LOOK_SECONDS:
            return []
        self._looked_at = now
        if (gap := since - LOOK_SECONDS) > 0:  # no steps, and so no reports: paused, or stopped
            self._since = {name: min(at + gap, now) for name, at in self._since.items()}
        self.reported([name for name in self._since if not vllm.holds_back(name)])
        arrived = self._built - vllm.steps_under_way - 1
        lost = [name for name, built in self._forgotten.items() if built <= arrived]
        self.reported(lost)
        self._end_overdue(end_loads)
        return lost

    def _end_overdue(self, end_loads: Callable[[Sequence[str]], Set[str]]) -> None:
        now = self._clock()
        waiting = self._since.keys() - self._forgotten.keys()
        if overdue := [name for name in waiting if now - self._since[name] >= LOST_SECONDS]:
            ended = end_loads(overdue)
            self._forgotten.update(dict.fromkeys(ended, self._built))
            for name in overdue:  # asking may stop the engine for a second: more and more rarely
                pause = self._goes_on.pop(name, LOST_SECONDS)
                self._since[name] = now + pause - LOST_SECONDS
                if name not in ended:
                    self._goes_on[name] = 2 * pause
            if len(ended) < len(overdue) and self._log_limit.allows(HookLine.LOAD_GOES_ON):
                log.line(HookLine.LOAD_GOES_ON, LOST_SECONDS)
