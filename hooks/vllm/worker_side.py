"""The worker's half of the connector: one rank's memory, loads and reports."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from kvshm._base.core_lines import CoreLine
from kvshm._base.fingerprint import KERNEL_BLOCKS, TRANSPORT
from kvshm._base.ids import Epoch, Rank
from kvshm._base.log import logger
from kvshm.config import Config
from kvshm.errors import KvshmError, SegmentError, SegmentNotFound, TransportError
from kvshm.halves import WEIGHTS_WRITTEN, ErrorCode, RankHalf, RankInfo, open_rank
from kvshm.interfaces import SupportsAdopt, TransportClass, choose_transport

from ..log_lines import HookLine
from ..weights import WeightsUnknown
from .adapters import AdapterDigests, Loaded
from .call_stack import callers_with
from .expert_ranks import OwnShare
from .identity.fields import rank_fields
from .identity.groups import is_single_full_attention
from .identity.layout import Placement, regions_of, shared_kv_memory
from .identity.rank_weights import RankWeights
from .identity.refusals import cache_device
from .messages import RankDescription, RankReport, StepMetadata
from .rank_loads import RankLoads

log = logger(__name__)

UNMAP_SECONDS = 5.0
"""How long a rank that goes to sleep waits for peers to unmap its KV cache: up to two seconds,
unless one hangs, which keeps the memory from being given back."""


class WorkerSide:
    """One rank of one engine.  All methods run on the worker's main thread, except for
    ``_weights_written``."""

    _known = False  # whether vLLM has a description of this rank
    _released = False  # whether the KV cache's memory was released since it was last exported

    def __init__(self, config: Config, run_dir: Path, vllm_config: Any, kv_cache_config: Any):
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank = Rank(vllm_config.parallel_config.rank)
        transport_type = choose_transport(config.transport, cache_device(vllm_config))
        # On a GPU the cache stays where vLLM puts it.
        allocate = getattr(transport_type, "allocate", None)
        self.allocation = shared_kv_memory(allocate) if allocate is not None else None
        """Context for vLLM's allocation of the KV cache: places it in memory that can be shared."""
        self._open = partial(_open, config, run_dir, self._rank, transport_type, self.allocation)
        self._placement: Placement | str = "the KV cache was not registered"
        """Where the blocks lie; before they can be shared, and if they cannot be, the reason."""
        share = partial(OwnShare.of_this_rank, run_dir, config.namespace)
        self._weights = RankWeights(config.weights_check_seconds, self._weights_written, share)
        self._weights.adapters = AdapterDigests(
            self._rank, self._adapter_loaded, self._adapter_changed
        )
        self._could_not_open = False
        self._cache: RankHalf | None = None
        """None while ``_placement`` is a reason."""
        self.loads = self._loads_of(None)
        self._attached: frozenset[Epoch] = frozenset()
        """The attached peers that this rank has reported to the scheduler."""
        self._report: RankReport | None = None
        """The report for the next output; None while there is nothing to report."""
        self._fence: tuple[int, Callable[[], bool] | None] = (0, None)
        """The last fence that the scheduler has asked about, and whether it has passed."""

    def _loads_of(self, cache: RankHalf | None) -> RankLoads:
        by_block = is_single_full_attention(self._kv_cache_config)
        return RankLoads(cache, self._next_report, by_block)

    # -- start

    def register(
        self, kv_caches: dict[str, torch.Tensor], unmapping: Callable[[], None] = lambda: None
    ) -> None:
        """Find the regions of the KV cache, and prepare to export and fill them.  ``unmapping`` is
        called before vLLM's worker unmaps memory (sleep mode)."""
        placement = regions_of(self._kv_cache_config, kv_caches)
        if isinstance(placement, str):
            self._placement = placement
            return
        # vLLM gives the model to no connector, but the caller is the model runner, which has it.
        self._weights.find(callers_with("get_model"), self._weights_load, unmapping)
        for runner in callers_with("lora_manager"):
            self._weights.adapters.watch(runner.lora_manager)
        try:
            self._weights.find_share(self._vllm_config.parallel_config)
            self._cache = self._open(placement)
        except TransportError as exc:
            self._placement = str(exc)
            return
        self._placement, self.loads = placement, self._loads_of(self._cache)
        # vLLM frees a block only when no step under way writes to it any more (in an engine that
        # may import); but a drafter still writes after its step's output was handed over.
        drafts = self._vllm_config.speculative_config is not None
        self._cache.transport.late_writers = drafts

    def _weights_load(self) -> None:
        """End the epoch before new weights are loaded, of which the scheduler does not know."""
        self._next_report().weights_changed = True
        self.weights_change()

    def adapters(self) -> Loaded:
        """Return what this rank has loaded of adapters."""
        return self._weights.adapters.known()

    def _adapter_loaded(self, loaded: Loaded) -> None:
        for rank, digests in loaded.items():
            self._next_report().adapters.setdefault(rank, {}).update(digests)

    def _adapter_changed(self) -> None:
        """End the epoch before a step uses other contents of an adapter than it had before."""
        self._next_report().adapter_changed = True
        self._weights_load()

    def weights_change(self) -> None:
        """End the epoch: the weights are about to change, or may be."""
        self._weights.change()
        self._end_epoch()

    def _end_epoch(self) -> None:
        self.loads.outdate()
        if self._cache is None:
            return
        try:
            self._cache.end_epoch()
        except KvshmError as exc:  # the scheduler ends the epoch with the next step
            log.line(HookLine.EPOCH_NOT_ENDED, exc)

    def release_memory(self) -> None:
        """Stop all use of the KV cache before it is unmapped; waits for peers up to UNMAP_SECONDS.
        Loads that this ends are reported as lost with the next step.  Idempotent."""
        if self._cache is None or self._released:
            return
        start, report = time.monotonic(), self._next_report()
        if left := self._cache.release_memory(UNMAP_SECONDS):
            log.line(HookLine.STILL_MAPPED, self._rank, time.monotonic() - start, left)
            report.still_mapped += 1
        self._released = True
        # Unless it was announced, as a sleep is: the epoch has ended, and another must begin.
        report.weights_changed = True
        self.collect()

    def is_loading(self) -> bool:
        """Whether a load is under way, which may write to the KV cache."""
        self.collect()
        return bool(self.loads.under_way)

    def _weights_written(self, name: str) -> None:
        """Withdraw this rank's blocks: weights were written without an announcement.  The
        scheduler hears of it with the next step.  The witness's thread, or the main one."""
        log.line(HookLine.WEIGHTS_WRITTEN, self._rank, name)
        if (cache := self._cache) is not None:
            cache.withdraw()
            if (table := cache.table) is not None:
                with suppress(KvshmError, ValueError):  # its epoch has just ended
                    table.counters.add(WEIGHTS_WRITTEN)
                    text = f"rank {self._rank}: weights written: {name}"
                    table.log_error(text, code=ErrorCode.WEIGHTS_WRITTEN)

    def handshake(self) -> RankDescription | None:
        """Describe this rank at the start.  None later: when the KV cache wakes up the weights may
        sleep, and the next step that runs the model describes them."""
        known, self._known = self._known, True
        return None if known else self.describe()

    def describe(self) -> RankDescription:
        """Return what the engine must know of this rank in order to join.  Blocks while it digests
        the weights.  Only while weights and KV cache are mapped: at the start, and in a step that
        runs the model."""
        description = self._describe()
        if description.refusal:
            self._weights.hide()
        return description

    def _describe(self) -> RankDescription:
        if isinstance(self._placement, str) or self._cache is None:
            return RankDescription(None, {}, str(self._placement))
        if not self._placement.holds_caches():
            return RankDescription(None, {}, "another connector has moved the KV cache")
        if refusal := self._weights.find_again():
            return RankDescription(None, {}, refusal)
        # The description covers all changes of the weights before it.
        if self._report is not None:
            self._report.weights_changed = False
        about = self._vllm_config, self._kv_cache_config, self._weights.models
        transport = self._cache.transport
        try:
            fields, seconds = self._weights.described_by(
                lambda digests: rank_fields(*about, digests)
            )
            memory = transport.export(Epoch(0))  # serves no peer until an epoch is opened
            self._released = False
        except (WeightsUnknown, TransportError) as exc:
            return RankDescription(None, {}, str(exc))
        fields[TRANSPORT] = transport.name
        fields[KERNEL_BLOCKS] = self._placement.kernel_blocks  # decides the order within a block
        board = self._weights.show(fields)
        return RankDescription(RankInfo(os.getpid(), memory), fields, seconds=seconds, board=board)

    # -- every step

    def is_quiet(self) -> bool:
        """Whether a quiet step needs none of the methods below: nothing to report, no load."""
        if self._report is not None or self.loads.under_way or self._weights.written:
            return False
        return self._cache is None or self._cache.attached() is self._attached

    def _next_report(self) -> RankReport:
        """Return the report of the present step, or of the next one."""
        if self._report is None:
            self._report = RankReport(step=0)
        return self._report

    def begin_step(self, metadata: StepMetadata) -> None:
        """End and open epochs as the scheduler wants, before the loads of a step."""
        self._report_written()
        report = self._next_report()
        report.step = metadata.step
        if metadata.fence and self._fence_passed(metadata.fence):
            report.fence = metadata.fence
        if metadata.describe and self._cache is not None:
            self._cache.end_epoch()
            report.describes = metadata.describe
            report.descriptions[self._rank] = self.describe()
        # Do not open a table made for earlier weights: all its loads fail, and the scheduler,
        # which gets a report of the change, begins another epoch.
        if metadata.open_epoch and self._cache is not None and self._weights.still_hold():
            self._open_epoch(self._cache, Epoch(metadata.open_epoch))
        self._report_written()

    def _report_written(self) -> None:
        """If weights were found written, report it to the scheduler, and end the epoch."""
        if name := self._weights.written:
            self._weights.written = ""
            report = self._next_report()
            report.written[self._rank], report.weights_changed = name, True
            self._weights.unwatch()
            self._end_epoch()

    def _open_epoch(self, cache: RankHalf, epoch: Epoch) -> None:
        try:
            cache.open_epoch(epoch)
        except SegmentNotFound:
            pass  # the epoch ended while the step was under way; the next step says so
        except (SegmentError, TransportError):  # for example no descriptors or threads
            level = logging.DEBUG if self._could_not_open else logging.WARNING
            log.line(CoreLine.NOT_OPENED, cache.failed, level=level)
            self._could_not_open = True
            self._next_report().not_opened = epoch

    def _fence_passed(self, fence: int) -> bool:
        """Whether memory holds everything that the model's steps have written by now.  Steps run on
        this thread; the transport knows when work has ended that they only launch."""
        if fence != self._fence[0]:
            ask = getattr(self._cache.transport, "fence", None) if self._cache is not None else None
            self._fence = fence, ask() if ask else None
        has_passed = self._fence[1]
        return has_passed is None or has_passed()

    def begin_loads(self, metadata: StepMetadata) -> None:
        """Begin a step's asynchronous loads, unless ``load_at_once`` does so after the loads at
        once: a rank makes one copy after the other.  Does not block."""
        if not metadata.at_once:
            self.loads.begin(metadata.loads)

    def load_at_once(self, metadata: StepMetadata) -> None:
        """Carry out the loads that this step computes from; blocks, up to ``metadata.patience``."""
        if not metadata.at_once:
            return
        if self._cache is not None:
            found = self._cache.load_at_once(metadata.at_once, metadata.patience)
            self._next_report().loads += found  # a load without a report has failed
        self.loads.begin(metadata.loads)

    def write_checksums(self, metadata: StepMetadata) -> None:
        """Call after the model ran, before its output is returned."""
        if metadata.checksums and self._cache is not None:
            self._cache.write_checksums(metadata.checksums)

    def collect(self, linger: float = 0.0) -> None:
        """Report the loads that have ended since the last step, and newly attached peers; waits up
        to ``linger`` seconds for the other loads."""
        self.loads.collect(linger)
        if self._cache is not None:
            known, self._attached = self._attached, self._cache.attached()
            if self._attached != known:
                self._next_report().attached[self._rank] = self._attached

    def take_report(self) -> RankReport:
        """Return the report to the scheduler for this step's output."""
        report, self._report = self._next_report(), None
        return report

    def give_up(self, metadata: StepMetadata | None) -> None:
        """Export nothing after a hook has failed, and let no request wait for ever."""
        self._next_report().failed = True
        self._weights.hide()
        try:
            if self._cache is not None:
                self._cache.end_epoch()
        finally:
            if metadata is not None:
                # Outside an epoch a load copies nothing, releases its leases, reports all bad.
                self.loads.begin(metadata.loads)

    def hook_took(self, hook: str, begun_ns: int) -> None:
        """Show tools how long one of the rank's hooks has taken."""
        if self._cache is not None:
            self._cache.hook_took(hook, time.monotonic_ns() - begun_ns)

    def close(self) -> None:
        """Withdraw the memory before vLLM frees it."""
        self._weights.close()
        if self._cache is not None:
            self._cache.close()


def _open(
    config: Config,
    run_dir: Path,
    rank: Rank,
    transport_type: TransportClass,
    allocation: shared_kv_memory | None,
    placement: Placement,
) -> RankHalf:
    """Open a rank's half over its KV cache.  Raises TransportError if the memory cannot be
    shared."""
    if allocation is None:
        owner = cast(SupportsAdopt, transport_type)
        memory = owner.adopt(placement.address, placement.nbytes, placement.storage)
    else:
        memory = allocation.memory_of(placement)
    return open_rank(config, run_dir, rank, transport_type, memory, placement.regions)
