"""The worker's half of the connector: one rank's memory, loads and reports."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvshm._base.core_lines import CoreLine
from kvshm._base.fingerprint import KERNEL_BLOCKS, TRANSPORT
from kvshm._base.ids import BlockId, Epoch, LoadId, Rank
from kvshm._base.log import logger
from kvshm.config import Config
from kvshm.errors import KvshmError, SegmentError, SegmentNotFound, TransportError
from kvshm.halves import (
    POLL_SECONDS,
    WEIGHTS_WRITTEN,
    ErrorCode,
    LoadOrder,
    LoadReport,
    RankHalf,
    RankInfo,
    open_rank,
)
from kvshm.interfaces import Transport, choose_transport

from ..log_lines import HookLine
from ..weights import WeightsUnknown
from .call_stack import callers_with
from .identity.fields import rank_fields
from .identity.groups import is_one_full
from .identity.layout import Placement, regions_of, shared_kv_memory
from .identity.rank_weights import RankWeights
from .identity.refusals import cache_device
from .messages import RankDescription, RankReport, StepMetadata
from .sleeping import release_memory

log = logger(__name__)

GIVE_UP_SECONDS = 1.0
"""How long a reset waits for copies under way, which take milliseconds."""


class WorkerSide:
    """One rank of one engine.  All methods run on the worker's main thread, except for
    ``_weights_written``."""

    _known = False
    """Whether vLLM has been told of this rank."""
    _released = False
    """Whether the KV cache's memory was released since it was last exported."""

    def __init__(self, config: Config, run_dir: Path, vllm_config: Any, kv_cache_config: Any):
        self._config = config
        self._run_dir = run_dir
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._rank = Rank(vllm_config.parallel_config.rank)
        device = cache_device(vllm_config)
        self._transport_type = choose_transport(config.transport, device)
        # On a GPU the cache stays where vLLM puts it.
        allocate = getattr(self._transport_type, "allocate", None)
        self.allocation = shared_kv_memory(allocate) if allocate is not None else None
        """Context for vLLM's allocation of the KV cache: places it in memory that can be shared."""
        self._refusal = "the KV cache was not registered"
        self._weights = RankWeights(config.weights_check_seconds, self._weights_written)
        self._could_not_open = False
        self._kernel_blocks = "1"
        self._transport: Transport | None = None
        self._cache: RankHalf | None = None
        self._under_way: dict[LoadId, LoadOrder] = {}
        self._outdated: set[LoadId] = set()
        """Those that began before the weights changed: they bring nothing."""
        self._one_full = is_one_full(kv_cache_config)
        self._finished: set[LoadId] = set()
        self._failed: set[LoadId] = set()
        self._bad: set[BlockId] = set()
        self._attached: frozenset[Epoch] = frozenset()
        """The attached peers that this rank has reported to the scheduler."""
        self._report: RankReport | None = None
        """The report for the next output; None while there is nothing to report."""
        self._fence = 0
        self._passed: Callable[[], bool] | None = None

    # -- start

    def register(
        self, kv_caches: dict[str, torch.Tensor], unmapping: Callable[[], None] = lambda: None
    ) -> None:
        """The KV cache exists: find its regions and prepare to export and fill them.
        ``unmapping`` is called before vLLM's worker unmaps memory (sleep mode)."""
        placement = regions_of(self._kv_cache_config, kv_caches)
        if isinstance(placement, str):
            self._refusal = placement
            return
        # vLLM gives the model to no connector, but the caller is the model runner, which has it.
        self._weights.find(callers_with("get_model"), self._weights_load, unmapping)
        self._kernel_blocks = placement.kernel_blocks
        try:
            self._cache = open_rank(
                self._config,
                self._run_dir,
                self._rank,
                self._transport_type,
                self._memory(placement),
                placement.regions,
            )
        except TransportError as exc:
            self._refusal = str(exc)
            return
        self._transport = self._cache.transport
        # vLLM frees a block only when no step under way writes to it any more (in an engine that
        # may import); but a drafter still writes after its step's output was handed over.
        self._transport.late_writers = self._vllm_config.speculative_config is not None

    def _weights_load(self) -> None:
        """New weights are about to be loaded, and the scheduler does not know."""
        self._next_report().weights_changed = True
        self.weights_change()

    def weights_change(self) -> None:
        """The weights are about to change, or perhaps: end the epoch of those there were."""
        self._weights.change()
        self._outdated |= self._under_way.keys()
        if self._cache is None:
            return
        try:
            self._cache.end_epoch()
        except KvshmError as exc:  # the scheduler ends the epoch with the next step
            log.line(HookLine.EPOCH_NOT_ENDED, exc)

    def release_memory(self) -> None:
        """The KV cache is about to be unmapped: see SleepHooks.  Loads that this ends are reported
        as lost with the next step.  Idempotent."""
        if self._cache is not None and not self._released:
            left = release_memory(self._cache, self._rank)
            self._released = True
            report = self._next_report()
            report.still_mapped += left > 0
            # Unless it was announced, as a sleep is: the epoch has ended, and another must begin.
            report.weights_changed = True
            self.collect()

    def is_loading(self) -> bool:
        """Whether a load is under way, which may write to the KV cache."""
        self.collect()
        return bool(self._under_way)

    def _weights_written(self, name: str) -> None:
        """Somebody has written the weights, and nobody had announced it: other engines must not
        read this rank's blocks any more.  The scheduler hears of it with the next step.  The
        witness's thread, or the main one."""
        log.line(HookLine.WEIGHTS_WRITTEN, self._rank, name)
        if (cache := self._cache) is not None:
            cache.withdraw()
            if (table := cache.table) is not None:
                with suppress(KvshmError, ValueError):  # its epoch has just ended
                    table.counters.add(WEIGHTS_WRITTEN)
                    text = f"rank {self._rank}: weights written: {name}"
                    table.log_error(text, code=ErrorCode.WEIGHTS_WRITTEN)

    def _memory(self, placement: Placement) -> Any:
        """Return the memory of the KV cache.  Raises TransportError if it cannot be shared."""
        if self.allocation is None:
            return self._transport_type.adopt(
                placement.address, placement.nbytes, placement.storage
            )
        return self.allocation.memory_of(placement)

    def handshake(self) -> RankDescription | None:
        """Describe this rank at the start.  None later: vLLM asks again when the KV cache wakes up,
        perhaps before the weights do, and the next step that runs the model describes them."""
        known, self._known = self._known, True
        return None if known else self.describe()

    def describe(self) -> RankDescription:
        """Return what the engine must know of this rank in order to join.  Digests the weights:
        blocks for as long as one read of them takes.  Only while weights and KV cache are mapped:
        at the start, and in a step that runs the model."""
        if self._transport is None:
            return RankDescription(None, {}, self._refusal)
        refusal = self._weights.find_again()
        if refusal:
            return RankDescription(None, {}, refusal)
        # The description covers all changes of the weights before it.
        if self._report is not None:
            self._report.weights_changed = False
        about = self._vllm_config, self._kv_cache_config, self._weights.models
        try:
            fields, seconds = self._weights.described_by(lambda each: rank_fields(*about, each))
            memory = self._transport.export(Epoch(0))  # serves no peer until an epoch is opened
            self._released = False
        except (WeightsUnknown, TransportError) as exc:
            return RankDescription(None, {}, str(exc))
        fields[TRANSPORT] = self._transport.name
        fields[KERNEL_BLOCKS] = self._kernel_blocks  # decides the order within a block
        return RankDescription(RankInfo(os.getpid(), memory), fields, seconds=seconds)

    # -- every step

    def is_quiet(self) -> bool:
        """Whether there is nothing to report and no load under way: a quiet step then needs none
        of the methods below."""
        if self._report is not None or self._under_way or self._weights.written:
            return False
        return self._cache is None or self._cache.attached() is self._attached

    def _next_report(self) -> RankReport:
        """Return the report of the present step, or of the next one."""
        if self._report is None:
            self._report = RankReport(step=0)
        return self._report

    def begin_step(self, metadata: StepMetadata) -> None:
        """Call before the loads of a step: ends and opens epochs as the scheduler says."""
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
        """Tell the scheduler that weights were found written, and end the epoch, if they were."""
        if name := self._weights.written:
            self._weights.written = ""
            self._next_report().written[self._rank] = name
            self._weights_load()

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
        """Whether memory holds everything that the model's steps have written by now.  Steps run
        on this thread; if they only launch work, the transport knows when that work has ended.
        The scheduler may ask for the same fence many times."""
        if fence != self._fence:
            self._fence = fence
            begin = getattr(self._transport, "fence", None)
            self._passed = begin() if begin else None
        return self._passed is None or self._passed()

    def begin_loads(self, metadata: StepMetadata) -> None:
        """Begin a step's asynchronous loads; does not block.  If the step also has loads at once,
        ``load_at_once`` begins these after them: a rank makes one copy after the other."""
        if not metadata.at_once:
            self._begin(metadata)

    def _begin(self, metadata: StepMetadata) -> None:
        while metadata.loads:
            load = metadata.loads[0]
            self._under_way[load.load_id] = load
            if self._cache is None:
                self._ended(LoadReport(load.load_id, load.targets + load.lost))
            else:
                self._cache.begin_load(load)
            metadata.loads.pop(0)  # only now: ``give_up`` reports a load that failed to begin

    def load_at_once(self, metadata: StepMetadata) -> None:
        """Carry out the loads that this step computes from; blocks, up to ``metadata.patience``."""
        if not metadata.at_once:
            return
        if self._cache is not None:
            found = self._cache.load_at_once(metadata.at_once, metadata.patience)
            self._next_report().loads += found  # a load without a report has failed
        self._begin(metadata)

    def write_checksums(self, metadata: StepMetadata) -> None:
        """Call after the model ran, before its output is returned."""
        if metadata.checksums and self._cache is not None:
            self._cache.write_checksums(metadata.checksums)

    def collect(self, linger: float = 0.0) -> None:
        """Collect the loads that have ended since the last step; waits up to ``linger`` seconds
        for the others."""
        if self._cache is not None:
            for report in self._cache.poll(linger):
                self._ended(report)
            known, self._attached = self._attached, self._cache.attached()
            if self._attached != known:
                self._next_report().attached[self._rank] = self._attached

    def _ended(self, report: LoadReport) -> None:
        load = self._under_way.pop(report.load_id, None)
        if load is not None and report.load_id in self._outdated:
            report = LoadReport(load.load_id, load.targets + load.lost)
        self._outdated.discard(report.load_id)
        self._finished.add(report.load_id)  # first: vLLM waits for it
        if self._one_full:
            self._bad.update(report.bad)
        elif report.bad:
            self._failed.add(report.load_id)
        self._next_report().loads.append(report)

    def wait_for_end(self, load_ids: Iterable[LoadId]) -> set[LoadId]:
        """Wait up to GIVE_UP_SECONDS for loads whose epoch has ended; returns the ended loads that
        were not reported."""
        wanted, deadline = set(load_ids), time.monotonic() + GIVE_UP_SECONDS
        self.collect()
        while wanted & self._under_way.keys() and time.monotonic() < deadline:  # a thread ends them
            time.sleep(POLL_SECONDS)
            self.collect()
        return wanted & self._finished

    def end_loads(self, load_ids: Iterable[LoadId]) -> set[LoadId]:
        """End these loads, wait for that up to GIVE_UP_SECONDS, and never report them; returns
        those that this rank does not carry out any more.  It may have reported them, or never have
        heard of them.  Loads that have ended by themselves are reported with the next step."""
        self.collect()
        wanted = set(load_ids) - self._finished
        for load_id in wanted & self._under_way.keys():
            if self._cache is not None and self._cache.carries_out(load_id):
                self._cache.cancel(load_id)
            else:
                del self._under_way[load_id]  # its begin has failed
        self.wait_for_end(wanted)
        ended = wanted - self._under_way.keys()
        self.forget(ended)
        return ended

    def forget(self, load_ids: Iterable[LoadId]) -> None:
        """Drop the reports of these loads, which have ended."""
        gone, report = set(load_ids), self._next_report()
        bad = {block for r in report.loads if r.load_id in gone for block in r.bad}
        report.loads = [r for r in report.loads if r.load_id not in gone]
        self._finished -= gone
        self._failed -= gone
        self._bad -= bad

    def take_finished(self) -> tuple[set[LoadId], set[LoadId]]:
        """Return the requests whose loads have ended on this rank, good or bad, and those of them
        that vLLM has to begin again.  With one group of full attention there are none of these:
        vLLM goes on from the first block in ``take_bad``."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_bad(self) -> set[BlockId]:
        """Return the blocks of ended loads whose contents must not be used.  vLLM accepts blocks
        from engines with one group only."""
        bad, self._bad = self._bad, set()
        return bad

    def take_report(self) -> RankReport:
        """Return the report to the scheduler for this step's output."""
        report, self._report = self._next_report(), None
        return report

    def give_up(self, metadata: StepMetadata | None) -> None:
        """A hook failed: export nothing any more, and let no request wait for ever."""
        self._next_report().failed = True
        try:
            if self._cache is not None:
                self._cache.end_epoch()
        finally:
            if metadata is not None:
                # Outside an epoch a load copies nothing, releases its leases, reports all bad.
                self._begin(metadata)

    def hook_took(self, hook: str, begun_ns: int) -> None:
        """Show tools how long one of the rank's hooks has taken."""
        if self._cache is not None:
            self._cache.hook_took(hook, time.monotonic_ns() - begun_ns)

    def close(self) -> None:
        """Withdraw the memory before vLLM frees it."""
        self._weights.close()
        if self._cache is not None:
            self._cache.close()
