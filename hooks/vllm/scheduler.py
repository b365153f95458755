"""The connector's half in the scheduler's process: ties exporter and importer to the cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import Any

from kvshm.config import Config
from kvshm.engine.cache import SharedCache
from kvshm.engine.epoch_state import EngineSpec
from kvshm.engine.marks import blocks_of
from kvshm.ids import BlockId
from kvshm.log import logger
from kvshm.roles import Decision, Limit
from kvshm.shm.counters import LOADS_AT_ONCE

from .after_prefill import Completed, Exporter
from .before_prefill import Importer
from .identity import scheduler_fields, with_none_hash
from .leaving import when_told_to_end
from .limits import say_role, scheduler_limits
from .messages import QuietStep, RankDescription, RankReport, StepMetadata
from .metrics import LoadStats
from .pool_room import PoolRoom
from .pool_watch import PoolChanged, PoolListener, watch_blocks, watch_resets
from .ranks import Ranks
from .step_times import StepTimes
from .vllm_scheduler import VllmScheduler

log = logger(__name__)

MAX_FENCES = 1000
"""How often an engine that falls idle asks whether its last step is through; vLLM waits a
millisecond in between."""

UNTOLD = object()
"""No life of the cache."""


class SchedulerSide:
    """One engine's scheduler.  All methods run on the EngineCore's main thread."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        vllm_config: Any,
        kv_cache_config: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
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
        self.cache = SharedCache(config, spec, run_dir)
        when_told_to_end(self.cache.leave)
        self._num_ranks = int(vllm_config.parallel_config.world_size)
        self.importer = Importer(
            self.cache, config, self._block_size, clock, num_ranks=self._num_ranks
        )
        self._times = StepTimes(self.cache.planner.costs, clock, vllm_config.scheduler_config)
        self._requests: dict[str, Any] = {}
        self.exporter: Exporter | None = None
        self._vllm: VllmScheduler | None = None
        self._importing = False
        self._ranks: Ranks | None = None
        self._step = 0
        self._fences = 0
        """Steps without a model since the last one with."""
        self._told: object = UNTOLD
        """The life of the cache of which the ranks know everything."""
        self._announced: int | None = None
        self._resets = 0
        self._describe = False
        self._descriptions: dict[int, RankDescription] = {}
        self._awaited: int | None = 0
        """The step whose output completes the descriptions (0: what the start brings does);
        None while nothing is awaited, or not asked for yet."""

    # -- start and epochs

    def bind(
        self, manager: Any, listener: PoolListener, scheduler: VllmScheduler | None
    ) -> str | None:
        """Have ``listener`` watch vLLM's block pool, and decide what this engine does by what is
        found of vLLM; returns why that is nothing, or None."""
        self._vllm = scheduler
        limits = [*scheduler_limits(scheduler)]
        limits += self._watch(manager, listener, self._config.decide_role(*limits))
        role = self._config.decide_role(*limits)
        if role.refusal is not None:
            return role.refusal
        say_role(role, self._config)
        self._importing = not role.no_imports
        if self._importing and scheduler is not None:
            scheduler.recompute()
        self.importer.room = PoolRoom(manager, self._requests, self._block_size)
        return None

    def _watch(self, manager: Any, listener: PoolListener, role: Decision) -> Iterator[Limit]:
        """Watch the block pool, as far as ``role`` needs that; yields what cannot be done because
        it cannot be watched."""
        resets_are_seen = False
        try:
            watch_resets(manager.block_pool, listener)
            resets_are_seen = True
            if not role.no_exports:
                delay = 1 if self._vllm_config.speculative_config else 0
                wants = self.importer.wants
                exporter = Exporter(self.cache, manager, self._block_size, wants, delay)
                watch_blocks(manager.block_pool, listener)
                self.exporter = exporter
        except PoolChanged as exc:
            yield Limit(str(exc), no_exports=True, no_imports=not resets_are_seen)

    def may_import(self) -> bool:
        """Whether imports may begin now."""
        return self._importing and self._vllm is not None and self._vllm.may_import()

    def make_way_for_reset(self) -> None:
        """vLLM is about to reset its cache, for which all blocks must be free."""
        if self._vllm is not None:
            self._vllm.make_way(self._give_up_loads)

    def _give_up_loads(self) -> set[str]:
        """End all loads under way, without a step; returns whose loads have or had ended."""
        loads, landed = self.importer.under_way(), set(self.importer.landed)
        if not loads or self._ranks is None:
            return landed
        self.reset()
        ended = self._ranks.give_up(loads)
        self.importer.given_up(ended)
        return ended | landed

    def let_steps_wait(self, before_output: Callable[[Any, Any], None]) -> None:
        """Let steps wait for short imports, where that waits for nothing else: with speculation
        a drafter on a GPU writes late, so that copies have to wait for the model.  Not beside
        other connectors, which may load into the same step."""
        device = self._vllm_config.device_config.device_type
        early = device == "cpu" or not self._vllm_config.speculative_config
        if self._importing and early and self._vllm is not None and self._vllm.alone:
            self.importer.at_once.watch(self._vllm.scheduler, before_output)

    def reset(self) -> None:
        """Begin another life: withdraw everything now, describe the ranks anew next step."""
        self.withdraw()
        self._resets += 1
        self._describe = True
        if self.exporter is not None:
            self.exporter.expecting = True

    def withdraw(self) -> None:
        """Show nothing any more, and import nothing, until another epoch is begun."""
        self.cache.end_epoch()
        if self.exporter is not None:
            self.exporter.expect_nothing()
        self._descriptions.clear()
        self._awaited = None

    def started(self, given: dict[int, RankDescription] | None, ranks: Ranks | None) -> None:
        """The ranks are there.  ``given``: what they said of themselves, unless they are to be
        asked."""
        self._ranks = ranks
        if given is None:
            given = ranks.describe() if ranks is not None else {}
        self.described(given)
        self._answers_are_in(0)

    def _answers_are_in(self, step: int) -> None:
        """Without a rank no epoch can begin: say so, and wait and keep marks for it no longer."""
        if self._awaited is None or step < self._awaited:
            return
        silent = sorted(set(range(self._num_ranks)) - self._descriptions.keys())
        log.warning(
            "not sharing the prefix cache: of %d ranks these have not said where their KV cache "
            "lies: %s",
            self._num_ranks,
            ", ".join(map(str, silent)),
        )
        self.withdraw()

    def described(self, ranks: dict[int, RankDescription], answers: int = 0) -> None:
        """Ranks have described themselves; with the last one the next epoch can begin.
        Descriptions that answer an earlier reset are ignored: they left before the latest
        one, and the weights may have changed since.
        """
        if answers != self._resets:
            return
        self._descriptions.update(ranks)
        if len(self._descriptions) < self._num_ranks:
            return
        self._awaited = None
        ordered = [self._descriptions[rank] for rank in sorted(self._descriptions)]
        refusals = [d.refusal for d in ordered if d.refusal]
        if refusals:
            log.warning("not sharing the prefix cache: %s", refusals[0])
            self.withdraw()
            return
        of_ranks = [d.fields for d in ordered]
        fields = scheduler_fields(self._vllm_config, self._kv_cache_config, of_ranks)
        infos = [d.info for d in ordered if d.info]
        self.cache.open_epoch(infos, partial(with_none_hash, fields))

    # -- requests

    def new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        if self.exporter is not None:
            self.exporter.follow(request)

    def request_finished(self, request: Any) -> None:
        self._requests.pop(request.request_id, None)
        if self.exporter is not None:
            self.exporter.unfollow(request.request_id)
        self.importer.finished(request.request_id)

    def match(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that another engine holds beyond the local hit, None for "ask again", and
        whether vLLM is to hold the request back until they have arrived."""
        if not self._importing or (self._vllm and self._vllm.fence and not self.may_import()):
            self.importer.at_once.forget(request.request_id)
            return 0, False
        found = self.importer.match(request, num_local_tokens)
        return found, bool(found) and not self.importer.at_once.expects(request.request_id)

    # -- every step

    def build(self, output: Any) -> StepMetadata:
        """The last thing before a step is dispatched: withdraw what it writes, wait for
        leases within the budget, pack up what the ranks have to do: mostly nothing."""
        self._step += 1
        tokens = output.total_num_scheduled_tokens
        self._fences = 0 if tokens else self._fences + 1
        news = not tokens or self._describe or self.importer.stirred
        quiet = not news and self.cache.epoch_state is self._told
        metadata = self._build_quiet(output) if quiet else self._build(output)
        if quiet or (tokens and not metadata.at_once):
            self._times.built(self._step, tokens, len(output.num_scheduled_tokens), quiet)
        return metadata

    def _build_quiet(self, output: Any) -> StepMetadata:
        if (exporter := self.exporter) is not None:
            exporter.step_built(self._step, output.num_scheduled_tokens)
            if exporter.unsettled:
                exporter.unsettled = False
                exporter.publish_computed()
                self.cache.publisher.drain_before_dispatch()
        return QuietStep(self._step)  # the ranks have nothing to do but to compute

    def _build(self, output: Any) -> StepMetadata:
        busy = output.total_num_scheduled_tokens > 0
        life = self.cache.epoch_state  # looked at first: another may follow at any time
        loads, at_once = self.importer.loads(output.num_scheduled_tokens)
        completes: Completed = []
        if (exporter := self.exporter) is not None:
            exporter.look_at(life)
            for load in (*loads, *at_once):
                exporter.blocks_promised([t for piece in load.pieces for t in piece.targets])
            # First what the step rewrites: a block may have got its hash in this very schedule().
            if busy:
                completes = exporter.step_built(self._step, output.num_scheduled_tokens)
            exporter.publish_computed()
        self.cache.publisher.drain_before_dispatch()
        metadata = StepMetadata(
            step=self._step if busy else 0,
            open_epoch=self._newly_opened(),
            describe=self._resets if self._describe and busy else 0,
            loads=loads,
            at_once=at_once,
            patience=self.importer.at_once.step_built(),
            linger=self.importer.linger(loads, busy),
            fence=0 if busy or exporter is None else exporter.fence,
            checksums=blocks_of(run for _, run in completes) if self._config.verify else [],
        )
        if metadata.describe:
            self._awaited = self._step
        # Weights are digested when the model runs with them: a step without a model may lie
        # between a reset and the change of weights that it was made for.
        self._describe = self._describe and not busy
        waits = life is None and exporter is not None and exporter.expecting
        self._told = UNTOLD if waits or self._config.verify else life
        self.importer.handed_over()
        return metadata

    def emergency(self, output: Any) -> StepMetadata:
        """``build`` after something failed: nothing is shared, but loads must still be told
        of, or their requests would wait for ever."""
        loads, at_once = self.importer.loads(output.num_scheduled_tokens)
        self.importer.handed_over()
        patience = self.importer.at_once.step_built()
        return StepMetadata(step=0, loads=loads, at_once=at_once, patience=patience)

    def _newly_opened(self) -> int:
        table, announced = self.cache.table, self._announced
        self._announced = announced if table is None else table.epoch
        return 0 if table is None or table.epoch == announced else table.epoch

    def before_output(self, output: Any, result: Any) -> None:
        """vLLM is about to take in a step's output: what its imports that it waited for have
        brought.  What they have not, it must not deliver."""
        metadata = output.kv_connector_metadata
        if not isinstance(metadata, StepMetadata) or not metadata.at_once:
            return
        said = getattr(result.kv_connector_output, "kv_connector_worker_meta", None)
        reports = said.loads if isinstance(said, RankReport) else []
        self.cache.count(LOADS_AT_ONCE, len(metadata.at_once))
        at_once, exporter = self.importer.at_once, self.exporter
        for landed in self.importer.land_awaited(metadata.at_once, reports):
            if not landed.good.blocks:
                if exporter is not None:  # first: it looks for them in the request's table
                    exporter.blocks_failed(landed.bad)
                at_once.failed(landed.request_id, landed.load_id)
                continue
            at_once.arrived(landed.request_id, landed.load_id)
            if exporter is not None:
                exporter.blocks_loaded(landed.good, exporter.shares(landed.request_id))

    def output(
        self, finished: Set[str], report: RankReport | None, invalid: Set[int] = frozenset()
    ) -> None:
        """A step's output has arrived.  ``invalid``: blocks that loads failed to fill, those of
        other connectors included (a MultiConnector holds several)."""
        if report is not None and report.quiet and not finished and not invalid:
            self._step_ended(report.step)
            return
        try:
            self._take_in(finished, report, invalid)
        finally:
            if finished:
                self.importer.drop(finished)

    def _take_in(self, finished: Set[str], report: RankReport | None, invalid: Set[int]) -> None:
        loads = report.loads if report is not None else ()
        if loads or invalid:  # most steps have none
            own = {block for load in loads for block in load.bad}
            if self.exporter is not None:
                self.exporter.blocks_failed(own.union(BlockId(b) for b in invalid))
            self.importer.reported(loads)
        if report is not None:
            if report.step and self._times.measured:
                self._times.ended(report.step)
            self._follow(report)
        elif self._times.unanswered() and self.exporter and self.exporter.expecting:
            self._descriptions, self._awaited = {}, 0  # no rank has a worker's side
            self._answers_are_in(0)
        for landed in self.importer.land(finished) if finished else ():
            if (exporter := self.exporter) is not None:
                exporter.blocks_loaded(landed.good, exporter.shares(landed.request_id))
        if self.exporter is not None:
            if report is not None and (report.step or report.fence):
                self.exporter.step_done(report.step or report.fence, fenced=not report.step)
            self.cache.publisher.flush()

    def _follow(self, report: RankReport) -> None:
        """From epoch to epoch, and to new peers, by what the ranks say."""
        if report.attached:
            self.cache.planner.attached(self.importer.now_attached(report.attached))
        if report.failed:
            self.withdraw()
        elif report.weights_changed:
            self.reset()
        elif report.not_opened and self.cache.not_opened(report.not_opened) and self.exporter:
            self.exporter.expect_nothing()
        if report.descriptions:
            self.described(report.descriptions, report.describes)
        if report.step:
            self._answers_are_in(report.step)

    def _step_ended(self, step: int) -> None:
        """All that the output of a step tells is that it has run."""
        if self._times.measured:
            self._times.ended(step)
        if self._awaited is not None:
            self._answers_are_in(step)
        if self.exporter is not None:
            self.exporter.step_done(step)

    def stats(self) -> LoadStats:
        """What to add to vLLM's metrics."""
        return LoadStats.of(self.cache.planner.take_results(), self._block_size)

    def must_step(self) -> bool:
        """Whether an engine without requests has to step on: the last blocks of a speculating
        one are shown when the ranks are past a fence.  Not for ever: a rank may be stuck."""
        exporter = self.exporter
        return exporter is not None and exporter.fence > 0 and self._fences < MAX_FENCES

    def close(self) -> None:
        self.cache.close()
