"""A pytest plugin that loads kvshm into the process of vLLM's own tests, as an engine would.

A coordinator serves a namespace of this process.  Every VllmConfig gets kvshm's connector from
kvshm's plugin, or is refused, as in production.  What an engine has beside its scheduler is played:
one rank after the other describes itself, and reports each step.  Each has weights of its own, so
that no engine has a peer.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from local_node import Node
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from kvshm._node.protocol import RankInfo
from kvshm._shm.layout import SlotState
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable
from kvshm.hooks.vllm.call_stack import callers_with
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.messages import QuietReport, RankDescription, RankReport, StepMetadata
from kvshm.interfaces import MemoryDescriptor

START_SECONDS = 60.0


class PlayedRanks:
    """The ranks of one engine whose scheduler, or KV cache manager, a test has made."""

    def __init__(self, connector: KvshmConnector) -> None:
        self.connector = connector
        self.side: Any = connector._scheduler
        count = int(self.side._vllm_config.parallel_config.world_size)
        own = {"weights": uuid4().hex}
        memory = MemoryDescriptor("loopback", 0, 0, [])
        self.described = {
            rank: RankDescription(RankInfo(os.getpid(), memory), own) for rank in range(count)
        }
        self._first: OwnSlotTable | None = None
        """Of the epoch that began before the test."""

    def start(self) -> None:
        """Describe the ranks, and wait until blocks can be published and looked up."""
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): described for rank, described in self.described.items()}
        )
        deadline = time.monotonic() + START_SECONDS
        while self.table is None or self.side.cache.meets_peers:
            assert time.monotonic() < deadline, f"kvshm has not joined: {self._lacks()}"
            time.sleep(0.002)  # the client's thread announces nothing
        self._first = self.table
        self.open()

    def _lacks(self) -> str:
        if self.table is None:
            chosen = hasattr(kv_cache_utils, "NONE_HASH")
            return f"no epoch has begun; vLLM has {'' if chosen else 'not '}chosen NONE_HASH"
        return self.side.cache.refusal or "the coordinator does not answer"

    @property
    def table(self) -> OwnSlotTable | None:
        table: OwnSlotTable | None = self.side.cache.table
        return table

    def open(self) -> None:
        """Each rank opens the epoch: from now on others may read its blocks."""
        if (table := self.table) is not None:
            for rank in self.described:
                RankSlotTable.from_fd(table.name, table.descriptor(True)).set_life(rank)

    def report(self, step: StepMetadata) -> RankReport:
        if step.open_epoch:
            self.open()
        if step.describe:
            return RankReport(step.step, descriptions=self.described, describes=step.describe)
        report = RankReport(step.step, step.fence)
        return QuietReport(step.step) if step.step and not step.fence else report

    def published(self) -> int:
        """How many blocks other engines could read now.  None once the test has ended its first
        epoch: how much of a test the next one sees depends on how busy the machine is."""
        slots = self.table.slots() if self.table is not None and self.table is self._first else ()
        return sum(slot.state is SlotState.READY for slot in slots)


class Injection:
    """kvshm in this process.  Wraps vLLM's classes for good: the process is there for this."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.attached: list[PlayedRanks] = []
        """Of the present test."""
        self.unshared = 0
        """Schedulers and managers of the present test that kvshm leaves alone, as in production."""
        self._in_scheduler = 0
        self._config: Any = None

    def install(self) -> None:
        self.node.start_coordinator()
        os.environ.update(self.node.environment)
        load_general_plugins()
        self._config = EngineArgs(
            os.environ["UPSTREAM_MODEL"], enforce_eager=True
        ).create_engine_config()
        _wrap(Scheduler, "__init__", self._make_scheduler)
        _wrap(Scheduler, "update_from_output", self._take_output)
        _wrap(KVCacheManager, "__init__", self._make_manager)

    def _make_scheduler(self, make: Callable[..., None], scheduler: Any, given: Any) -> None:
        cache, size = given["kv_cache_config"], given.get("hash_block_size")
        if cache.hash_block_size is None:  # as vLLM's core does
            cache.hash_block_size = size or given["block_size"]
        self._in_scheduler += 1
        try:
            make(scheduler, **given)
        finally:
            self._in_scheduler -= 1
        outer = scheduler.get_kv_connector()
        connectors = (outer, *getattr(outer, "sub_connectors", ()))
        own = next((one for one in connectors if isinstance(one, KvshmConnector)), None)
        self._attach(own, alone=own is outer)

    def _make_manager(self, make: Callable[..., None], manager: Any, given: Any) -> None:
        """A manager without a scheduler gets what a scheduler would bind to it."""
        make(manager, **given)
        if self._in_scheduler or not manager.enable_caching:
            return
        cache = copy.copy(given["kv_cache_config"])
        cache.hash_block_size = given["hash_block_size"]
        own = KVConnectorFactory.create_connector(self._config, KVConnectorRole.SCHEDULER, cache)
        own.bind_kv_cache_manager(manager)
        self._attach(own, alone=True)

    def _attach(self, own: KvshmConnector | None, *, alone: bool) -> None:
        if own is None or own._scheduler is None:
            self.unshared += 1
            return
        ranks = PlayedRanks(own)
        self.attached.append(ranks)
        if alone and not callers_with("model_executor"):  # else real ranks describe themselves
            ranks.start()

    def _take_output(self, take: Callable[..., Any], scheduler: Any, given: Any) -> Any:
        """The output of a step comes back with the report of its ranks."""
        step, result = given["scheduler_output"].kv_connector_metadata, given["model_runner_output"]
        ranks = next((r for r in self.attached if r.connector is scheduler.connector), None)
        if ranks is not None and isinstance(step, StepMetadata):
            told = result.kv_connector_output or KVConnectorOutput()
            if told.kv_connector_worker_meta is None:
                told = replace(told, kv_connector_worker_meta=ranks.report(step))
                given["model_runner_output"] = replace(result, kv_connector_output=told)
        return take(scheduler, **given)

    def end_test(self) -> dict[str, int]:
        """End what the test has made; return how much of it had kvshm."""
        counts = {
            "attached": len(self.attached),
            "unshared": self.unshared,
            "published": sum(ranks.published() for ranks in self.attached),
        }
        for ranks in self.attached:
            ranks.connector.shutdown()
        self.attached, self.unshared = [], 0
        return counts


def _wrap(owner: type, name: str, instead: Callable[..., Any]) -> None:
    """Have ``instead`` called with the method, its object, and its arguments by name."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(this, *args, **kwargs).arguments)
        del given["self"]
        return instead(original, this, given)

    setattr(owner, name, wrapped)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):
        return  # the workers of pytest-xdist run the tests
    node = Node({"KVSHM_STRICT": "1"})
    config.add_cleanup(node.close)
    injection = Injection(node)
    injection.install()
    config.pluginmanager.register(Hooks(injection))


class Hooks:
    def __init__(self, injection: Injection) -> None:
        self.injection = injection

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        for name, count in self.injection.end_test().items():
            item.user_properties.append((name, count))
        return (yield)
