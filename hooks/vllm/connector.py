"""KvshmConnector: what vLLM sees of kvshm (KVConnectorBase_V1).

vLLM makes one instance in the scheduler's process and one in every worker, which delegate to
SchedulerSide and WorkerSide.  Order of the calls: docs/architecture.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvshm._base.ids import BlockId
from kvshm._base.log import logger
from kvshm._base.log_output import start_log
from kvshm._base.rundir import open_run_directory, require_room
from kvshm.errors import ConfigError, MemoryInUse

from ..boundary import guarded, report
from . import settings
from .admission import admit
from .call_stack import callers_with
from .combination import pass_events_on
from .declining import decline_engine, why_not_started
from .exports.block_tracker import BlockTracker
from .identity.refusals import cache_refusal, config_refusal
from .messages import QuietReport, QuietStep, RankDescription, RankReport, StepMetadata
from .metrics import LoadMetrics, LoadStats
from .ranks import is_beside_others
from .scheduler_side import SchedulerSide
from .settings import checked_settings, settings_of, settings_of_connector
from .shutdown import prepare_shutdown
from .transfer_config import ensure_recompute, register
from .worker_side import WorkerSide

log = logger(__name__)

# vLLM imports this module early: a bad setting stops the start here, before a model is loaded.
prepare_shutdown(checked_settings())


def _nothing(*_: Any, **__: Any) -> None:
    return None


class KvshmConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares this engine's prefix cache with the other engines of the node."""

    _cache_hit_source = CacheHitSource.P2P
    hook_took: Callable[[str, int], None] = staticmethod(_nothing)
    """Show tools the time of a hook, by name, that began then (CLOCK_MONOTONIC).  The side's own
    method: one frame less, several times in each step."""
    _quiet = False
    """Worker: whether the step under way asks and reports nothing, as most steps do."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Workers find the same reasons; the scheduler's process logs them, once per engine.
        scheduler = role is KVConnectorRole.SCHEDULER
        level = logging.WARNING if scheduler else logging.DEBUG
        config = settings_of_connector(self._kv_transfer_config)
        prepare_shutdown(config)
        start_log(config.log_level, config.log_format, config.log_file)
        if scheduler and (overridden := ensure_recompute(self._kv_transfer_config)):
            log.filled(overridden)  # only the scheduler reads the policy
        if not (config.enable or settings.misspelt_are_told):  # vLLM has not loaded the plugin
            for warning in config.mistakes:
                log.filled(warning, level)
        self.strict = config.strict
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        admission = admit(config.untested)
        refusal = (
            admission.refusal
            or config_refusal(vllm_config, os.environ, config.transport)
            or cache_refusal(kv_cache_config)
            or config.decide_role().refusal
        )
        if refusal is not None:
            decline_engine(refusal, config, vllm_config, is_scheduler=scheduler)
            return
        if notice := admission.notice:
            log.filled(notice, min(level, notice.line.level))
        try:
            run_dir = open_run_directory(config.run_dir, os.environ)
            require_room(run_dir, config.namespace)
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = SchedulerSide(config, run_dir, vllm_config, kv_cache_config)
                self.hook_took = self._scheduler.hook_took
            else:
                self._worker = WorkerSide(config, run_dir, vllm_config, kv_cache_config)
                self.hook_took = self._worker.hook_took
        except ConfigError:
            raise  # stops the start
        except Exception as exc:  # any: the engine serves without kvshm
            reason = why_not_started(exc, strict=self.strict)
            decline_engine(reason, config, vllm_config, is_scheduler=scheduler)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: kvshm is a cache, and KV that is not delivered is a cache miss."""
        return False

    def hook_failed(self, hook: str, exc: Exception) -> None:
        """Fail closed: withdraw everything, so that no peer reads blocks that nothing guards."""
        if self._scheduler is not None:
            self._scheduler.epochs.turn_off(f"{hook}: {exc}")
        if self._worker is not None:
            bound = self._connector_metadata
            self._worker.give_up(bound if isinstance(bound, StepMetadata) else None)

    # -- worker

    @guarded(_nothing)
    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._worker.allocation if self._worker else None

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pass_events_on(callers_with("sub_connectors"))
        if self._worker:
            self._worker.register(kv_caches, self.unregister_kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True, for every transport (docs/fingerprint.md)."""
        return True

    # After any error here, what may still write to the memory keeps it mapped.
    @guarded(lambda self: self._require_no_loads())
    def unregister_kv_caches(self) -> None:
        """Block until nothing writes to the KV cache, which is about to be unmapped, and, up to
        UNMAP_SECONDS, until no peer maps it.  vLLM 0.33 calls this; in 0.32 the wrapped methods of
        its worker do.  Raises MemoryInUse if a copy cannot be stopped."""
        if self._worker:
            self._worker.release_memory()

    def _require_no_loads(self) -> None:
        if self._worker and self._worker.is_loading():
            raise MemoryInUse("loads into the KV cache could not be ended: it must stay mapped")

    def restore_kv_caches(self) -> None:
        """Nothing to do: the next description of this rank exports the memory."""

    @guarded(_nothing)
    def get_handshake_metadata(self) -> RankDescription | None:
        if self._worker is None or is_beside_others(self):
            return None  # a MultiConnector would give the answer to its other connectors as well
        return self._worker.handshake()

    @guarded(_nothing)
    def answer_scheduler(self, question: str, *args: Any) -> Any:
        """Call the method ``question`` of WorkerSide, or of its loads, for the scheduler
        (ranks.Ranks).  None: this rank cannot answer."""
        return attrgetter(question)(self._worker)(*args) if self._worker else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata
        self._quiet = False
        if (worker := self._worker) is None:
            return
        # ``isinstance`` takes a microsecond with vLLM's classes, because they are abstract.
        if type(connector_metadata) is QuietStep and worker.is_quiet():
            self._quiet = True
        elif isinstance(connector_metadata, StepMetadata):
            self._begin(connector_metadata)

    @guarded(_nothing, "begin")
    def _begin(self, metadata: StepMetadata) -> None:
        if self._worker:
            self._worker.begin_step(metadata)
            self._worker.begin_loads(metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._quiet:
            self._load_at_once()

    @guarded(_nothing, "load_at_once")
    def _load_at_once(self) -> None:
        metadata = self._connector_metadata
        if self._worker and isinstance(metadata, StepMetadata):
            self._worker.load_at_once(metadata)

    def has_connector_metadata(self) -> bool:
        """False, so that vLLM does not call the two methods below for every layer: its only use."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request has all its blocks before its step begins."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is copied at export."""

    def wait_for_save(self) -> None:
        if not self._quiet:
            self._write_checksums()

    @guarded(_nothing)
    def _write_checksums(self) -> None:
        metadata = self._connector_metadata
        if self._worker and isinstance(metadata, StepMetadata):
            self._worker.write_checksums(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return (None if self._quiet else self._collect()) or KVConnectorTransferResults()

    # After any error here, the requests whose loads have ended must still go on.
    @guarded(lambda self: self._take_finished(), "collect")
    def _collect(self) -> KVConnectorTransferResults | None:
        if self._worker is not None:
            bound = self._connector_metadata
            self._worker.collect(bound.linger if isinstance(bound, StepMetadata) else 0.0)
        return self._take_finished()

    def _take_finished(self) -> KVConnectorTransferResults | None:
        if self._worker is None:
            return None
        finished, failed = self._worker.loads.take_finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._worker.loads.take_bad()) if self._worker and not self._quiet else set()

    def build_connector_worker_meta(self) -> RankReport | None:
        bound: Any = self._connector_metadata
        if self._quiet and bound is not None:
            return QuietReport(bound.step)
        return self._worker.take_report() if self._worker else None

    # -- scheduler

    @guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._scheduler:
            self._scheduler.ranks_started(metadata, self.call_may_write)

    @guarded(_nothing)
    def call_may_write(self, call: str) -> None:
        if self._scheduler:
            self._scheduler.epochs.call_may_write(call)

    @guarded(_nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        side = self._scheduler
        if side is not None and not side.bind(kv_cache_manager, self, self.before_output):
            self._scheduler = None

    # As pool_watch.PoolListener describes the next five.

    @guarded(_nothing)
    def blocks_wanted(self, count: int) -> None:
        if (tracker := self._tracker) is not None:
            tracker.free_order.change(count)

    @guarded(_nothing)
    def blocks_handed_out(self, blocks: Sequence[Any]) -> None:
        if (tracker := self._tracker) is not None:
            tracker.blocks_handed_out(blocks)

    @guarded(_nothing)
    def block_changes(self, block: BlockId) -> None:
        if (tracker := self._tracker) is not None:
            tracker.blocks_change([block])

    @property
    def _tracker(self) -> BlockTracker | None:
        return self._scheduler.tracker if self._scheduler else None

    @guarded(_nothing)
    def pool_will_reset(self) -> None:
        if self._scheduler:
            self._scheduler.prepare_pool_reset()

    @guarded(_nothing)
    def pool_reset(self) -> None:
        if self._scheduler:
            self._scheduler.epochs.reset()

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler:
            self._scheduler.new_request(request)

    @guarded(lambda self, request, computed: (0, False), "match")
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    @guarded(lambda self, *about: self._scheduler.allocation_failed(*about), "allocated")
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    # After any error here, the loads must still be handed over.
    @guarded(lambda self, output: self._scheduler.build_after_failure(output), "build")
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata(step=0)
        return self._scheduler.build(scheduler_output)

    # After any error here, compute everything again, even blocks that were right.
    @guarded(lambda self, *_: self._scheduler.roll_back())
    def before_output(self, output: Any, result: Any) -> None:
        """Keep vLLM, which is about to handle a step's output, from delivering tokens that were
        computed from blocks that did not arrive."""
        if self._scheduler:
            self._scheduler.before_output(output, result)

    @guarded(_nothing, "output")
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is None:
            return
        report: Any = connector_output.kv_connector_worker_meta
        if type(report) is not QuietReport and not isinstance(report, RankReport):
            report = None  # another connector's, or none
        if connector_output.finished_sending:
            self._scheduler.saved(connector_output.finished_sending)
        finished = connector_output.finished_recving or set()
        self._scheduler.output(finished, report, connector_output.invalid_block_ids)

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.take_stats() if self._scheduler else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return LoadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        register()  # a MultiConnector looks up by name which connector's stats these are
        prepare_shutdown(settings_of(vllm_config.kv_transfer_config))
        return LoadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False.  vLLM asks early, on GPUs: a bad setting stops the start before a model loads."""
        checked_settings(extra_config)
        return False

    @guarded(lambda self, request, ids: (False, None), "finished")
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.request_finished(request) if self._scheduler else None

    request_finished_all_groups = request_finished

    @guarded(lambda self: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.must_step()

    @guarded(lambda self: True)
    def reset_cache(self) -> bool | None:
        if self._scheduler:
            self._scheduler.epochs.reset()
        return True

    def shutdown(self) -> None:
        try:
            for side in (self._worker, self._scheduler):
                if side is not None:
                    side.close()
        except Exception as exc:  # any, even with KVSHM_STRICT: vLLM must still end
            report(self, "shutdown", exc)
