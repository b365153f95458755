"""Requests that need what an import under way brings: copied once, it is theirs, so they wait.

They do not wait for what has nothing to do with them: the rest of a long copy while they could be
computed, or requests that vLLM schedules first because it was told to ask for these again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvshm.halves import LoadPlanner

from .at_once import PATIENCE
from .request_import import RequestImport, Way

if TYPE_CHECKING:
    from .pool_room import PoolRoom
    from .running_loads import RunningLoads

TWIN_WAIT_SECONDS = 0.1
"""How much longer than PATIENCE times its estimate an import under way is waited for."""
MOST_WAITS = 2
"""The first to lose patience imports, and the others wait for that one: if it does not end either,
copies hang, and each of them would wait longer than the one before."""
ANY_WAY = tuple(Way)
LATER: tuple[Way, ...] = ()


class Twins:
    """Scheduler's thread."""

    def __init__(
        self,
        running: RunningLoads,
        planner: LoadPlanner,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        """``block_size``: tokens per hash."""
        self.room: PoolRoom | None = None
        self._running, self._planner = running, planner
        self._block_size = block_size
        self._clock = clock

    def ways(self, import_: RequestImport, start: int, stop: int) -> tuple[Way, ...]:
        """Return in which ways the request may import its blocks ``start`` to ``stop`` now; none if
        it is to wait for another one's import."""
        twin = self._of(import_, start)
        if twin is None:
            import_.waits_for, import_.waits_until, import_.waits = None, None, 0
            return ANY_WAY
        if twin.way is Way.AT_ONCE:  # arrives with the step
            return (Way.AT_ONCE,) if self._loses_its_turn(import_, twin, start, stop) else LATER
        now, until = self._clock(), import_.waits_until
        if until is None or import_.waits_for is not twin:
            if import_.waits == MOST_WAITS:
                return ANY_WAY
            expected = self._running.seconds_left(twin)
            until = now + TWIN_WAIT_SECONDS + PATIENCE * expected
            import_.waits_for, import_.waits_until = twin, until
            import_.waits += 1
        return LATER if now < until else ANY_WAY

    def computes_sooner(self, import_: RequestImport, start: int, stop: int) -> bool:
        """Whether the request is computed before that part of an import would be copied that it
        would wait for and has no use for."""
        twin = self._of(import_, start)
        if twin is None or twin.way is Way.AT_ONCE:
            return False
        length, order = twin.load.span.length, twin.load.order
        useless = order.nbytes * (length - self._common(import_, twin)) // max(length, 1)
        seconds = self._planner.costs.load_seconds(useless)
        tokens = (stop - start) * self._block_size
        return useless > 0 and self._planner.computes_within(tokens, seconds)

    def _of(self, import_: RequestImport, start: int) -> RequestImport | None:
        """The import under way, of another request, that begins where this one's would, and leaves
        something that this one can hit."""
        found = self._running.of_block(import_.request.block_hashes[start])
        if found is None or found.request_id == import_.request_id:
            return None
        whole = any(group.window or group.state for group in self._running.groups.all)
        if whole and self._common(import_, found) < found.load.span.length:
            return None  # its windows and states are those at its end
        return found

    def _common(self, import_: RequestImport, twin: RequestImport) -> int:
        chains = import_.request.block_hashes, twin.request.block_hashes
        return twin.load.span.common(*chains)

    def _loses_its_turn(
        self, import_: RequestImport, twin: RequestImport, start: int, stop: int
    ) -> bool:
        """Whether to copy what the step's other import copies, too: because it is little of that,
        or because others would be scheduled first for many steps."""
        room = self.room
        if room is None or not room.holds_all(stop):
            return False
        little = 2 * self._common(import_, twin) < twin.load.span.length
        return little or room.others_fill_a_step(import_.request, start)
