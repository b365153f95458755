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
        """By request: until when it is not looked up again, and the tokens that groups of full
        attention share with peers."""

    def find(self, request: Any, start: int, stop: int) -> Plan | None:
        """Return a plan for a prefix of at most ``stop`` hashes behind a local hit of ``start``
        hashes, or None."""
        chain = request.block_hashes
        if self.groups.one_full:
            return self._planner.probe(chain, start, stop)
        until, common = self._in_vain.get(request.request_id, (0.0, 0))
        plan = None
        if until <= self._clock():
            plan = self._planner.probe(chain, start, stop)
            common = self._planner.common_prefix * self._block_size
            if plan is None:
                self._not_again(request.request_id, common)
        self._keep_windows(request, plan, common)
        return plan

    def _keep_windows(self, request: Any, plan: Plan | None, common: int) -> None:
        """Have vLLM keep windows where other prompts may part from this one.  By default it keeps
        them at two places only: at the end of a prompt, and at its ``shared_prefix_boundary``, the
        end of what the groups of full attention share with an earlier prompt of this engine.
        Otherwise what is imported here would be imported again for every prompt with this begin,
        and a begin that prompts of two engines have in common would never be shared."""
        own = getattr(request, "shared_prefix_boundary", None)
        if own is None:
            return
        if plan is not None:  # a boundary in front of its end would have no blocks
            end = (plan.start + plan.length) * self._block_size
            request.shared_prefix_boundary = max(own, end)
        elif own == 0:
            request.shared_prefix_boundary = common

    def declined(self, request: Any) -> None:
        """The plan that was found is not carried out: computing is faster, or there is no room."""
        if not self.groups.one_full:
            self._not_again(request.request_id, getattr(request, "shared_prefix_boundary", 0))

    def _not_again(self, request_id: str, boundary: int) -> None:
        self._in_vain[request_id] = self._clock() + AGAIN_SECONDS, boundary

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._in_vain.pop(request_id, None)
