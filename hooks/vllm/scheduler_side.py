"""The scheduler's half of the connector: one engine's block tracker, importer and shared cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kvshm._base.ids import BlockId
from kvshm._base.log import logger
from kvshm.config import Config
from kvshm.errors import MemoryInUse
from kvshm.halves import (
    LOADS_AT_ONCE,
    MISS_NO_ROOM,
    EngineSpec,
    Groups,
    Marks,
    SchedulerHalf,
    blocks_of,
)

from ..log_lines import HookLine
from .call_stack import callers_with
from .combination import Combination
from .contents import Contents
from .epochs import Epochs
from .exports.block_tracker import BlockTracker
from .exports.free_order import FreeOrder
from .exports.pending_blocks import CompletedRuns
from .exports.pool_watch import PoolListener, watch_pool
from .identity.fields import scheduler_fields
from .identity.groups import groups_of
from .imports.at_once import leave_to_loads
from .imports.importer import RequestImporter
from .imports.pool_room import PoolRoom
from .imports.prompt_tokens import PromptTokens
from .imports.request_import import RequestImport, Stage, ids_of
from .imports.tracing import tracer_for
from .messages import QuietStep, RankDescription, RankReport, StepMetadata, report_in
from .metrics import LoadStats
from .ranks import Ranks
from .request_options import OptionChecks
from .roles import engine_transfer, log_role, scheduler_limits
from .shutdown import LEAVE_SECONDS, on_shutdown_signal
from .step_times import StepTimes
from .vllm_scheduler import VllmScheduler

log = logger(__name__)

FENCE_SECONDS = 2.0
"""How long an idle engine asks its ranks about a fence: a rank may hang."""

NOT_SYNCED = object()  # ``_synced_state`` while the ranks miss something: equal to no state


class SchedulerSide:
    """kvshm beside one engine's scheduler.  All methods run on the EngineCore's main thread."""

    def __init__(self, config: Config, run_dir: Path, vllm_config: Any, kv_cache_config: Any):
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._block_size = int(kv_cache_config.hash_block_size)
        spec = EngineSpec(
            name=f"vllm-{os.getpid()}",
            model=str(vllm_config.model_config.model),
            num_blocks=int(kv_cache_config.num_blocks),
            block_size=self._block_size,
            asynchronous=bool(vllm_config.scheduler_config.async_scheduling),
        )
        self.cache = SchedulerHalf(config, spec, run_dir)
        on_shutdown_signal(lambda: self.cache.leave(LEAVE_SECONDS))
        ranks = int(vllm_config.parallel_config.world_size)
        tracer = tracer_for(vllm_config, self.cache, self._block_size)
        contents = Contents(vllm_config, self._block_size, config.trust_item_ids)
        self.importer = RequestImporter(
            self.cache, config, self._block_size, ranks, time.monotonic, tracer, contents
        )
        self.prompts = PromptTokens(self.cache, self.importer.imports, self._block_size)
        self._option_checks = OptionChecks(self.cache)
        costs = self.cache.planner.costs
        self._times = StepTimes(costs, time.monotonic, vllm_config.scheduler_config)
        self.tracker: BlockTracker | None = None
        self._vllm: VllmScheduler | None = None
        self._step = 0
        self._idle_since: float | None = None  # None: the last step had a forward pass
        self._synced_state: object = NOT_SYNCED
        """The cache's ``epoch_state`` if the ranks know everything about it."""
        fields = partial(
            scheduler_fields, vllm_config, kv_cache_config, trusts_ids=config.trust_item_ids
        )
        self.epochs = Epochs(self.cache, config, ranks, fields, self._epoch_ended)

    # -- start

    def bind(
        self, manager: Any, listener: PoolListener, before_output: Callable[[Any, Any], None]
    ) -> bool:
        """Watch vLLM's block pool, and decide from vLLM's objects whether this engine exports and
        imports; False, and closed, if it does neither.  ``before_output`` is called before vLLM
        handles the output of a step that waits for imports."""
        self._vllm = VllmScheduler.of_caller(listener)
        if (refusal := self._use_manager(manager, listener)) is not None:
            self.close()
            self.cache.decline(refusal)
            return False
        # On a GPU with speculation a drafter writes late: a copy would first wait for the model.
        # Another connector may load into the same step.
        device = self._vllm_config.device_config.device_type
        early = device == "cpu" or not self._vllm_config.speculative_config
        # vLLM's worker copies the state that a request goes on from before any load of the step.
        early = early and not any(group.state for group in self.importer.lookups.groups.all)
        early = early and not self.cache.role.no_imports and self._vllm and self._vllm.alone
        adapters, at_once = self.importer.contents.adapters, self.importer.at_once
        if self._vllm and (early or adapters):
            at_once.watch(self._vllm.scheduler, before_output, bool(early), adapters is not None)
        if adapters is not None and at_once.watches:
            adapters.before_change = self._forget_import
        else:
            self.importer.contents.adapters = None
        for multi in () if self.cache.role.no_imports else callers_with("sub_connectors"):
            Combination(multi, listener, self._block_size, longest=self._config.beside)
        return True

    def _use_manager(self, manager: Any, listener: PoolListener) -> str | None:
        """Returns why this engine shares nothing, or None."""
        scheduler = self._vllm
        groups = groups_of(self._kv_cache_config, manager)
        if isinstance(groups, str):
            return groups
        decide, engine = self._config.decide_role, self._vllm_config.kv_transfer_config
        limits = [*scheduler_limits(scheduler, engine_transfer(engine))]
        track = None if decide(*limits).no_exports else partial(self._track, manager, groups)
        limits += watch_pool(manager.block_pool, listener, track)
        self.cache.role = role = decide(*limits)
        self.tracker = None if role.no_exports else self.tracker
        if role.refusal is not None:
            return role.refusal
        log_role(role, by_settings=role == decide())
        if scheduler is not None and not role.no_imports:
            scheduler.recompute()
            self.prompts.names_peers = groups.is_single_full_attention
            requests = scheduler.scheduler.requests
            tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
            self.importer.use(PoolRoom(manager, requests, groups, tokens), groups)
        return None

    def _track(self, manager: Any, groups: Groups) -> Callable[[], bool]:
        """Track what is known of each block; returns whether the order of free ones may change."""
        delay = 1 if self._vllm_config.speculative_config else 0
        pool, first = manager.block_pool, self._config.duplicates_first
        marks = Marks(len(pool.blocks), pool.null_block.block_id)
        order = FreeOrder(self.cache, pool, marks, duplicates_first=first)
        may_share = self.importer.may_share
        self.tracker = BlockTracker(self.cache, manager, groups, may_share, marks, order, delay)
        return order.may_change

    # -- resets of vLLM's pool

    def prepare_pool_reset(self) -> None:
        """Free what imports hold: vLLM resets its pool only if no block is in use."""
        if self._vllm is not None:
            self._vllm.free_blocks_for_reset(self._give_up_loads)

    def _give_up_loads(self) -> set[str]:
        """End all loads under way, without a step; returns the requests whose loads have ended."""
        loads, ended = self.importer.running.under_way(), self.importer.unscheduled
        if not loads or (ranks := self.epochs.ranks) is None:
            return ended
        self.epochs.reset()  # then no rank begins another copy
        given_up = ranks.give_up(loads)
        self.importer.running.finish(given_up)  # without a result: no rank will report them
        return given_up | ended

    # -- epochs

    def ranks_started(
        self, described: dict[tuple[int, int], Any], may_write: Callable[[str], None]
    ) -> None:
        """The ranks have started, and have ``described`` themselves by pipeline and tensor rank.
        ``may_write`` is called before later calls of the ranks that may write weights."""
        contents = self.importer.contents
        for core in callers_with("preprocess_add_request") if contents.wanted else ():
            contents.watch(core)
        by_rank = dict(enumerate(described[key] for key in sorted(described)))
        own = bool(by_rank) and all(isinstance(d, RankDescription) for d in by_rank.values())
        self.epochs.started(by_rank if own else None, Ranks.of_caller(), may_write)

    def _epoch_ended(self) -> None:
        if self.epochs.off:
            self.tracker = None
        elif self.tracker is not None:
            self.tracker.stop_expecting()

    # -- requests

    def new_request(self, request: Any) -> None:
        adapters = self.importer.contents.adapters
        if adapters is not None and request.lora_request is not None:
            adapters.arrived(request)
        if self.tracker is not None:
            self.tracker.track(request)
        self._option_checks.check(request)

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Returns what the request's answer is to contain, if it has asked."""
        if (adapters := self.importer.contents.adapters) is not None:
            adapters.finished(request)
        if self.tracker is not None:
            self.tracker.untrack(request.request_id)
        self.importer.request_finished(request.request_id)
        return self.prompts.finished(request, self.tracker)

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """vLLM has allocated blocks, some of them for what ``match`` has found."""
        tables = ids_of(blocks) if num_external else []
        self.importer.allocated(request, tables, num_external)

    def allocation_failed(self, request: Any, blocks: Any, num_external: int) -> None:
        """``allocated`` has failed.  The request waits for a load: one is reported as lost."""
        if num_external > 0:
            self.importer.allocation_failed(request, ids_of(blocks), num_external)

    def match(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local hit can be imported (None: ask again), and
        whether vLLM must hold the request back for them."""
        if not self.may_import() or self.importer.held.hangs:
            self.importer.pass_over(request.request_id)
            return 0, False
        early = request.block_hashes and self.cache.lookups_are_early
        if early and self.importer.may_share(request):
            return None, False
        found = self.importer.match(request, num_local_tokens)
        return found, bool(found) and self.importer.holds_back(request.request_id)

    def may_import(self) -> bool:
        """Whether imports may begin now."""
        role, vllm = self.cache.role, self._vllm
        return not (self.epochs.off or role.no_imports or vllm is None) and vllm.may_import()

    # -- requests that cannot go on by themselves

    def _compute_lost(self) -> None:
        """Have vLLM compute the requests whose loads are lost; may wait for the ranks if a load is
        overdue."""
        if (vllm := self._vllm) is None or (ranks := self.epochs.ranks) is None:
            return
        lost = self.importer.held.find_lost(vllm, ranks.end_loads)
        for request_id in lost:
            bad = self.importer.running.give_up(vllm.scheduler.requests[request_id])
            if self.tracker is not None:
                self.tracker.blocks_failed(bad)
        if lost:
            vllm.requeue(set(lost))
            log.line(HookLine.LOADS_LOST, len(lost))

    def _free_stuck(self) -> None:
        """Give back the blocks of requests whose load has ended, if no request can run before they
        do and there is no room for their rest.  For a step without tokens; they are computed then.

        vLLM schedules no request behind such a one.  There was room when the load began; but a
        session may have taken it, and then wait behind that request, for ever.
        """
        if (vllm := self._vllm) is None or (room := self.importer.room) is None:
            return
        scheduler = vllm.scheduler
        holding = list(scheduler.kv_holding_waiting)
        if scheduler.running or scheduler.deferred_frees or all(map(room.has_room, holding)):
            return
        if stuck := {request.request_id for request in holding} & self.importer.unscheduled:
            vllm.requeue(stuck)
            self.cache.count(MISS_NO_ROOM, len(stuck))

    # -- every step

    def build(self, output: Any) -> StepMetadata:
        """Return the ranks' work for the step that is dispatched next, mostly none: retracts the
        blocks that it writes, and waits for leases within the drain budget."""
        self._step += 1
        self.epochs.check_experts()
        tokens = output.total_num_scheduled_tokens
        new, vllm = output.scheduled_new_reqs, self._vllm
        if new and vllm is not None:
            self._option_checks.step_built(new, vllm.scheduler.requests)
        self._idle_since = None if tokens else self._idle_since or time.monotonic()
        if self.importer.held:
            self._compute_lost()
        if not tokens and self.importer.unscheduled:
            self._free_stuck()
        news = not tokens or self.epochs.descriptions.wanted or self.importer.step.has_news
        quiet = not news and self.cache.epoch_state is self._synced_state
        metadata = self._build_quiet(output) if quiet else self._build(output)
        if quiet or (tokens and not metadata.at_once):
            self._times.built(self._step, tokens, len(output.num_scheduled_tokens), quiet)
        if new and vllm is not None:
            self.prompts.step_built(new, vllm.scheduler.requests)
        if not quiet:
            self.importer.step_dispatched()  # last: if all else fails, the loads are still there
        return metadata

    def _build_quiet(self, output: Any) -> StepMetadata:
        if (tracker := self.tracker) is not None:
            preempted = output.preempted_req_ids
            tracker.step_built(self._step, output.num_scheduled_tokens, preempted)
            if tracker.pending_changes:
                tracker.pending_changes = False
                tracker.publish_computed()
                self.cache.publisher.drain_before_dispatch()
        return QuietStep(self._step)  # the ranks only compute

    def _build(self, output: Any) -> StepMetadata:
        busy = output.total_num_scheduled_tokens > 0
        epoch_state = self.cache.epoch_state  # read first: another may follow at any time
        loads, at_once = self.importer.loads(output.num_scheduled_tokens)
        leave_to_loads(output, at_once)
        completes: CompletedRuns = []
        # In a step that runs the model: an idle one may come between a reset and its new weights.
        describe = self.epochs.descriptions.ask(self._step) if busy else 0
        if (tracker := self.tracker) is not None:
            tracker.update_expecting(epoch_state, self.cache.failed)
            tracker.expecting |= describe > 0
            for load in (*loads, *at_once):
                tracker.blocks_promised(load.targets)
            # Before publishing: this same schedule() may have hashed a block that the step writes.
            if busy:
                preempted = output.preempted_req_ids
                completes = tracker.step_built(self._step, output.num_scheduled_tokens, preempted)
            tracker.publish_computed()
        self.cache.publisher.drain_before_dispatch()
        metadata = StepMetadata(
            step=self._step if busy else 0,
            open_epoch=self.epochs.newly_opened(),
            describe=describe,
            loads=loads,
            at_once=at_once,
            patience=self.importer.at_once.step_built(),
            linger=self.importer.linger(loads, busy),
            fence=0 if busy or tracker is None else tracker.fence,
            checksums=blocks_of(run for _, run in completes) if self._config.verify else [],
        )
        waits = epoch_state is None and tracker is not None and tracker.expecting
        self._synced_state = NOT_SYNCED if waits or self._config.verify else epoch_state
        return metadata

    def build_after_failure(self, output: Any) -> StepMetadata:
        """Replace ``build`` after an error: only hand over the loads, for which requests wait.
        Raises MemoryInUse if that fails, too, and the step waits for a load."""
        try:
            loads, at_once = self.importer.loads(output.num_scheduled_tokens)
            patience = self.importer.at_once.step_built()
            self.importer.step_dispatched()
            with suppress(Exception):  # perhaps this has failed; the next step looks again
                self._compute_lost()
        except Exception as exc:  # perhaps the same error again
            if not self.importer.step_waits:
                return StepMetadata(step=0)
            raise MemoryInUse(f"the step computes from blocks that nothing fills: {exc}") from exc
        return StepMetadata(step=0, loads=loads, at_once=at_once, patience=patience)

    def before_output(self, output: Any, result: Any) -> None:
        """Finish the imports that a step waited for, before vLLM handles its output, and roll back
        the requests whose import failed, or whose adapter is another one than they were hashed
        with, so that vLLM delivers no token of theirs."""
        metadata, report = output.kv_connector_metadata, report_in(result)
        if isinstance(metadata, StepMetadata) and metadata.at_once:
            self.cache.count(LOADS_AT_ONCE, len(metadata.at_once))
            reports = report.loads if report is not None else []
            for import_ in self.importer.running.finish_at_once(metadata.at_once, reports):
                self._import_ended(import_)
        if report is not None and report.adapters:
            self._adapters_loaded(report)

    def _import_ended(self, import_: RequestImport) -> None:
        self.prompts.import_ended(import_)
        if import_.load.good:
            self.importer.at_once.arrived(import_)
            if self.tracker is not None:
                self.tracker.import_ended(import_.request_id, import_.load.good)
            return
        if self.tracker is not None:  # before ``failed`` frees the request's blocks
            self.tracker.blocks_failed(import_.load.bad)
        self.importer.at_once.failed(import_)

    def _adapters_loaded(self, report: RankReport) -> None:
        """Learn which adapters a step has loaded.  If one has other contents, unannounced, steps
        have computed with these under the old ones' keys, on top of blocks hit or imported by
        these: vLLM computes it again, and all of other adapters, which may have had equal ones."""
        adapters, vllm = self.importer.contents.adapters, self._vllm
        if adapters is None or vllm is None:
            return
        if not (adapters.learn(report.adapters) or report.adapter_changed):
            return
        vllm.drop_hashes()
        for request in adapters.requests():
            if not request.mm_features:
                self.importer.at_once.undo(request)
            elif self.importer.has_imported(request):  # the ranks have no image of what was there
                self.importer.at_once.fail(request)
        adapters.disown()

    def _forget_import(self, request: Any) -> None:
        """Have vLLM compute a request that waits for an import, or has waited for one and was not
        scheduled since: what it brings was computed with other contents of the adapter."""
        if (import_ := self.importer.waits_for(request)) is None or self._vllm is None:
            return
        bad = self.importer.running.spoil(import_)
        if self.tracker is not None:
            self.tracker.blocks_failed(bad)
        self._vllm.compute(request, import_.stage is Stage.LOADED)

    def roll_back(self) -> None:
        """After ``before_output`` failed: have all requests that steps wait for computed again."""
        for import_ in self.importer.roll_back():
            self.prompts.import_ended(import_)

    def saved(self, request_ids: set[str]) -> None:
        """Other connectors have saved what they wanted of these requests, which have ended.  Leaves
        in ``request_ids`` only those whose blocks vLLM may free for that.  Before ``output``."""
        if self._vllm is not None:
            self._vllm.drop_held(request_ids, self.importer.running.by_id)

    def output(
        self, finished: set[str], report: RankReport | None, invalid: Set[int] = frozenset()
    ) -> None:
        """Handle a step's output.  ``invalid``: blocks that loads failed to fill, also those of
        other connectors.  Leaves in ``finished`` only what vLLM awaits."""
        self.epochs.check_experts()  # first: the step may have computed with others' new experts
        if report is not None and report.quiet and not finished and not invalid:
            self._step_ended(report.step)
            return
        if finished and self._vllm is not None:
            self._vllm.drop_unawaited(finished)
        try:
            self._process(finished, report, invalid)
        finally:
            self.importer.running.drop(finished)

    def _process(self, finished: Set[str], report: RankReport | None, invalid: Set[int]) -> None:
        loads = report.loads if report is not None else ()
        if loads or invalid:  # most steps have none
            own = self.importer.running.reported(loads)
            if self.tracker is not None:
                self.tracker.blocks_failed(own.union(BlockId(b) for b in invalid))
        if report is not None:
            self._handle_report(report)
        elif self._times.unanswered() and self.tracker and self.tracker.expecting:
            self.epochs.unanswered()
        for import_ in self.importer.finish(finished) if finished else ():
            if self.tracker is not None:
                self.tracker.import_ended(import_.request_id, import_.load.good)
        if self.tracker is not None:
            if report is not None and (report.step or report.fence):
                self.tracker.step_done(report.step or report.fence, fenced=not report.step)
            self.cache.publisher.flush()

    def _handle_report(self, report: RankReport) -> None:
        """Handle what the ranks report of times, epochs, weights and attached peers."""
        if report.step:
            self._times.ended(report.step)
        if report.attached:
            self.importer.peers.attached.update(report.attached)
            self.cache.planner.attached(self.importer.peers.everywhere)
        self.epochs.reported(report)

    def _step_ended(self, step: int) -> None:
        if self._times.measured:
            self._times.ended(step)
        if self.epochs.descriptions.awaited:
            self.epochs.check(step)
        if self.tracker is not None:
            self.tracker.step_done(step)

    def hook_took(self, hook: str, begun_ns: int) -> None:
        """Show tools a hook's time, and that the scheduler's loop goes on."""
        unfinished = len(self._vllm.scheduler.requests) if self._vllm is not None else 0
        self.cache.hook_took(hook, begun_ns, unfinished - (hook == "finished"))

    def take_stats(self) -> LoadStats | None:
        """Return what to add to vLLM's metrics; None: nothing was counted since the last call."""
        if not (self.cache.planner.results or self.prompts.unsent):
            return None
        ended, prompts = self.cache.planner.take_results(), self.prompts.take()
        return LoadStats.of(ended, prompts, self._block_size)

    def must_step(self) -> bool:
        """Whether vLLM must step on without requests, for FENCE_SECONDS at most: with speculation
        the last blocks are published when all ranks have passed a fence."""
        if self.tracker is None or not self.tracker.fence:
            return False
        return self._idle_since is None or time.monotonic() - self._idle_since < FENCE_SECONDS

    def close(self) -> None:
        self.cache.end_epoch(leaves=True)
        self.epochs.close()  # first: the cache's last act is to remove what no process maps
        self.cache.close()
