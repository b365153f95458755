"""The progress of an engine's loops: each writes when it last went round, and how much work waits,
with the offset of its clock, for a reader in another time namespace."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from kvshm import _native
from kvshm._base.time_namespace import UNKNOWN, clock_offset_ns

from .layout import LOOP_BYTES, LOOPS_OFFSET
from .segment import Segment
from .statistics import Histogram

SCHEDULER_LOOP = "scheduler"
SCHEDULER = 0
"""The scheduler's loop; pending: requests that have not ended."""
CLIENT = 1
"""The client's thread, which must go round once a second, whether work waits or not."""
COORDINATOR = 2
"""The coordinator's main loop, which it writes into each table of its roster once a second."""
COORDINATOR_LOOP = "coordinator"
FIRST_LOAD_THREAD = 3
"""That of rank 0; pending: loads under way.  It too must go round once a second."""

NOTE_CLOCK_NS = 900_000_000
"""Shorter than the pause between two heartbeats, each of which is to write the offset."""

_SCHEDULER_OFFSET = LOOPS_OFFSET + LOOP_BYTES * SCHEDULER
_LOOP = struct.Struct("<QQq")
assert _LOOP.size == LOOP_BYTES


class LoopProgress(NamedTuple):
    """How far one loop is."""

    loop: str
    """"scheduler", "client", "coordinator", or "loads of rank 0"."""
    pending: int
    last_ns: int
    """CLOCK_MONOTONIC of its process when it last went round; 0: never yet."""
    idles: bool
    """Whether it stands still while no work waits."""
    clock_offset_ns: int | None = 0
    """Of its process (kvshm/_base/time_namespace.py); None: not known."""


def read_progress(segment: Segment, num_ranks: int) -> list[LoopProgress]:
    found = []
    for loop in range(FIRST_LOAD_THREAD + num_ranks):
        at = LOOPS_OFFSET + LOOP_BYTES * loop
        pending, last_ns, offset = _LOOP.unpack_from(segment.buffer, at)
        known = None if offset == UNKNOWN else offset
        found.append(LoopProgress(_name(loop), pending, last_ns, loop == SCHEDULER, known))
    return found


class OwnProgress:
    """Writes the progress of the loops: each loop by its own thread."""

    def __init__(
        self,
        segment: Segment,
        clock: Callable[[], int],
        clock_offset: Callable[[], int | None] = clock_offset_ns,
    ) -> None:
        """``clock``: nanoseconds of CLOCK_MONOTONIC; ``clock_offset``: of this process."""
        self._segment = segment
        self._clock = clock
        self._clock_offset = clock_offset
        self._noted: dict[int, int] = {}

    def went_round(self, loop: int) -> None:
        self.note_clock(loop)
        _native.store(self._segment.buffer, LOOPS_OFFSET + LOOP_BYTES * loop + 8, self._clock())

    def note_clock(self, loop: int) -> None:
        """Write the offset of this process's clock for the loop, once a second at most.  Any thread
        of the loop's process, one at a time."""
        now, before = self._clock(), self._noted.get(loop)
        if before is not None and now - before < NOTE_CLOCK_NS:
            return
        self._noted[loop] = now
        offset = self._clock_offset()
        word = (UNKNOWN if offset is None else offset) % (1 << 64)
        _native.store(self._segment.buffer, LOOPS_OFFSET + LOOP_BYTES * loop + 16, word)

    def hook_took(self, hook: Histogram, begun_ns: int, pending: int) -> None:
        """Count a scheduler hook's time since ``begun_ns`` (CLOCK_MONOTONIC), and show that its
        loop goes round.  One call into C, because every step makes several."""
        _native.hook_took(self._segment.buffer, hook.offset, begun_ns, _SCHEDULER_OFFSET, pending)

    def set_pending(self, loop: int, pending: int) -> None:
        """Work waits for the loop now.  One thread, not necessarily the loop's."""
        _native.store(self._segment.buffer, LOOPS_OFFSET + LOOP_BYTES * loop, pending)


def _name(loop: int) -> str:
    of_rank = f"loads of rank {loop - FIRST_LOAD_THREAD}"
    names = {SCHEDULER: SCHEDULER_LOOP, CLIENT: "client", COORDINATOR: COORDINATOR_LOOP}
    return names.get(loop, of_rank)
