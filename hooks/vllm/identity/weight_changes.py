"""Logs and counts changes of weights."""

from __future__ import annotations

from kvshm._base.log import logger
from kvshm.halves import STILL_MAPPED, WEIGHTS_WRITTEN, ErrorCode, SchedulerHalf

from ...log_lines import HookLine
from ..messages import RankReport

log = logger(__name__)

MOST_NAMED = 100
"""Calls that the log names, each once; further ones are not named."""


class WeightChanges:
    """One engine's changes of weights.  Scheduler's thread."""

    def __init__(self, cache: SchedulerHalf) -> None:
        self._cache = cache
        self._named: set[str] = set()
        self._written = self._mapped = 0
        self._found: list[str] = []
        """What the next epoch is to record."""

    def called(self, call: str) -> None:
        """Log a call of the ranks that may write weights, once."""
        if call not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(call)
            log.line(HookLine.CALL_MAY_WRITE, call)

    def reported(self, report: RankReport) -> None:
        """Note what ranks found written, and how many unmapped memory that others still mapped."""
        self._mapped += report.still_mapped
        written = report.written
        self._written += len(written)
        self._found += [f"rank {rank}: weights written: {name}" for rank, name in written.items()]

    def epoch_began(self) -> None:
        """Carry over what the epochs before have counted: each has counters of its own."""
        if self._written:
            self._cache.count(WEIGHTS_WRITTEN, self._written)
        if self._mapped:
            self._cache.count(STILL_MAPPED, self._mapped)
        for text in self._found:
            self._cache.log_error(text, ErrorCode.WEIGHTS_WRITTEN)
        self._found.clear()
