"""KvshmConnector: what vLLM sees of kvshm (KVConnectorBase_V1, vLLM 0.32).

vLLM makes one instance in the scheduler's process and one in every worker; each delegates
to its side.  Order of the calls: docs/architecture.md.  A request with nothing to import
takes none of these paths but ``match``; an engine without peers publishes into its own
table and nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
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
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvshm.config import Config, Role
from kvshm.counters import HOOK_ERRORS
from kvshm.errors import RunDirectoryError
from kvshm.log import logger, set_level
from kvshm.rundir import open_run_directory, require_room
from kvshm.terms import BlockId

from .boundary import guarded, report
from .messages import RankDescription, RankReport, StepMetadata
from .plugin import ensure_recompute
from .pool_watch import PoolChanged
from .refusals import cache_refusal, config_refusal, export_refusal
from .scheduler import SchedulerSide
from .worker import WorkerSide

log = logger(__name__)

# vLLM imports this module when it is told to use it, while it makes its configuration: here a
# bad setting stops the start with its reason, before a model is loaded.
Config.from_env(os.environ)


def _nothing(*_: Any, **__: Any) -> None:
    return None


class KvshmConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares this engine's prefix cache with the other engines of the node."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Workers see the same reasons; what is to be said is said once per engine.
        scheduler = role is KVConnectorRole.SCHEDULER
        level = logging.WARNING if scheduler else logging.DEBUG
        config = Config.from_env(os.environ)
        set_level(config.log_level)
        # Only the scheduler reads the policy.
        if scheduler and (overridden := ensure_recompute(self._kv_transfer_config)):
            log.info("%s", overridden)
        for warning in () if config.enable else config.warnings:  # else the plugin has said it
            log.log(level, "%s", warning)
        self.strict = config.strict
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        refusal = config_refusal(vllm_config, os.environ) or cache_refusal(kv_cache_config)
        if refusal is not None:
            log.log(level, "not sharing the prefix cache: %s", refusal)
            return
        if (reason := export_refusal(vllm_config)) is not None:
            log.log(level, "importing only: %s", reason)
            config = dataclasses.replace(config, role=Role.CONSUMER)
        # vLLM keeps late writers out of imported blocks only for an engine that may import.
        if not self._kv_transfer_config.is_kv_consumer:
            config = dataclasses.replace(config, role=Role.PRODUCER)
        try:
            run_dir = open_run_directory(config.run_dir, os.environ)
            require_room(run_dir, config.namespace)
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = SchedulerSide(config, run_dir, vllm_config, kv_cache_config)
            else:
                self._worker = WorkerSide(config, run_dir, vllm_config, kv_cache_config)
        except RunDirectoryError as exc:
            log.log(level, "not sharing the prefix cache: %s", exc)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache, no hand-off: what is not delivered is a miss."""
        return False

    def hook_failed(self, hook: str, exc: Exception) -> None:
        """Fail closed: withdraw everything, so that nobody reads what we no longer guard."""
        if self._scheduler is not None:
            self._scheduler.exporter = None
            self._scheduler.cache.count(HOOK_ERRORS)
            self._scheduler.cache.log_error(f"{hook}: {exc}")
            self._scheduler.cache.end_epoch()
        if self._worker is not None:
            bound = self._connector_metadata
            self._worker.give_up(bound if isinstance(bound, StepMetadata) else None)

    # -- worker

    @guarded(_nothing)
    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        return self._worker.memory_context() if self._worker else None

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker:
            self._worker.register(kv_caches)

    @guarded(_nothing)
    def get_handshake_metadata(self) -> RankDescription | None:
        return self._worker.describe() if self._worker else None

    @guarded(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker and isinstance(connector_metadata, StepMetadata):
            self._worker.step(connector_metadata)

    @guarded(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if self._worker and isinstance(metadata, StepMetadata):
            self._worker.begin_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: vLLM schedules a request only when all of it has arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is copied at export."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if self._worker and isinstance(metadata, StepMetadata):
            self._worker.write_checksums(metadata)

    @guarded(lambda self, finished: KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        self._worker.collect()
        return KVConnectorTransferResults(finished_recving=self._worker.take_finished())

    @guarded(lambda self: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._worker.take_bad()) if self._worker else set()

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> RankReport | None:
        return self._worker.take_report() if self._worker else None

    # -- scheduler

    @guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._scheduler:
            self._scheduler.described({i: metadata[key] for i, key in enumerate(sorted(metadata))})

    @guarded(_nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is None:
            return
        try:
            self._scheduler.bind(kv_cache_manager, self)
        except PoolChanged as exc:
            log.warning("not sharing the prefix cache: %s", exc)
            self._scheduler.close()
            self._scheduler = None

    @guarded(_nothing)
    def blocks_handed_out(self, blocks: list[BlockId]) -> None:
        """Blocks are about to get new contents (pool_watch.PoolListener)."""
        if self._scheduler and self._scheduler.exporter:
            self._scheduler.exporter.blocks_handed_out(blocks)

    @guarded(_nothing)
    def block_changes(self, block: BlockId) -> None:
        """A block loses its hash (pool_watch.PoolListener)."""
        if self._scheduler and self._scheduler.exporter:
            self._scheduler.exporter.blocks_change([block])

    @guarded(_nothing)
    def pool_reset(self) -> None:
        """vLLM dropped its prefix cache, perhaps because the weights changed."""
        if self._scheduler:
            self._scheduler.reset()

    @guarded(_nothing)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler:
            self._scheduler.new_request(request)

    @guarded(lambda self, request, computed: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        found = self._scheduler.importer.match(request, num_computed_tokens)
        return found, bool(found)

    @guarded(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler:
            ids = [block.block_id for block in blocks.blocks[0]] if num_external_tokens else []
            self._scheduler.importer.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata(step=0)
        try:
            return self._scheduler.build(scheduler_output)
        except Exception as exc:
            if self.strict:
                raise
            report(self, "build_connector_meta", exc)
            return self._scheduler.emergency()

    @guarded(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler:
            worker_meta = connector_output.kv_connector_worker_meta
            self._scheduler.output(
                connector_output.finished_recving or set(),
                worker_meta if isinstance(worker_meta, RankReport) else None,
                connector_output.invalid_block_ids,
            )

    @guarded(lambda self, request, ids: (False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler:
            self._scheduler.request_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    @guarded(lambda self: True)
    def reset_cache(self) -> bool | None:
        if self._scheduler:
            self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        try:
            for side in (self._worker, self._scheduler):
                if side is not None:
                    side.close()
        except Exception as exc:
            report(self, "shutdown", exc)

    def take_events(self) -> Iterable[Any]:
        return ()
