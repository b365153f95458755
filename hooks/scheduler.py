"""The connector's half in the scheduler's process: ties exporter and importer to the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from kvshm.cache import SharedCache, join_cache
from kvshm.config import Config
from kvshm.life import EngineSpec
from kvshm.log import logger
from kvshm.terms import BlockId

from .after_prefill import Exporter, Written
from .before_prefill import Importer
from .identity import none_hash, scheduler_fields
from .messages import RankDescription, RankReport, StepMetadata
from .pool_watch import PoolChanged, PoolListener, watch_blocks, watch_resets

log = logger(__name__)


class SchedulerSide:
    """One engine's scheduler.  All methods run on the EngineCore's main thread."""

    def __init__(self, config: Config, run_dir: Path, vllm_config: Any, kv_cache_config: Any):
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._block_size = int(kv_cache_config.hash_block_size)
        asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
        spec = EngineSpec(
            name=f"vllm-{os.getpid()}",
            model=str(vllm_config.model_config.model),
            num_blocks=int(kv_cache_config.num_blocks),
            block_size=self._block_size,
            asynchronous=asynchronous,
        )
        self.cache: SharedCache = join_cache(config, spec, run_dir)
        self.importer = Importer(self.cache, config, self._block_size)
        self.exporter: Exporter | None = None
        self._slack = 2 * _speculative_tokens(vllm_config)
        self._manager: Any = None
        self._requests: dict[str, Any] = {}
        self._step = 0
        self._announced: int | None = None
        self._resets = 0
        self._describe = False
        self._starts: dict[str, int] = {}
        self._num_ranks = int(vllm_config.parallel_config.world_size)
        self._descriptions: dict[int, RankDescription] = {}

    # -- start and epochs

    def bind(self, manager: Any, listener: PoolListener) -> None:
        """Have ``listener`` watch vLLM's block pool; what cannot be watched is not exported.
        Raises PoolChanged if nothing may be shared at all."""
        self._manager = manager
        pool = manager.block_pool
        watch_resets(pool, listener)
        if not self._config.exports:
            return
        try:
            watch_blocks(pool, listener)
        except PoolChanged as exc:
            log.warning("importing only: %s", exc)
            return
        self.exporter = Exporter(self.cache, pool, self._block_size, delay=1 if self._slack else 0)

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
            self.exporter.life_ends()
            self.exporter.expecting = False
        self._descriptions.clear()

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
        ordered = [self._descriptions[rank] for rank in sorted(self._descriptions)]
        refusals = [d.refusal for d in ordered if d.refusal]
        if refusals:
            log.warning("not sharing the prefix cache: %s", refusals[0])
            self.withdraw()
            return
        fields = scheduler_fields(
            self._vllm_config, self._kv_cache_config, [d.fields for d in ordered]
        )

        def with_none_hash() -> dict[str, str] | None:
            digest = none_hash()
            return None if digest is None else {**fields, "none_hash": digest.hex()}

        self.cache.open_epoch([d.info for d in ordered if d.info], with_none_hash)

    # -- requests

    def new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def request_finished(self, request: Any) -> None:
        self._requests.pop(request.request_id, None)
        self._starts.pop(request.request_id, None)
        self.importer.finished(request.request_id)

    # -- every step

    def build(self, output: Any) -> StepMetadata:
        """The last thing before a step is dispatched: withdraw what it writes, wait for
        leases within the budget, and pack up what the ranks have to do."""
        busy = output.total_num_scheduled_tokens > 0
        self._step += 1
        completes: list[BlockId] = []
        if (exporter := self.exporter) is not None:
            exporter.publish_computed()
            if busy:
                completes = exporter.step_built(self._step, self._writes(exporter, output))
        self.cache.settle()
        metadata = StepMetadata(
            step=self._step if busy else 0,
            open_table=self._newly_opened(),
            describe=self._resets if self._describe and busy else 0,
            loads=self.importer.take_loads(),
            checksums=completes if self._config.verify else [],
        )
        # Weights are digested when the model runs with them: a step without a model may lie
        # between a reset and the change of weights that it was made for.
        self._describe = self._describe and not busy
        return metadata

    def emergency(self) -> StepMetadata:
        """``build`` after something failed: nothing is shared, but loads must still be told
        of, or their requests would wait for ever."""
        return StepMetadata(step=0, loads=self.importer.take_loads())

    def _newly_opened(self) -> str:
        table = self.cache.table
        if table is None or table.epoch == self._announced:
            return ""
        self._announced = table.epoch
        return table.name

    def _writes(self, exporter: Exporter, output: Any) -> Iterator[Written]:
        """Blocks the step writes, and which of them it completes."""
        if self._slack:
            self._note_starts(output)
        for request_id, count in output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or self._goes_on_within_block(request, count):
                continue
            yield from self._writes_of(exporter, request, count)

    def _note_starts(self, output: Any) -> None:
        """With speculation: where requests that begin, or begin again, start to compute."""
        begun = {new.req_id for new in output.scheduled_new_reqs}
        for request_id in begun | set(output.scheduled_cached_reqs.resumed_req_ids):
            if (request := self._requests.get(request_id)) is not None:
                self._starts[request_id] = request.num_computed_tokens

    def _goes_on_within_block(self, request: Any, count: int) -> bool:
        """Whether a decode step neither begins nor completes a block: then the block was
        written by the step before, has no mark, and there is nothing to withdraw.  Most
        requests of most steps, so this keeps the cost of a step small."""
        return (
            count == 1
            and not self._slack
            and 0 < request.num_computed_tokens % self._block_size < self._block_size - 1
        )

    def _writes_of(self, exporter: Exporter, request: Any, count: int) -> Iterator[Written]:
        size = self._block_size
        blocks = self._manager.get_blocks(request.request_id).blocks[0]
        # Drafts may be rejected, so with speculation a step may write further back, but never
        # into what the request found computed when it began.
        found = self._starts.get(request.request_id, request.num_computed_tokens)
        begin = max(found, request.num_computed_tokens - self._slack)
        end = request.num_computed_tokens + count
        # With asynchronous scheduling the last token's value is still on its way.
        known = request.num_tokens + request.num_output_placeholders
        complete = min(end, known) // size
        first, last = begin // size, min(-(-end // size), len(blocks))
        if exporter.builds_on_outdated(blocks, first, last) or not self.importer.wants(request):
            complete = 0
        for index in range(first, last):
            yield Written(blocks[index].block_id, index, request.block_hashes, index < complete)

    def output(
        self, finished: set[str], report: RankReport | None, invalid: Set[int] = frozenset()
    ) -> None:
        """A step's output has arrived.  ``invalid``: blocks that loads failed to fill, those of
        other connectors included (a MultiConnector holds several)."""
        own = {block for load in report.loads for block in load.bad} if report else set()
        if self.exporter is not None and (others := invalid - own):
            self._others_load_failed(self.exporter, others)
        if report is not None:
            self.importer.reported(report.loads)
            if report.failed:
                self.withdraw()
            elif report.weights_changed:
                self.reset()
            if report.descriptions:
                self.described(report.descriptions, report.describes)
        for landed in self.importer.land(finished):
            if self.exporter is not None and not self._refuses(landed.request_id):
                self.exporter.blocks_loaded(landed.good)
        if self.exporter is not None:
            if report is not None and report.step:
                self.exporter.step_done(report.step)
            self.cache.flush()

    def _others_load_failed(self, exporter: Exporter, invalid: Set[int]) -> None:
        """Withdraw what was computed from blocks that another connector did not fill.

        Such a load may belong to requests that run already: vLLM drops their tokens and
        computes again in place, from the first bad block on, with the hashes left as they are.
        With asynchronous scheduling it then computes a token that it has dropped before it was
        known, so what these requests compute from here on is not shown either.
        """
        exporter.forget_steps()
        for request_id in self._requests:
            blocks = [b.block_id for b in self._manager.get_blocks(request_id).blocks[0]]
            bad = (index for index, block in enumerate(blocks) if block in invalid)
            exporter.spoilt(blocks[next(bad, len(blocks)) :])

    def _refuses(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request is None or not self.importer.wants(request)

    def close(self) -> None:
        self.cache.close()


def _speculative_tokens(vllm_config: Any) -> int:
    speculative = vllm_config.speculative_config
    return int(speculative.num_speculative_tokens or 0) if speculative else 0
