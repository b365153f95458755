"""Workers with their caches on a played GPU (FakeDriver); everything else is real: the worker's
side, vLLM's own cache allocation, slot tables, the load's thread."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, LoadId
from kvshm._engine.load_plan import LoadOrder, Piece
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
from kvshm.config import Config
from kvshm.hooks.vllm import worker_side as worker_module
from kvshm.hooks.vllm.identity import rank_weights
from kvshm.hooks.vllm.identity.layout import shared_kv_memory
from kvshm.hooks.vllm.messages import StepMetadata
from kvshm.hooks.vllm.worker_side import WorkerSide
from kvshm.transport.cuda import transport as cuda_transport

from ..doubles.cuda_fake import FakeDriver, FakeMachine
from ..sessions import new_namespace
from ..unit.served import Served
from .tiny_config import cache_config, engine_config, spec

BLOCKS = 8
LAYERS = {f"layer.{i}": spec() for i in range(2)}


def config_for_cuda(model: Path) -> VllmConfig:
    made = engine_config(model, {})
    made.device_config.device_type = "cuda"
    return made


@dataclass
class DeviceBuffer:
    """Memory of the fake GPU, for vLLM to lay its cache over."""

    driver: FakeDriver
    address: int
    nbytes: int

    @property
    def buffer(self) -> memoryview:
        return self.driver.bytes_at(self.address, self.nbytes)


@dataclass
class Played:
    """One worker with its table."""

    side: WorkerSide
    driver: FakeDriver
    served: Served
    caches: dict[str, torch.Tensor]

    @property
    def table(self) -> OwnSlotTable:
        return self.served.table

    @property
    def rank(self) -> Any:
        return self.side._cache

    @property
    def transport(self) -> Any:
        return self.side._cache.transport

    def fill(self, value: int) -> None:
        for cache in self.caches.values():
            cache.fill_(value)

    def holds(self, block: int, value: int) -> bool:
        """Whether a block holds nothing else, in every layer."""
        return all(bool((cache[block] == value).all()) for cache in self.caches.values())

    def close(self) -> None:
        self.side.close()
        self.served.close()


Make = Callable[[int], Played]


def makers(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """One function that makes workers, which are closed afterwards."""
    machine, namespace = FakeMachine(), new_namespace()
    run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
    model = torch.nn.Module()
    monkeypatch.setattr(rank_weights, "find_model", lambda _: model)
    monkeypatch.setattr(worker_module, "rank_fields", lambda *_: {"weights": "w"})
    made: list[Played] = []

    def one(epoch: int) -> Played:
        driver = machine.process()
        monkeypatch.setattr(cuda_transport, "current_driver", lambda: driver)
        planned = cache_config(config, "LBNHC", BLOCKS, LAYERS)
        side = WorkerSide(Config(namespace=namespace), run_dir, config, planned)
        assert side.allocation is None  # the cache stays where vLLM puts it
        with shared_kv_memory(lambda n: DeviceBuffer(driver, driver.make(n), n)):
            caches = allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout.LBNHC, [32])
        side.register(caches)
        table_spec = TableSpec(
            namespace, f"e{epoch}", BLOCKS, 32, 1, Fingerprint(bytes(32)), "model"
        )
        served = Served(run_dir, OwnSlotTable.create(table_spec, Epoch(epoch)), namespace)
        made.append(Played(side, driver, served, caches))
        return made[-1]

    yield one
    for played in made:
        played.close()
    shutil.rmtree(run_dir)


def load_of(exporter: Played, importer: Played, source: int, target: int) -> LoadOrder:
    """Publish a block and plan its import, as the schedulers would."""
    description = exporter.side.describe()
    assert description.info is not None, description.refusal
    memory = msgspec.structs.replace(description.info.memory, epoch=exporter.table.epoch)
    for one in (exporter, importer):
        one.side.begin_step(StepMetadata(step=1, open_epoch=one.table.epoch))
    record = BlockRecord(BlockHash(b"h" * 32), BlockId(source), Generation(0), 0)
    records = exporter.table.publish(pack_records([record]), bytes(8))
    piece = Piece(exporter.table.epoch, (memory,), records, b"\0", (BlockId(target),), 8)
    ticket = importer.table.take_ticket(1)
    assert ticket is not None
    return LoadOrder("request", importer.table.epoch, ticket, 0, (piece,), ())


def finished(side: WorkerSide) -> set[LoadId]:
    side.collect()
    return side.loads.take_finished()[0]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
