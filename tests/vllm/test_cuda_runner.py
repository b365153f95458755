"""An engine of CUDA's, on one thread, without a GPU and a model: vLLM's in-process executor with
asynchronous scheduling and Model Runner V2.

Real are the AsyncScheduler and its BlockPool, both sides of the connector, Model Runner V2's own
code that calls it (ActiveKVConnector), the cache as vLLM lays it out, and the coordinator.  Played
are the GPU (FakeDriver) and the forward pass, which writes what the tokens say.  As in
``step_with_batch_queue``, a step is dispatched before the last one's output is taken in; as in
that executor, the worker is handed the scheduler's very objects.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from local_node import Node
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.utils import allocate_kv_cache

from kvshm import _native
from kvshm._base.syncpoints import SyncPoint
from kvshm._rank import attachments, rank_load
from kvshm._shm.layout import NUM_TICKETS
from kvshm._shm.own_slot_table import _ticket
from kvshm.hooks.vllm import worker_side as worker_module
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.identity import rank_weights
from kvshm.hooks.vllm.identity.layout import shared_kv_memory
from kvshm.hooks.vllm.imports import at_once
from kvshm.hooks.vllm.imports import importer as importer_module
from kvshm.transport.cuda import transport as cuda_transport

from ..doubles.cuda_fake import FakeDriver, FakeMachine
from .cuda_workers import DeviceBuffer
from .scheduling import BLOCK_SIZE, DrivenEngine, Sent, vllm_config
from .tiny_config import cache_config, spec

BLOCKS = 64
WAITS = (
    (at_once, "PATIENCE_SECONDS"),
    (at_once, "SECONDS_PER_STEP"),
    (importer_module, "LINGER_SECONDS"),
    (attachments, "ATTACH_WAIT_SECONDS"),
)
LAYERS = {f"layer.{i}": spec(block_size=BLOCK_SIZE) for i in range(2)}


class InProcessEngine:
    """Scheduler and worker of one engine, called as EngineCore and the model runner do."""

    def __init__(self, config: Any, driver: FakeDriver) -> None:
        config.device_config.device_type = "cuda"
        config.scheduler_config.async_scheduling = True
        self.driver = driver
        planned = cache_config(config, "LBNHC", BLOCKS, LAYERS)
        planned.hash_block_size = BLOCK_SIZE
        self.worker = KvshmConnector(config, KVConnectorRole.WORKER, planned)
        with shared_kv_memory(lambda n: DeviceBuffer(driver, driver.make(n), n)):
            layout = KVCacheLayout.LBNHC
            self.caches = allocate_kv_cache(planned, torch.device("cpu"), layout, [BLOCK_SIZE])
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self.runner = ActiveKVConnector(config, self.caches)
        described = self.worker.get_handshake_metadata()
        assert described is not None, "the worker has not said what it shares"
        self.engine = DrivenEngine(
            config, BLOCKS, asynchronous=True, shares=False, cache=planned, rank=described
        )
        self.under_way: deque[tuple[Sent, Any]] = deque()
        self.computed_from: dict[str, int] = {}

    def dispatch(self) -> Sent:
        """Schedule a step and launch it; nothing of it has run when this returns."""
        sent = self.engine.schedule()
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        if sent.output.total_num_scheduled_tokens:
            self.runner.pre_forward(sent.output)
            self.launch_forward(sent.output)
            self.runner.finish_forward()
            output = self.report(sent.output)
        else:
            output = self.runner.no_forward(sent.output).kv_connector_output
        self.under_way.append((sent, output))
        return sent

    def report(self, output: Any) -> Any:
        """What the connector's worker has to say of a launched step."""
        return self.runner.post_forward(output.finished_req_ids)

    def launch_forward(self, output: Any) -> None:
        """Put on the model's stream: every block of a prompt that the step computes is filled
        with a byte that follows from its tokens."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                starts[name] = start
        for name, start in starts.items():
            self.computed_from[name] = start
            tokens = self.engine.scheduler.requests[name].prompt_token_ids
            for index, block in enumerate(self.engine.blocks_of(name)):
                if index * BLOCK_SIZE >= start and (index + 1) * BLOCK_SIZE <= len(tokens):
                    self._write(block, value_of(tokens, index))

    def _write(self, block: int, value: int) -> None:
        for layer in self.caches:
            self.write_into(layer, block, value)

    def write_into(self, layer: str, block: int, value: int) -> None:
        """Put on the model's stream: a block of one layer is filled with a byte."""
        target = self.caches[layer][block]
        nbytes = target.numel() * target.element_size()
        source = self.driver.make(nbytes)
        self.driver.bytes_at(source, nbytes)[:] = bytes([value]) * nbytes
        self.driver.copy(target.data_ptr(), source, nbytes, self.driver.compute_stream())

    def take_output(self) -> None:
        """The oldest step's output: the host waits for its tokens, so for its forward pass."""
        sent, output = self.under_way.popleft()
        self.driver.synchronize(self.driver.compute_stream())
        self.engine.answer(sent, output)

    def step(self) -> Sent:
        """One round of step_with_batch_queue with two batches under way."""
        sent = self.dispatch()
        if len(self.under_way) == 2:
            self.take_output()
        return sent

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.step()

    @property
    def cache(self) -> Any:
        return self.engine.connector._scheduler.cache

    def ready(self) -> set[int]:
        self.engine.table = self.cache.table
        return self.engine.ready()

    def values(self, blocks: list[int]) -> list[set[int]]:
        packed = [cache.view(torch.uint8).flatten(1) for cache in self.caches.values()]
        return [{byte for cache in packed for byte in cache[b].tolist()} for b in blocks]

    def close(self) -> None:
        self.worker.shutdown()
        self.engine.close()


