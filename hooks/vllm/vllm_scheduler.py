"""Access to vLLM's own Scheduler: its settings, and resets of the prefix cache.

A reset must succeed with kvshm whenever it does in plain vLLM.  Two things prevent that.  vLLM
frees the blocks of preempted requests only after the steps in flight, because a connector that
imports might fill them while such a step still writes.  And a load under way holds blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from vllm import envs
from vllm.config import KVTransferConfig

from kvshm._base.log import LogLimit, logger
from kvshm._base.roles import Decision, Limit

from ..log_lines import HookLine
from .call_stack import callers_with

log = logger(__name__)

CLIENTS_IDS = "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1"


def kv_role_limit(transfer: KVTransferConfig, of: str = "") -> Limit:
    """Return the limit that a connector's kv_role sets; ``of`` names the connector."""
    return Limit(
        f"kv_role={transfer.kv_role}{of}",
        no_exports=not transfer.is_kv_producer,
        no_imports=not transfer.is_kv_consumer,
    )


def log_role(role: Decision, by_settings: bool) -> None:
    """Log the role and its cause: a warning unless kvshm's own settings are the cause."""
    level = logging.INFO if by_settings else logging.WARNING
    if role.no_imports:
        log.line(HookLine.EXPORTING_ONLY, role.no_imports, level=level)
    elif role.no_exports:
        log.line(HookLine.IMPORTING_ONLY, role.no_exports, level=level)
    else:
        log.line(HookLine.EXPORTING_AND_IMPORTING)


class VllmScheduler:
    """vLLM's Scheduler, used through attributes that docs/vllm-facts.md lists.  EngineCore's main
    thread."""

    def __init__(self, scheduler: Any, connector: object) -> None:
        self.scheduler = scheduler
        self.alone = scheduler.connector is connector
        """Whether kvshm's connector is the engine's only one."""
        self.fence = 0
        """The step that must have ended before anything may be imported; 0: none."""
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
        """Make vLLM recompute failed loads.  vLLM reads a MultiConnector's policy only, not that of
        the connectors in it."""
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

    def leave_awaited(self, reported: set[str]) -> None:
        """Leave of the requests whose loads are reported as ended, which vLLM goes through next,
        only those that it awaits: it would end at another one."""
        odd = {name for name in reported if not self._awaits(name)}
        reported -= odd
        if odd and self._log_limit.allows(HookLine.LOADS_NOT_AWAITED):
            log.line(HookLine.LOADS_NOT_AWAITED, len(odd))

    def _awaits(self, request_id: str) -> bool:
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        return bool(request.is_finished() or request.status.name == "WAITING_FOR_REMOTE_KVS")

    def may_import(self) -> bool:
        """Whether no step writes to free blocks any more: all steps that were dispatched before the
        last reset have ended."""
        return not self.fence or self.scheduler.processed_step_seq >= self.fence

    def free_blocks_for_reset(self, give_up: Callable[[], set[str]]) -> None:
        """The pool is about to be reset, for which all blocks must be free.

        Frees deferred blocks now, as vLLM does without a connector: later computation into them
        runs after the steps in flight.  An import does not, so ``may_import`` is false until these
        steps have ended.  ``give_up`` ends the loads under way and returns their requests, and the
        requests that wait for room after their load has ended; it is called only if the reset has
        preempted the running requests.
        """
        if not self.alone:
            return  # another connector may import as well
        self._free_deferred()
        if self._ran is not None and not self.scheduler.running:
            self._requeue(self._ran, give_up() | set(self.scheduler.finished_recving_kv_req_ids))

    def _free_deferred(self) -> None:
        scheduler = self.scheduler
        while scheduler.deferred_frees:
            fence, blocks = scheduler.deferred_frees.popleft()
            self.fence = max(fence, self.fence)
            scheduler.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def give_back(self, request_ids: set[str]) -> None:
        """Free the blocks of requests that wait and hold some, although their load has ended, or is
        lost: they wait as if nothing had been loaded for them."""
        self._requeue([], request_ids)

    def _requeue(self, ran: list[Any], request_ids: set[str]) -> None:
        """Do now what vLLM does later when all blocks of a load have failed: the requests wait
        without blocks, in their order and behind the requests that ``ran``."""
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


def engine_transfer(own: KVTransferConfig) -> KVTransferConfig:
    """Return the engine's transfer configuration.  In a MultiConnector vLLM gives kvshm's connector
    only ``own``; the engine's is that of the outermost connector among the callers."""
    callers = callers_with("_kv_transfer_config")
    return callers[-1]._kv_transfer_config if callers else own


def scheduler_limits(found: VllmScheduler | None, engine: KVTransferConfig) -> Iterator[Limit]:
    """Yield the limits that the engine's kv_role and vLLM's scheduler set: without the scheduler a
    failed load would be an error, and a step under way may write to a block while an import fills
    it."""
    yield kv_role_limit(engine, " of the engine")
    # vLLM ends at a client's retry of a request whose load is still under way.
    named_by_clients = bool(envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION)
    yield Limit(CLIENTS_IDS, no_exports=False, no_imports=named_by_clients)
    if found is None:
        yield Limit("vLLM's scheduler was not found", no_exports=False, no_imports=True)
        return
    config = found.scheduler.vllm_config
    late = not found.scheduler.defer_block_free and config.max_concurrent_batches > 1
    yield Limit("this vLLM frees blocks while they are written", no_exports=False, no_imports=late)
