"""A line now and then that tells an engine without hits why it has none."""

from __future__ import annotations

import time
from collections.abc import Callable

from . import counters as c
from .slots import SlotTableView

PERIOD_SECONDS = 60.0

REASONS = {
    c.MISS_NO_PEER: "no peer",
    c.MISS_FINGERPRINT: "fingerprint",
    c.MISS_TOO_SHORT: "too short",
    c.MISS_NO_OWNER: "no owner",
    c.MISS_LEASE_LOST: "lease lost",
    c.MISS_QUARANTINED: "quarantined",
    c.MISS_CHEAPER: "computing is faster",
    c.MISS_NO_ROOM: "no room",
}
_READ = (c.LOOKUPS, c.IMPORTED_BLOCKS, *REASONS)


class MissReport:
    """Compares an engine's counters with those of a period ago.  Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._epoch = 0
        self._before: dict[c.Counter, int] = {}

    def line(self, table: SlotTableView) -> str | None:
        """Return what to log: once a period, and only if prefixes were looked up and not one
        block was imported in it.  A new epoch's table counts from 0."""
        now = self._clock()
        if now - self._since < PERIOD_SECONDS:
            return None
        before = self._before if table.epoch == self._epoch else {}
        read = {counter: table.counters.read(counter) for counter in _READ}
        grown = {counter: value - before.get(counter, 0) for counter, value in read.items()}
        seconds, self._since = now - self._since, now
        self._epoch, self._before = table.epoch, read
        asked = grown[c.LOOKUPS] or grown[c.MISS_NO_ROOM]  # without room nothing is looked up
        if not asked or grown[c.IMPORTED_BLOCKS]:
            return None
        why = [f"{text} {grown[reason]}" for reason, text in REASONS.items() if grown[reason]]
        reasons = ", ".join(why) or "loads under way or failed"
        return f"no hit in {grown[c.LOOKUPS]} lookups of the last {seconds:.0f} s: {reasons}"