def value_of(tokens: list[int], index: int) -> int:
    return 1 + tokens[index * BLOCK_SIZE] % 250


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[InProcessEngine]]:
    """Two engines that get to know each other from a coordinator, and wait for each other however
    slow the machine is.  Parametrized by their kind, and arguments of theirs besides."""
    kind, arguments = getattr(request, "param", (InProcessEngine, {}))
    machine = FakeMachine()
    for module, limit in WAITS:
        monkeypatch.setattr(module, limit, 100.0)
    served = torch.nn.Module()
    monkeypatch.setattr(rank_weights, "find_model", lambda _: served)
    monkeypatch.setattr(worker_module, "rank_fields", lambda *_: {"weights": "w"})
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    with Node() as node, ExitStack() as stack:
        node.start_coordinator()
        for name, value in {**node.environment, "KVSHM_STRICT": "1"}.items():
            monkeypatch.setenv(name, value)
        # vLLM loads the plugin at the first configuration, which would be of all tests to come.
        monkeypatch.delenv("KVSHM_ENABLE")
        made: list[InProcessEngine] = []
        for _ in range(2):
            driver = machine.process()
            monkeypatch.setattr(cuda_transport, "current_driver", lambda driver=driver: driver)
            made.append(kind(vllm_config(model, **arguments), driver))
            stack.callback(made[-1].close)
        for engine in made:
            engine.until(lambda engine=engine: engine.cache.table is not None)
            engine.until(lambda engine=engine: not engine.cache.meets_peers)
            engine.step()
        yield made


