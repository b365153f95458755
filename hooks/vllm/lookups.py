"""Looks requests up among the peers, and remembers what was looked for in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvshm.engine.load_plan import Plan
from kvshm.engine.load_planner import LoadPlanner
from kvshm.engine.prefix_search import ONE_FULL_GROUP

AGAIN_SECONDS = 0.1
"""How long a request that was looked up in vain is not looked up again, with several groups: a
search takes long then, and vLLM asks in every step while the request waits for room."""


class Lookups:
    """The lookups of one engine's requests.  Scheduler's thread."""

    def __init__(self, planner: LoadPlanner, block_size: int, clock: Callable[[], float]) -> None:
        """``block_size``: tokens per hash."""
        self.groups = ONE_FULL_GROUP
        self._planner = planner
        self._block_size = block_size
        self._clock = clock
        self._in_vain: dict[str, tuple[float, int]] = {}
        """By request: until when it is not looked up again, and what its last lookup has made of
        its ``shared_prefix_boundary``."""

    def find(self, request: Any, start: int, stop: int) -> Plan | None:
        """Return a plan for a prefix of at most ``stop`` hashes behind a local hit of ``start``
        hashes, or None."""
        chain = request.block_hashes
        if self.groups.one_full:
            return self._planner.probe(chain, start, stop)
        now = self._clock()
        until, boundary = self._in_vain.get(request.request_id, (now, 0))
        plan = None
        if until <= now:
            plan = self._planner.probe(chain, start, stop)
            boundary = self._planner.common_prefix * self._block_size
            if plan is None:
                self._not_again(request.request_id, boundary)
        # Have vLLM keep the windows at the end of what the groups of full attention share with a
        # prompt of a peer, as it does for a prompt of its own.  By default it keeps windows at ends
        # of prompts only: no common begin of two prompts would ever be shared.
        if getattr(request, "shared_prefix_boundary", -1) == 0:
            request.shared_prefix_boundary = boundary
        return plan

    def declined(self, request: Any) -> None:
        """The plan that was found is not carried out: computing is faster, or there is no room."""
        if not self.groups.one_full:
            self._not_again(request.request_id, request.shared_prefix_boundary)

    def _not_again(self, request_id: str, boundary: int) -> None:
        self._in_vain[request_id] = self._clock() + AGAIN_SECONDS, boundary

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._in_vain.pop(request_id, None)
