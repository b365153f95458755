"""The scheduler's half of the connector: one engine's block tracker, importer and shared cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any

from kvshm._ground.ids import BlockId
from kvshm._ground.log import logger
from kvshm.config import Config
from kvshm.errors import MemoryInUse
from kvshm.halves import HOOK_ERRORS, LOADS_AT_ONCE, EngineSpec, Groups, SchedulerHalf, blocks_of

from .after_prefill import BlockTracker, CompletedRuns
from .awaited_loads import end_awaited
from .groups import groups_of
from .identity import scheduler_fields, with_none_hash
from .messages import QuietStep, RankDescription, RankReport, StepMetadata
from .metrics import LoadStats
from .pool_room import PoolRoom
from .pool_watch import PoolListener, watch_pool
from .prompt_tokens import PromptTokens
from .ranks import Ranks
from .request_share import OptionChecks
from .shutdown import LEAVE_SECONDS, on_shutdown_signal
from .step_times import StepTimes
from .tracing import importer_for
from .vllm_scheduler import VllmScheduler, engine_transfer, log_role, scheduler_limits

log = logger(__name__)

MAX_FENCES = 1000
"""How often an idle engine asks its ranks about a fence, vLLM waits a millisecond in between."""

NOT_SYNCED = object()  # ``_synced_state`` while the ranks lack something: equal to no state


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
        self._num_ranks = ranks = int(vllm_config.parallel_config.world_size)
        self.importer = importer_for(vllm_config, self.cache, config, self._block_size, ranks)
        self.prompts = PromptTokens(self.cache, self.importer, self._block_size)
        self._option_checks = OptionChecks(self.cache)
        costs = self.cache.planner.costs
        self._times = StepTimes(costs, time.monotonic, vllm_config.scheduler_config)
        self.tracker: BlockTracker | None = None
        self._vllm: VllmScheduler | None = None
        self._ranks: Ranks | None = None
        self._off = False  # whether a hook has failed
        self._step = 0
        self._fences = 0  # steps without a forward pass since the last step with one
        self._synced_state: object = NOT_SYNCED
        """The cache's ``epoch_state`` if the ranks know everything about it."""
        self._announced: int | None = None  # the last epoch that the ranks were told to open
        self._resets = 0  # number of the last reset; 0: there was none
        self._describe = False  # whether the next step with a forward pass asks for descriptions
        self._descriptions: dict[int, RankDescription] = {}
        self._awaited: int | None = 0
        """The step whose output completes the ranks' descriptions (0: the start completes them);
        None while no description has been asked for."""

    # -- start and epochs

    def bind(
        self, manager: Any, listener: PoolListener, scheduler: VllmScheduler | None
    ) -> str | None:
        """Have ``listener`` watch vLLM's block pool, and decide, from vLLM's objects, whether this
        engine exports and imports; returns why it does neither, or None."""
        self._vllm = scheduler
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
            self.importer.use(PoolRoom(manager, scheduler.scheduler.requests, groups), groups)
        return None

    def _track(self, manager: Any, groups: Groups) -> Callable[[], bool]:
        """Track what is known of each block; returns whether free blocks may be kept."""
        delay = 1 if self._vllm_config.speculative_config else 0
        self.tracker = BlockTracker(self.cache, manager, groups, self.importer.may_share, delay)
        return self.tracker.kept.may_exist

    def may_import(self) -> bool:
        """Whether imports may begin now."""
        role, vllm = self.cache.role, self._vllm
        return not (self._off or role.no_imports or vllm is None) and vllm.may_import()

    def prepare_pool_reset(self) -> None:
        """vLLM is about to reset its cache, for which all blocks must be free."""
        if self._vllm is not None:
            self._vllm.free_blocks_for_reset(self._give_up_loads)

    def _give_up_loads(self) -> set[str]:
        """End all loads under way, without a step; returns the requests whose loads have ended."""
        loads, ended = self.importer.under_way(), set(self.importer.unscheduled)
        if not loads or self._ranks is None:
            return ended
        self.reset()
        given_up = self._ranks.give_up(loads)
        self.importer.discard_loads(given_up)
        return given_up | ended

    def enable_loads_at_once(self, before_output: Callable[[Any, Any], None]) -> None:
        """Let steps wait for short imports.  Not on a GPU with speculation: a drafter writes late,
        so a copy would first wait for the model.  Nor beside another connector, which may load
        into the same step."""
        device = self._vllm_config.device_config.device_type
        early = device == "cpu" or not self._vllm_config.speculative_config
        role = self.cache.role
        if not role.no_imports and early and self._vllm is not None and self._vllm.alone:
            self.importer.at_once.watch(self._vllm.scheduler, before_output)

    def reset(self) -> None:
        """End the epoch: withdraw everything now, and have the ranks describe themselves again."""
        self.withdraw()
        self._resets += 1
        self._describe = not self._off
        if self.tracker is not None:
            self.tracker.expecting = True

    def turn_off(self, error: str) -> None:
        """A hook failed, so nothing guards the published blocks any more: withdraw them, and share
        nothing until the engine is started again."""
        self.cache.count(HOOK_ERRORS)
        self.cache.log_error(error)
        self._off, self._describe, self.tracker = True, False, None
        self.withdraw()
        self.cache.record_declined(f"kvshm is off until the engine is restarted: {error}")

    def withdraw(self) -> None:
        """Publish and import nothing until another epoch begins."""
        self.cache.end_epoch()
        if self.tracker is not None:
            self.tracker.stop_expecting()
        self._descriptions.clear()
        self._awaited = None

    def started(self, given: dict[int, RankDescription] | None, ranks: Ranks | None) -> None:
        """The ranks have started.  ``given``: their descriptions; None: ask the ranks."""
        self._ranks = ranks
        if given is None:
            given = ranks.describe() if ranks is not None else {}
        self.ranks_described(given)
        self._check_descriptions(0)

    def _check_descriptions(self, step: int) -> None:
        """``step`` has ended.  If descriptions were due by then, one is missing, and no epoch can
        begin: log that, stop waiting for descriptions and keep no marks of blocks."""
        if self._awaited is None or step < self._awaited:
            return
        silent = sorted(set(range(self._num_ranks)) - self._descriptions.keys())
        numbers = ", ".join(map(str, silent))
        self.cache.decline(
            f"of {self._num_ranks} ranks, these did not describe their KV cache: {numbers}"
        )
        self.withdraw()

    def ranks_described(self, ranks: dict[int, RankDescription], answers: int = 0) -> None:
        """Ranks have described themselves; with the last description the next epoch can begin.
        ``answers``: number of the reset after which they were asked.  Descriptions of an earlier
        reset are ignored: the weights may have changed since."""
        if self._off or answers != self._resets:
            return
        self._descriptions.update(ranks)
        if len(self._descriptions) < self._num_ranks:
            return
        self._awaited = None
        ordered = [self._descriptions[rank] for rank in sorted(self._descriptions)]
        if refusal := next((d.refusal for d in ordered if d.refusal), ""):
            self.cache.decline(refusal)
            self.withdraw()
            return
        of_ranks = [d.fields for d in ordered]
        fields = scheduler_fields(self._vllm_config, self._kv_cache_config, of_ranks)
        infos = [d.info for d in ordered if d.info]
        self.cache.open_epoch(infos, partial(with_none_hash, fields))

    # -- requests

    def new_request(self, request: Any) -> None:
        if self.tracker is not None:
            self.tracker.track(request)
        self._option_checks.check(request)

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Returns what the request's answer is to say, if it has asked."""
        if self.tracker is not None:
            self.tracker.untrack(request.request_id)
        self.importer.request_finished(request.request_id)
        return self.prompts.finished(request)

    def match(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the local hit can be imported (None: ask again), and
        whether vLLM must hold the request back until they have arrived.  Nothing is imported while
        steps from before a reset may still write to free blocks."""
        if not self.may_import():
            self.importer.at_once.forget(request.request_id)
            return 0, False
        found = self.importer.match(request, num_local_tokens)
        return found, bool(found) and not self.importer.at_once.withholds(request.request_id)

    # -- every step

    def build(self, output: Any) -> StepMetadata:
        """Runs last before a step is dispatched: retract the blocks that the step writes, wait for
        leases within the drain budget, return the ranks' work for the step: mostly none."""
        self._step += 1
        tokens = output.total_num_scheduled_tokens
        self._option_checks.step_built(output.scheduled_new_reqs, self._vllm)
        self._fences = 0 if tokens else self._fences + 1
        news = not tokens or self._describe or self.importer.has_news
        quiet = not news and self.cache.epoch_state is self._synced_state
        metadata = self._build_quiet(output) if quiet else self._build(output)
        if quiet or (tokens and not metadata.at_once):
            self._times.built(self._step, tokens, len(output.num_scheduled_tokens), quiet)
        if output.scheduled_new_reqs and self._vllm is not None:
            self.prompts.step_built(output.scheduled_new_reqs, self._vllm.scheduler.requests)
        if not quiet:
            self.importer.step_dispatched()  # last: if all else fails, the loads are still there
        return metadata

    def _build_quiet(self, output: Any) -> StepMetadata:
        if (tracker := self.tracker) is not None:
            tracker.step_built(self._step, output.num_scheduled_tokens)
            if tracker.pending_changes:
                tracker.pending_changes = False
                tracker.publish_computed()
                self.cache.publisher.drain_before_dispatch()
        return QuietStep(self._step)  # the ranks only compute

    def _build(self, output: Any) -> StepMetadata:
        busy = output.total_num_scheduled_tokens > 0
        epoch_state = self.cache.epoch_state  # read first: another may follow at any time
        loads, at_once = self.importer.loads(output.num_scheduled_tokens)
        completes: CompletedRuns = []
        if (tracker := self.tracker) is not None:
            tracker.update_expecting(epoch_state)
            for load in (*loads, *at_once):
                tracker.blocks_promised(load.targets)
            # Before publishing: this same schedule() may have hashed a block that the step writes.
            if busy:
                completes = tracker.step_built(self._step, output.num_scheduled_tokens)
            tracker.publish_computed()
        self.cache.publisher.drain_before_dispatch()
        metadata = StepMetadata(
            step=self._step if busy else 0,
            open_epoch=self._newly_opened(),
            describe=self._resets if self._describe and busy else 0,
            loads=loads,
            at_once=at_once,
            patience=self.importer.at_once.step_built(),
            linger=self.importer.linger(loads, busy),
            fence=0 if busy or tracker is None else tracker.fence,
            checksums=blocks_of(run for _, run in completes) if self._config.verify else [],
        )
        # In a step that runs the model: an idle one may come between a reset and its new weights.
        if metadata.describe:
            self._awaited, self._describe = self._step, False
        waits = epoch_state is None and tracker is not None and tracker.expecting
        self._synced_state = NOT_SYNCED if waits or self._config.verify else epoch_state
        return metadata

    def build_after_failure(self, output: Any) -> StepMetadata:
        """Replace ``build`` after an error: share nothing, but hand over the loads, for which their
        requests wait.  Raises MemoryInUse if that fails, too, and the step waits for a load."""
        try:
            loads, at_once = self.importer.loads(output.num_scheduled_tokens)
            patience = self.importer.at_once.step_built()
            self.importer.step_dispatched()
        except Exception as exc:  # perhaps the same error again
            if not self.importer.step_waits:
                return StepMetadata(step=0)
            raise MemoryInUse(f"the step computes from blocks that nothing fills: {exc}") from exc
        return StepMetadata(step=0, loads=loads, at_once=at_once, patience=patience)

    def _newly_opened(self) -> int:
        table, announced = self.cache.table, self._announced
        self._announced = announced if table is None else table.epoch
        return 0 if table is None or table.epoch == announced else table.epoch

    def before_output(self, output: Any, result: Any) -> None:
        """vLLM is about to handle a step's output: finish the imports that the step waited for,
        and undo requests whose import failed, so that vLLM delivers no token of theirs."""
        metadata = output.kv_connector_metadata
        if not isinstance(metadata, StepMetadata) or not metadata.at_once:
            return
        self.cache.count(LOADS_AT_ONCE, len(metadata.at_once))
        end_awaited(self.importer, self.prompts, self.tracker, metadata.at_once, result)

    def undo_awaited(self) -> None:
        """``before_output`` failed: compute all requests that steps under way wait for again."""
        self.importer.undo_awaited()
        self.prompts.imports_failed()

    def output(
        self, finished: Set[str], report: RankReport | None, invalid: Set[int] = frozenset()
    ) -> None:
        """A step's output has arrived.  ``invalid``: blocks that loads failed to fill, including
        loads of other connectors (in a MultiConnector)."""
        if report is not None and report.quiet and not finished and not invalid:
            self._step_ended(report.step)
            return
        try:
            self._process(finished, report, invalid)
        finally:
            if finished:
                self.importer.drop(finished)

    def _process(self, finished: Set[str], report: RankReport | None, invalid: Set[int]) -> None:
        loads = report.loads if report is not None else ()
        if loads or invalid:  # most steps have none
            own = self.importer.reported(loads)
            if self.tracker is not None:
                self.tracker.blocks_failed(own.union(BlockId(b) for b in invalid))
        if report is not None:
            self._handle_report(report)
        elif self._times.unanswered() and self.tracker and self.tracker.expecting:
            self._descriptions, self._awaited = {}, 0  # no worker runs kvshm's connector
            self._check_descriptions(0)
        for done in self.importer.finish(finished) if finished else ():
            self.prompts.load_ended(done)
            if self.tracker is not None:
                self.tracker.import_ended(done)
        if self.tracker is not None:
            if report is not None and (report.step or report.fence):
                self.tracker.step_done(report.step or report.fence, fenced=not report.step)
            self.cache.publisher.flush()

    def _handle_report(self, report: RankReport) -> None:
        """Handle what the ranks report of times, epochs, weights and attached peers."""
        if report.step:
            self._times.ended(report.step)
        if report.attached:
            self.cache.planner.attached(self.importer.record_attached(report.attached))
        if report.failed:
            self.turn_off("a hook of a rank failed: its traceback is in the log")
        elif report.weights_changed:
            self.reset()
        elif report.not_opened and self.cache.not_opened(report.not_opened) and self.tracker:
            self.tracker.stop_expecting()
        if report.descriptions:
            self.ranks_described(report.descriptions, report.describes)
        if report.step:
            self._check_descriptions(report.step)

    def _step_ended(self, step: int) -> None:
        """A step has ended, and its ranks report nothing else."""
        if self._times.measured:
            self._times.ended(step)
        if self._awaited is not None:
            self._check_descriptions(step)
        if self.tracker is not None:
            self.tracker.step_done(step)

    def hook_took(self, hook: str, begun_ns: int) -> None:
        """A hook has ended: show tools its time, and that the scheduler's loop goes on."""
        unfinished = len(self._vllm.scheduler.requests) if self._vllm is not None else 0
        self.cache.hook_took(hook, begun_ns, unfinished - (hook == "finished"))

    def stats(self) -> LoadStats:
        """Return what to add to vLLM's metrics."""
        ended, prompts = self.cache.planner.take_results(), self.prompts.take()
        return LoadStats.of(ended, prompts, self._block_size)

    def must_step(self) -> bool:
        """Whether vLLM must step on without requests: with speculation the last blocks are
        published when all ranks have passed a fence.  MAX_FENCES steps at most: a rank may hang."""
        return self._fences < MAX_FENCES and self.tracker is not None and self.tracker.fence > 0

    def close(self) -> None:
        self.cache.close()
