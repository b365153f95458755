"""The progress of an engine's loops: whether they go round while work waits.

A process that lives and answers may still be stuck.  Each loop therefore writes when it last went
round, and how much work waits for it, into the engine's slot table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from kvshm import _native

from .histograms import Histogram
from .layout import LOOP_BYTES, LOOPS_OFFSET
from .segment import Segment

SCHEDULER_LOOP = "scheduler"
SCHEDULER = 0
"""The scheduler's loop; pending: requests that have not ended."""
CLIENT = 1
"""The client's thread, which must go round once a second, whether work waits or not."""
COORDINATOR = 2
"""The coordinator's main loop, as the coordinator writes it into each table of its roster, once a
second."""
COORDINATOR_LOOP = "coordinator"
FIRST_LOAD_THREAD = 3
"""That of rank 0; pending: loads under way.  It too must go round once a second."""

_SCHEDULER_OFFSET = LOOPS_OFFSET + LOOP_BYTES * SCHEDULER
_LOOP = struct.Struct("<QQ")
assert _LOOP.size == LOOP_BYTES


class Progress(NamedTuple):
    """How far one loop is."""

    loop: str
    """"scheduler", "client", "coordinator", or "loads of rank 0"."""
    pending: int
    """How much work waits for it."""
    last_ns: int
    """CLOCK_MONOTONIC when it last went round; 0: never yet."""
    idles: bool
    """Whether it stands still while no work waits."""


def read_progress(segment: Segment, num_ranks: int) -> list[Progress]:
    """The loops of an engine."""
    found = []
    for loop in range(FIRST_LOAD_THREAD + num_ranks):
        pending, last_ns = _LOOP.unpack_from(segment.buffer, LOOPS_OFFSET + LOOP_BYTES * loop)
        found.append(Progress(_name(loop), pending, last_ns, idles=loop == SCHEDULER))
    return found


class OwnProgress:
    """Writes the progress of the loops: each loop by its own thread."""

    def __init__(self, segment: Segment, clock: Callable[[], int]) -> None:
        """``clock``: nanoseconds of CLOCK_MONOTONIC."""
        self._segment = segment
        self._clock = clock

    def went_round(self, loop: int) -> None:
        """The loop goes round."""
        _native.store(self._segment.buffer, LOOPS_OFFSET + LOOP_BYTES * loop + 8, self._clock())

    def hook_took(self, hook: Histogram, begun_ns: int, pending: int) -> None:
        """A hook of the scheduler that began at ``begun_ns`` has ended: count its time, and show
        that the scheduler's loop goes round.  One call into C, because every step makes several.
        ``begun_ns``: CLOCK_MONOTONIC."""
        _native.hook_took(self._segment.buffer, hook.offset, begun_ns, _SCHEDULER_OFFSET, pending)

    def set_pending(self, loop: int, pending: int) -> None:
        """So much work waits for the loop now.  One thread, not necessarily the loop's."""
        _native.store(self._segment.buffer, LOOPS_OFFSET + LOOP_BYTES * loop, pending)


def _name(loop: int) -> str:
    of_rank = f"loads of rank {loop - FIRST_LOAD_THREAD}"
    names = {SCHEDULER: SCHEDULER_LOOP, CLIENT: "client", COORDINATOR: COORDINATOR_LOOP}
    return names.get(loop, of_rank)
