"""Engines beside a connector of vLLM's that keeps blocks in the host's memory.

Schedulers and both connectors are real.  The one rank is played, as bad as vLLM allows: the other
connector's copies to the host read blocks as late as they may, and loads write theirs at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from kvshm._engine.load_plan import LoadReport
from kvshm.hooks.vllm.messages import RankReport

from .scheduling import Sent
from .several_connectors import BesideEngine
from .store_connector import StoreConnector

BYTES = 1 << 20


class Offloading:
    """The worker of vLLM's OffloadingConnector."""

    connector: ClassVar[dict[str, Any]] = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": BYTES},
    }

    @staticmethod
    def waited_for(step: Any, reading: Iterable[Any]) -> set[Any]:
        """The stores that have ended before anything of this step begins."""
        return set(step.jobs_to_flush or ())

    @staticmethod
    def loads(step: Any) -> Iterator[tuple[Any, Collection[str], list[int]]]:
        """Each load with its requests, none if the step waits for it, and its blocks."""
        for job, load in step.load_jobs.items():
            waiting = () if getattr(load, "sync", False) else (load.req_id,)
            yield job, waiting, load.dst_spec.block_ids.tolist()

    @staticmethod
    def stores(step: Any) -> dict[Any, set[int]]:
        return {
            job: set(store.src_spec.block_ids.tolist()) for job, store in step.store_jobs.items()
        }

    @staticmethod
    def report(stored: Collection[Any], loaded: Collection[Any]) -> Any:
        return OffloadingWorkerMetadata(completed_jobs=dict.fromkeys([*stored, *loaded], 1))


class WithinSteps(Offloading):
    """Of vLLM 0.33: steps wait for its loads.  0.32 does not know the setting."""

    connector: ClassVar[dict[str, Any]] = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": dict.fromkeys(
            ("cpu_bytes_to_use", "sync_load_budget_bytes"), BYTES
        ),
    }


class SimpleOffloading:
    """The worker of vLLM's SimpleCPUOffloadConnector."""

    connector: ClassVar[dict[str, Any]] = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": BYTES},
    }

    @staticmethod
    def waited_for(step: Any, reading: Iterable[Any]) -> set[Any]:
        return set(reading) if step.need_flush else set()

    @staticmethod
    def loads(step: Any) -> Iterator[tuple[Any, Collection[str], list[int]]]:
        if step.load_event >= 0:
            requests = step.load_event_to_reqs[step.load_event]
            yield step.load_event, requests, step.load_gpu_blocks

    @staticmethod
    def stores(step: Any) -> dict[Any, set[int]]:
        return {step.store_event: set(step.store_gpu_blocks)} if step.store_event >= 0 else {}

    @staticmethod
    def report(stored: Collection[Any], loaded: Collection[Any]) -> Any:
        return SimpleCPUOffloadWorkerMetadata(dict.fromkeys(stored, 1)) if stored else None


class Remembering:
    """The connector of a store that remembers blocks, and saves none (store_connector.py)."""

    connector: ClassVar[dict[str, Any]] = {
        "kv_connector": "StoreConnector",
        "kv_connector_module_path": StoreConnector.__module__,
    }

    @staticmethod
    def waited_for(step: Any, reading: Iterable[Any]) -> set[Any]:
        return set()

    @staticmethod
    def loads(step: Any) -> Iterator[tuple[Any, Collection[str], list[int]]]:
        return iter(())

    @staticmethod
    def stores(step: Any) -> dict[Any, set[int]]:
        return {}

    @staticmethod
    def report(stored: Collection[Any], loaded: Collection[Any]) -> None:
        pass


def with_tensors(cache: KVCacheConfig) -> KVCacheConfig:
    """The cache with memory for its blocks, of which some connectors want to know the size."""
    page = cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    layers = [name for group in cache.kv_cache_groups for name in group.layer_names]
    size = page * cache.num_blocks
    tensors = [KVCacheTensor(size, [name], size, page) for name in layers]
    return replace(cache, kv_cache_tensors=tensors)


