"""Access to vLLM's own Scheduler: what it awaits, and resets of the prefix cache.

A reset must succeed with kvshm whenever it does in plain vLLM, although with a connector vLLM frees
the blocks of preempted requests only after the steps in flight, and loads hold blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from kvshm._base.log import LogLimit, logger

from ..log_lines import HookLine
from .call_stack import callers_with

log = logger(__name__)


class VllmScheduler:
    """vLLM's Scheduler, used through attributes that docs/vllm-facts.md lists.  EngineCore's main
    thread."""

    def __init__(self, scheduler: Any, connector: object) -> None:
        self.scheduler = scheduler
        self.alone = scheduler.connector is connector
        """Whether kvshm's connector is the engine's only one."""
        self.fence = 0
        """The step that must have ended before anything is imported; 0: none."""
        self._ran: list[Any] | None = None
        """The requests that the present reset preempts, in their order; None: it preempts none."""
        self._log_limit = LogLimit()
        self._reset = scheduler.reset_prefix_cache
        scheduler.reset_prefix_cache = self._reset_prefix_cache

    @classmethod
    def of_caller(cls, connector: object) -> VllmScheduler | None:
        """Return the scheduler among the callers, or None."""
        found = callers_with("recompute_kv_load_failures")
        return cls(found[0], connector) if found else None

    def recompute(self) -> None:
        """Make vLLM recompute failed loads, whatever the policy of an outer MultiConnector."""
        if not self.scheduler.recompute_kv_load_failures:
            log.line(HookLine.RECOMPUTE_ALL)
        self.scheduler.recompute_kv_load_failures = True

    @property
    def steps_under_way(self) -> int:
        """Most steps whose output may not have been taken in when another one is built."""
        return int(self.scheduler.vllm_config.max_concurrent_batches)

    def holds_back(self, request_id: str) -> bool:
        """Whether the request, or what is left of it after its end, waits for a load."""
        arrived = request_id in self.scheduler.finished_recving_kv_req_ids
        return not arrived and self._awaits(request_id)

    def drop_unawaited(self, reported: set[str]) -> None:
        """Leave in ``reported``, the requests whose loads are reported as ended, only those that
        vLLM awaits: it would end at another one."""
        odd = {name for name in reported if not self._awaits(name)}
        reported -= odd
        if odd and self._log_limit.allows(HookLine.LOADS_NOT_AWAITED):
            log.line(HookLine.LOADS_NOT_AWAITED, len(odd))

    def drop_held(self, saved: set[str], loading: Container[str | int]) -> None:
        """Leave in ``saved``, ended requests whose blocks another connector no longer needs, only
        those whose blocks vLLM may free for that: an import that is ``loading`` frees its request's
        when it ends, also in the same output; and vLLM would end at a request that it has freed."""
        known = self.scheduler.requests
        saved -= {name for name in saved if name in loading or name not in known}

    def drop_hashes(self) -> None:
        """Let no request hit any block that there is now."""
        manager = self.scheduler.kv_cache_manager
        manager.evict_blocks({b.block_id for b in manager.block_pool.blocks if not b.is_null})

    def _awaits(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        return bool(request.is_finished() or request.status.name == "WAITING_FOR_REMOTE_KVS")

    def may_import(self) -> bool:
        """Whether no step from before the last reset writes to free blocks any more."""
        return not self.fence or self.scheduler.processed_step_seq >= self.fence

    def free_blocks_for_reset(self, give_up: Callable[[], set[str]]) -> None:
        """Free all blocks that can be freed, because the pool is about to be reset.

        Deferred blocks are freed now, as in vLLM without a connector: computation into them runs
        after the steps in flight.  An import does not, so ``may_import`` is false until these have
        ended.  If the reset has preempted the running requests, ``give_up`` ends the loads under
        way and returns their requests, and those that wait for room after their load has ended.
        """
        if not self.alone:
            return  # another connector may import as well
        scheduler = self.scheduler
        while scheduler.deferred_frees:
            fence, blocks = scheduler.deferred_frees.popleft()
            self.fence = max(fence, self.fence)
            scheduler.kv_cache_manager.block_pool.free_blocks(reversed(blocks))
        if self._ran is not None and not scheduler.running:
            self.requeue(give_up() | set(scheduler.finished_recving_kv_req_ids), self._ran)

    def compute(self, request: Any, load_has_ended: bool) -> None:
        """Have vLLM compute all of a request that waits with the blocks of a load, now or when the
        load has ended: as if it had brought nothing."""
        if load_has_ended:
            self.requeue({request.request_id})
        else:
            self.scheduler._handle_failed_recving({request.request_id})

    def requeue(self, request_ids: set[str], ran: Sequence[Any] = ()) -> None:
        """Do now what vLLM does when all blocks of a load have failed: these requests, whose load
        has ended or is lost, wait without blocks, in their order, behind those that ``ran``."""
        scheduler = self.scheduler
        for request in [scheduler.requests[name] for name in request_ids]:
            if request.is_finished():
                scheduler._free_blocks(request)
        holding = [r for r in scheduler.kv_holding_waiting if r.request_id in request_ids]
        for request in holding:
            request.status = type(request.status).WAITING_FOR_REMOTE_KVS  # its load may have ended
            scheduler._handle_failed_recving({request.request_id})
            scheduler.finished_recving_kv_req_ids.add(request.request_id)
            scheduler._handle_blocked_waiting_request(request)
            scheduler.deferred_waiting.discard(request)
            scheduler._inflight_prefills.discard(request)
        scheduler.kv_holding_waiting.remove_requests(holding)
        scheduler.waiting.remove_requests(ran)
        for request in reversed([*ran, *holding]):
            scheduler.waiting.prepend_request(request)

    def _reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        self._ran = list(self.scheduler.running) if reset_running_requests else None
        try:
            return self._reset(reset_running_requests, *args, **kwargs)
        finally:
            self._ran = None
