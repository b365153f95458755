"""One line a minute about lookups: how many found a prefix, and why others imported nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvshm._base.core_lines import CoreLine
from kvshm._base.log_lines import FilledLine
from kvshm._shm import statistics as c
from kvshm._shm.slot_table import SlotTableView

PERIOD_SECONDS = 60.0

REASONS = {
    c.MISS_NO_PEER: "no peer",
    c.MISS_FINGERPRINT: "fingerprint",
    c.MISS_TOO_SHORT: "too short",
    c.MISS_TOO_LONG: "too long",
    c.MISS_NO_OWNER: "no owner",
    c.MISS_LEASE_LOST: "lease lost",
    c.MISS_QUARANTINED: "quarantined",
    c.MISS_CHEAPER: "computing is cheaper",
    c.MISS_NO_ROOM: "no room",
    c.MISS_NOT_SHARED: "request not shared",
    c.MISS_FAILED: "failed before",
    c.MISS_NOT_READ: "cache must not be read",
    c.MISS_OWN: "own block",
    c.MISS_IN_DRAIN: "in drain",
}
_READ = (c.LOOKUPS, c.LOOKUP_HITS, c.IMPORTED_TOKENS, c.LOADS_FAILED, *REASONS)


class MinuteReport:
    """Compares an engine's counters with their values a period ago.  Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._epoch = 0
        self._before: dict[c.Counter, int] = {}

    def line(self, table: SlotTableView) -> FilledLine | None:
        """Return the line to log once a period; None in between or if nothing was counted."""
        now = self._clock()
        if now - self._since < PERIOD_SECONDS:
            return None
        before = self._before if table.epoch == self._epoch else {}
        read = {counter: table.counters.read(counter) for counter in _READ}
        grown = {counter: value - before.get(counter, 0) for counter, value in read.items()}
        seconds, self._since = now - self._since, now
        self._epoch = table.epoch
        self._before = read
        if not any(grown.values()):
            return None
        return CoreLine.MINUTE.fill(seconds, _hits(grown) + _misses(grown))


def _hits(grown: dict[c.Counter, int]) -> str:
    lookups, tokens = grown[c.LOOKUPS], grown[c.IMPORTED_TOKENS]
    found = f"{grown[c.LOOKUP_HITS]} of {lookups} lookups found a prefix"
    parts = [found if lookups else "no lookups"]
    if tokens:
        parts.append(f"{tokens:,} tokens imported")
    if failed := grown[c.LOADS_FAILED]:
        parts.append(f"{failed} load{'' if failed == 1 else 's'} failed")
    return ", ".join(parts)


def _misses(grown: dict[c.Counter, int]) -> str:
    why = ", ".join(f"{text} {grown[reason]}" for reason, text in REASONS.items() if grown[reason])
    return f"; not imported: {why}" if why else ""