@dataclass
class HostEngine(BesideEngine):
    """With a connector of the ``worker`` beside kvshm's."""

    worker: Any = Offloading

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reading: dict[Any, set[int]] = {}
        """Stores that have yet to read these blocks."""
        self.filling: dict[Any, tuple[Collection[str], set[int]]] = {}
        """Loads of both connectors that are under way: the requests that vLLM holds back for them,
        and the blocks they fill."""
        self.foreign: set[int] = set()
        """Blocks that the other connector has filled, or that were computed on top of such."""

    def parts(self, sent: Sent) -> tuple[Any, Any]:
        """What a step says to kvshm's worker, and to the other one."""
        said = sent.metadata.metadata
        return said[self.place], said[1 - self.place]

    def loaded(self, sent: Sent) -> tuple[list[int], list[int]]:
        """The blocks that kvshm is to fill in a step, and those that the other connector is to."""
        ours, theirs = self.parts(sent)
        loads = [*ours.loads, *ours.at_once]
        others = [block for _, _, blocks in self.worker.loads(theirs) for block in blocks]
        return [block for load in loads for block in load.targets], others

    def play(
        self, sent: Sent, *, ends: bool = True, stored: bool = True, bad: Collection[str] = ()
    ) -> None:
        """A step has run; ``ends``: all loads have ended, well but for those of requests in
        ``bad``; ``stored``: stores of earlier steps have."""
        ours, theirs = self.parts(sent)
        done = self.worker.waited_for(theirs, self.reading)
        late = self.worker.stores(theirs)
        for job in done:
            self.reading.pop(job, None)
            late.pop(job, None)
        own = {load.load_id: load for load in (*ours.loads, *ours.at_once)}
        for name, load in own.items():
            self._fill(name, [name] if isinstance(name, str) else [], load.targets)
            self.foreign.difference_update(load.targets)
        for job, requests, blocks in self.worker.loads(theirs):
            self._fill(("theirs", job), requests, blocks)
            self.foreign.update(blocks)
        assert not ours.at_once
        zeroed = set(sent.output.new_block_ids_to_zero or ())
        for requests, blocks in self.filling.values():
            assert not requests or zeroed.isdisjoint(blocks), "zeroed while a load fills it"
        self._compute(sent.output.num_scheduled_tokens)
        assert self.foreign.isdisjoint(self.ready())
        if stored:
            done |= self.reading.keys()
            self.reading = {}
        self.reading |= late
        self._end(sent, done, set(bad), ends)

    def _fill(self, name: Any, requests: Collection[str], blocks: Collection[int]) -> None:
        filled = set(blocks)
        assert len(filled) == len(blocks)
        assert filled.isdisjoint(self.ready()), "a peer may read it"
        for reader in self.reading.values():
            assert filled.isdisjoint(reader), "its store has yet to read it"
        for _, others in self.filling.values():
            assert filled.isdisjoint(others), "two loads fill it"
        self.filling[name] = requests, filled

    def _compute(self, scheduled: dict[str, int]) -> None:
        groups = self.connector._scheduler.importer.lookups.groups.all
        for name, tokens in scheduled.items():
            end = self.scheduler.requests[name].num_computed_tokens
            below, written = set(), set()
            for group, table in zip(groups, self.tables_of(name), strict=True):
                size = group.block_size
                below.update(table[: -(-(end - tokens) // size)])
                written.update(table[(end - tokens) // size : -(-end // size)])
            for _, filled in self.filling.values():
                assert filled.isdisjoint(written), "a load fills what a step computes"
            if below & self.foreign:
                self.foreign |= written - {0}
            else:
                self.foreign -= written

    def _end(self, sent: Sent, done: set[Any], bad: set[str], ends: bool) -> None:
        """The step's output comes back."""
        ours, _ = self.parts(sent)
        ended = {name: load for name, load in self.filling.items() if ends or not load[0]}
        for name in ended:
            del self.filling[name]
        theirs = {name[1] for name in ended if isinstance(name, tuple)}
        reports = [
            LoadReport(name, tuple(blocks) if bad.intersection(requests) else ())
            for name, (requests, blocks) in ended.items()
            if not isinstance(name, tuple)
        ]
        answers = [RankReport(ours.step, ours.fence, loads=reports)]
        answers.insert(1 - self.place, self.worker.report(done, theirs))
        finished = {name for requests, _ in ended.values() for name in requests}
        self.answer(
            sent,
            KVConnectorOutput(
                finished_recving=finished or None,
                failed_recving=finished & bad,
                kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(tuple(answers)),
            ),
        )

    def evict(self) -> None:
        """The engine's own cache loses all blocks that no request uses."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free = [block for block in pool.blocks if not block.ref_cnt and not block.is_null]
        self.scheduler.kv_cache_manager.evict_blocks({block.block_id for block in free})

    def preempt(self, name: str) -> Sent:
        """In a step that does not yet go on with the request, as vLLM does."""
        request = self.scheduler.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        sent = self.schedule()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        return sent

    def finish(self) -> None:
        """Until no request is left, and what the last one leaves to be stored has been."""
        for _ in range(80):
            had = len(self.scheduler.requests)
            self.play(self.schedule())
            if not had and not self.filling and not self.reading:
                return
        raise AssertionError(f"left: {[*self.scheduler.requests]}")
