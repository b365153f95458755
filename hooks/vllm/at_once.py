"""Imports that the very step they are scheduled in waits for: as fast as a local hit.

vLLM's own way for a synchronous load that fails is not sound: with asynchronous scheduling the
next step is under way, computed from the bad blocks, and its token would be delivered; and the
bad blocks have their hashes, which others hit.  So two things of vLLM's are taken in hand::

    matched         vLLM gives none of the request's blocks a hash: nobody else can build on them
    output arrives  before vLLM looks at it: arrived, then the hashes are given now;
                    failed, then the request is preempted with all its output under way dropped,
                    as vLLM does to reset its cache, and computed like any other

Where this vLLM lacks what that takes, every import is asynchronous.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from kvshm.log import logger

log = logger(__name__)

SECONDS_PER_STEP = 0.004
"""Longest that all copies of one step may be estimated to take together: what the other
requests of the step may wait."""
SECONDS_ALONE = 0.05
"""The same where the engine has no other request: those that arrive meanwhile wait for it."""
PATIENCE = 4.0
PATIENCE_SECONDS = 0.05
"""A step waits at most so many times the estimate, and this; or, if that is more, as long as it
would take to compute what is copied, which is what giving up costs, but no longer than ..."""
PATIENCE_MOST = 0.25

_NEEDED_OF_SCHEDULER = ("running", "requests", "_preempt_request", "update_from_output")
_NEEDED_OF_REQUEST = (
    "drop_stale_output",
    "num_stale_output_tokens",
    "num_in_flight_tokens",
    "prefill_stats",
)
_NEEDED_OF_POOL = "cache_full_blocks"


@dataclass
class _WithheldHashes:
    """A request whose blocks get no hash, and what would have given them theirs."""

    request: Any
    load_id: str = ""
    """Of the load that is to bring them; empty until blocks are allocated."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class AtOnce:
    """Which imports their step waits for, and what vLLM is kept from meanwhile.  Scheduler's
    thread."""

    def __init__(self) -> None:
        self.available = False
        self._scheduler: Any = None
        self.withheld: dict[str, _WithheldHashes] = {}
        """Requests for which ``withholds`` holds.  Only this object changes it."""
        self._estimated = self._price = 0.0

    def watch(self, scheduler: Any, before_output: Callable[[Any, Any], None]) -> None:
        """Take the two in hand: ``before_output`` is called with what ``update_from_output`` is
        called with, before it.  Without all that is needed nothing is wrapped."""
        pool = scheduler.kv_cache_manager.block_pool
        missing = [name for name in _NEEDED_OF_SCHEDULER if not hasattr(scheduler, name)]
        preempt = getattr(scheduler, "_preempt_request", None)
        if preempt and "drop_stale_output" not in signature(preempt).parameters:
            missing.append("_preempt_request(drop_stale_output=...)")
        if missing or not hasattr(pool, _NEEDED_OF_POOL):
            log.info(
                "imports are asynchronous: vLLM's scheduler has no %s", missing or _NEEDED_OF_POOL
            )
            return
        give_hashes, update = pool.cache_full_blocks, scheduler.update_from_output

        def cache_full_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
            if (held := self.withheld.get(request.request_id)) is None:
                return give_hashes(request, *args, **kwargs)
            held.calls.append(((request, *args), kwargs))
            return None

        def update_from_output(output: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(output.kv_connector_metadata, "at_once", True):  # most steps wait for none
                before_output(output, result)
            return update(output, result, *args, **kwargs)

        pool.cache_full_blocks, scheduler.update_from_output = cache_full_blocks, update_from_output
        self._scheduler, self._give_hashes = scheduler, give_hashes
        self.available = True

    # -- scheduling

    @staticmethod
    def can_undo(request: Any) -> bool:
        """Whether dropping a token of the request that was sampled leaves no trace.  Where a seed
        counts, a runner may keep the generator, which then is a draw ahead."""
        drawn = request.sampling_params.sampling_type.name == "RANDOM_SEED"
        return not drawn and all(hasattr(request, name) for name in _NEEDED_OF_REQUEST)

    def accepts(self, seconds: float, alone: bool) -> bool:
        """Whether the step being built may wait for one copy more, of so many seconds.
        ``alone``: no other request is in it, or waits to be."""
        longest = SECONDS_ALONE if alone else SECONDS_PER_STEP
        return self.available and self._estimated + seconds <= longest

    def withhold_hashes(self, request: Any, seconds: float, price: float | None) -> None:
        """vLLM is being told that the step may have these blocks: give none of the request's
        a hash until ``arrived`` or ``failed``.  ``seconds``, estimated, the copy takes, and
        computing instead ``price``; None if that is not known yet."""
        self._estimated += seconds
        self._price += PATIENCE_MOST if price is None else price
        self.withheld[request.request_id] = _WithheldHashes(request)

    def withholds(self, request_id: str) -> bool:
        """Whether hashes of the request's blocks are withheld now."""
        return request_id in self.withheld

    def begun(self, request_id: str, load_id: str) -> None:
        """The blocks are allocated; this load is to fill them."""
        self.withheld[request_id].load_id = load_id

    def without_load(self, scheduled: Container[str]) -> list[Any]:
        """Requests in the step being built that are to have blocks which no load brings: a
        failure of ours.  Those that are not in it were refused, and are forgotten."""
        none = [held.request for held in self.withheld.values() if not held.load_id]
        for request in none:
            if request.request_id not in scheduled:
                self.forget(request.request_id)
        return [request for request in none if request.request_id in scheduled]

    def step_built(self) -> float:
        """A step is complete; how long it may wait for its copies, in seconds."""
        seconds, price = self._estimated, self._price
        self._estimated = self._price = 0.0
        return max(PATIENCE_SECONDS + PATIENCE * seconds, min(price, PATIENCE_MOST))

    # -- what came of it

    def forget(self, request_id: str) -> None:
        """No blocks were allocated, or they are gone."""
        self.withheld.pop(request_id, None)

    def refused(self, request_id: str) -> None:
        """Blocks were allocated, but vLLM loads nothing into them."""
        if (held := self.withheld.pop(request_id, None)) is not None:
            self._replay(held)

    def arrived(self, request_id: str, load_id: str) -> None:
        """The load was right: give the hashes that were withheld, if the request has the blocks
        still."""
        held = self.withheld.get(request_id)
        if held is not None and held.load_id == load_id:
            del self.withheld[request_id]
            if held.request.status.name == "RUNNING":
                self._replay(held)

    def _replay(self, held: _WithheldHashes) -> None:
        for args, kwargs in held.calls:
            self._give_hashes(*args, **kwargs)

    def failed(self, request_id: str, load_id: str) -> None:
        """What the request has computed, and is computing in steps under way, is of blocks that
        did not arrive: drop all of it and compute anew."""
        held = self.withheld.get(request_id)
        if held is not None and held.load_id == load_id:
            self._undo(request_id)
        # Else it has been preempted since, with its output dropped, and matched anew.

    def undo_all(self) -> None:
        """``failed`` for all that steps under way wait for."""
        for request_id in [r for r, held in self.withheld.items() if held.load_id]:
            try:
                self._undo(request_id)
            except Exception:  # of vLLM's methods; the others are to be undone all the same
                log.exception("request %s could not be preempted, it is ended", request_id)

    def _undo(self, request_id: str) -> None:
        scheduler = self._scheduler
        request = scheduler.requests.get(request_id)
        if request is not None and not request.is_finished():
            # First, so that nothing of it is delivered whatever happens below.
            request.drop_stale_output = True
            if request.status.name == "RUNNING":  # else preempted meanwhile
                self._preempt(request)
        del self.withheld[request_id]

    def _preempt(self, request: Any) -> None:
        scheduler, stats = self._scheduler, request.prefill_stats
        request.num_stale_output_tokens = request.num_in_flight_tokens
        try:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        except Exception:  # any of vLLM's; raised again
            # It has computed from blocks that did not arrive, and would go on to.
            scheduler.finish_requests(request.request_id, type(request.status).FINISHED_ERROR)
            raise
        # It goes on as a request that was not in the step before, as after vLLM's own reset.
        getattr(scheduler, "prev_step_scheduled_req_ids", set()).discard(request.request_id)
        if stats is not None:  # what the client is told was cached
            stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, 0)
