"""Looks requests up among the peers, and remembers for a while what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvshm.halves import ONE_FULL_GROUP, Plan, SchedulerHalf

from .receipts import Receipts
from .request_import import Answer, Decision, RequestImport
from .store_fetches import StoreFetches

AGAIN_SECONDS = 0.1
"""How long, with several groups, a request that was looked up in vain is not looked up again: such
a search takes long, and vLLM asks in every step."""
AGAIN_TIMES = 100
"""And for how many times as long as the search has taken: a state is looked for block by block."""
KEPT_SECONDS = 1.0
"""How long, with several groups, a plan is kept while its request waits."""

DECIDED_SECONDS = 10.0
"""How long a decision on a waiting request is kept, so that waiting makes few trials."""


class Lookups:
    """The lookups of one engine's requests.  Scheduler's thread."""

    def __init__(self, cache: SchedulerHalf, block_size: int, clock: Callable[[], float]) -> None:
        """``block_size``: tokens per hash."""
        self.groups = ONE_FULL_GROUP
        self.receipts = Receipts(cache, clock)
        self.fetches = StoreFetches(cache, block_size, clock)
        self._planner = cache.planner
        self._block_size = block_size
        self._clock = clock

    def find(self, import_: RequestImport, start: int, stop: int) -> Plan | None:
        """Return a plan for at most ``stop`` hashes behind a local hit of ``start``, or None."""
        hashes = import_.request.block_hashes
        if self.groups.is_single_full_attention:
            return self._planner.lookup(hashes, start, stop)
        answer = import_.answer
        asked = (start, stop, hashes[stop - 1])  # the last: an adapter that changes changes it
        if answer is None or not self._holds(answer, asked):
            begun = self._clock()
            plan = self._planner.lookup(hashes, start, stop)
            again = max(AGAIN_SECONDS, AGAIN_TIMES * (self._clock() - begun))
            until = self._clock() + (again if plan is None else KEPT_SECONDS)
            common = self._planner.common_prefix * self._block_size
            import_.answer = answer = Answer(until, asked, plan, common)
        self._keep_windows(import_.request, answer.plan, answer.common)
        return answer.plan

    def _holds(self, answer: Answer, asked: tuple[int, int, bytes]) -> bool:
        if self._clock() >= answer.until:
            return False
        plan = answer.plan
        return plan is None or (answer.asked == asked and self._planner.is_current(plan))

    def _keep_windows(self, request: Any, plan: Plan | None, common: int) -> None:
        """Have vLLM keep windows where other prompts may part from this one, too: without this,
        each prompt with this prefix would import it again, and a prefix that is common to prompts
        of two engines would never be shared.  vLLM keeps them at the end of a prompt, and at its
        ``shared_prefix_boundary``, the end of what it shares with an earlier prompt."""
        own = getattr(request, "shared_prefix_boundary", None)
        if own is None:
            return
        if plan is not None:  # a boundary in front of its end would have no blocks
            end = (plan.start + plan.length) * self._block_size
            request.shared_prefix_boundary = max(own, end)
        elif own == 0:
            request.shared_prefix_boundary = common

    def is_worth(self, import_: RequestImport, plan: Plan, waiting: float) -> bool:
        """Whether to import the plan's blocks rather than compute them.  Decided once for each
        request and prefix, and again every DECIDED_SECONDS: some decisions are trials.
        ``waiting``: as for ``LoadPlanner.worth``."""
        about = plan.start, plan.length, waiting > 0, self._planner.costs.known
        decision = import_.decision
        if decision is None or decision.about != about or self._clock() >= decision.until:
            until = self._clock() + DECIDED_SECONDS
            decision = Decision(until, about, self._planner.worth(plan, waiting))
            import_.decision = decision
        if not decision.worth and not self.groups.is_single_full_attention:
            until = self._clock() + AGAIN_SECONDS
            common = getattr(import_.request, "shared_prefix_boundary", 0)
            import_.answer = Answer(until, (0, 0, b""), None, common)
        return decision.worth