def prompt(blocks: int) -> list[int]:
    return [7 * i % 997 for i in range(blocks * BLOCK_SIZE + BLOCK_SIZE // 2)]


def test_nothing_is_published_before_the_output_of_its_step(pair: list[InProcessEngine]) -> None:
    a, _ = pair
    while a.under_way:
        a.take_output()
    a.engine.add("r", prompt(3), max_tokens=20)
    a.dispatch()
    a.dispatch()
    blocks = a.engine.blocks_of("r")[:3]
    assert not a.ready() & set(blocks)
    a.take_output()
    assert set(blocks) <= a.ready()
    assert a.values(blocks) == [{value_of(prompt(3), i)} for i in range(3)]


def test_a_prefix_travels_while_both_engines_run_ahead(pair: list[InProcessEngine]) -> None:
    imports_what_was_computed(*pair)


def imports_what_was_computed(a: InProcessEngine, b: InProcessEngine) -> None:
    """Let b import five blocks of a's while neither waits for its steps; checks every value."""
    chain = a.engine.add("first", prompt(5), max_tokens=60).block_hashes
    b.engine.add("other", [900 + i for i in range(20)], max_tokens=200)  # b's steps never end

    def known() -> bool:
        a.step()
        plan = b.cache.planner.lookup(chain, 0, 5)
        return plan is not None and plan.num_blocks == 5

    b.until(known)
    b.engine.add("second", prompt(5), max_tokens=4)
    b.until(lambda: "second" in b.computed_from)
    assert b.computed_from["second"] == 5 * BLOCK_SIZE
    blocks = b.engine.blocks_of("second")[:5]
    assert b.values(blocks) == [{value_of(prompt(5), i)} for i in range(5)]


# -- a client goes away while its import is under way


def everything_held(a: InProcessEngine, b: InProcessEngine) -> dict[str, Any]:
    importer, table = b.engine.connector._scheduler.importer, b.cache.table
    parts = {"": importer, "running.": importer.running, "held.": importer.held}
    noted = {
        f"{part}{name}": kept
        for part, owner in parts.items()
        for name, kept in vars(owner).items()
        if isinstance(kept, dict | set)
    }
    return {
        "leases": [i for i, slot in enumerate(a.cache.table.slots()) if slot.leases],
        "tickets": [
            i for i in range(NUM_TICKETS) if _native.load(table._segment.buffer, _ticket(i))
        ],
        "blocks": BLOCKS - 1 - b.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "noted": {name: kept for name, kept in noted.items() if kept},
        "step": set(importer.step.imports),
        "under way": set(b.worker._worker.loads.under_way),
    }


NOTHING = {name: [] for name in ("leases", "tickets")} | {
    "blocks": 0, "noted": {}, "step": set(), "under way": set(),
}  # fmt: skip


@pytest.mark.parametrize("moment", ["copy under way", "copied, not reported", "step waits for it"])
def test_an_abort_during_an_import_gives_leases_ticket_and_blocks_back(
    pair: list[InProcessEngine], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    a, b = pair
    chain = a.engine.add("first", prompt(5), max_tokens=1).block_hashes

    def known() -> bool:
        a.step()
        plan = b.cache.planner.lookup(chain, 0, 5)
        return plan is not None and plan.num_blocks == 5

    b.until(known)
    while b.under_way:
        b.take_output()
    copying, go_on = threading.Event(), threading.Event()

    def hold(point: SyncPoint) -> None:
        if point is SyncPoint.COPY_BEGINS:
            copying.set()
            assert go_on.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(rank_load, "sync_point", hold)
        patch.setattr(importer_module, "LINGER_SECONDS", 0.0)
        if moment != "step waits for it":
            patch.setattr(at_once.AtOnce, "accepts", lambda *_: False)
        if moment != "copy under way":
            go_on.set()
        b.engine.add("leaves", prompt(5), max_tokens=4)
        b.dispatch()
        assert copying.wait(60)
        held = everything_held(a, b)
        assert held["blocks"] >= 5
        if moment == "copy under way":
            assert (len(held["leases"]), len(held["tickets"])) == (5, 1)
            assert held["under way"] == {"leaves"}
        b.engine.scheduler.finish_requests("leaves", RequestStatus.FINISHED_ABORTED)
        go_on.set()
        b.until(lambda: everything_held(a, b) == NOTHING)

    b.engine.add("stays", prompt(5), max_tokens=4)
    b.until(lambda: "stays" in b.computed_from)
    assert b.computed_from["stays"] == 5 * BLOCK_SIZE
