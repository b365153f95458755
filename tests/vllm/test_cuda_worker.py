"""The connector's half in a CUDA worker, in the order in which Model Runner V2 calls it.

The GPU is played (FakeDriver); everything else is real: the worker's side, vLLM's own cache
allocation, slot tables, the load's thread.  Model Runner V2 starts loads after it has launched
the forward pass, so the copy must wait for it: its blocks may have late writers.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
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

from kvshm._engine.load_plan import NO_TICKET, LoadFailure, LoadOrder, Piece
from kvshm._ground.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation
from kvshm._shm.layout import BlockRecord, pack_records
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
from kvshm.config import Config
from kvshm.errors import TransportError
from kvshm.hooks.vllm import worker as worker_module
from kvshm.hooks.vllm.layout import shared_kv_memory
from kvshm.hooks.vllm.messages import StepMetadata
from kvshm.hooks.vllm.worker import WorkerSide
from kvshm.transport.cuda import transport as cuda_transport
from kvshm.transport.cuda.copy_stream import CudaCopy
from kvshm.transport.cuda.driver import CudaError

from ..doubles.cuda_fake import FakeDriver, FakeMachine
from ..sessions import new_namespace
from ..unit.few_threads import no_threads
from ..unit.served import Served
from .tiny_config import cache_config, engine_config, spec

BLOCKS = 8
LAYERS = {f"layer.{i}": spec() for i in range(2)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    made = engine_config(tmp_path_factory.mktemp("model"), {})
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

    def close(self) -> None:
        self.side.close()
        self.served.close()


Make = Callable[[int], Played]


@pytest.fixture
def make(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    machine, namespace = FakeMachine(), new_namespace()
    run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
    monkeypatch.setattr(worker_module, "find_model", lambda _: torch.nn.Module())
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


def finished(side: WorkerSide) -> set[str]:
    side.collect()
    return side.take_finished()[0]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_load_begun_behind_a_launched_forward_pass_ends_after_it(make: Make) -> None:
    exporter, importer = make(1), make(2)
    transport: Any = importer.side._transport
    transport.late_writers = True  # as with speculation
    for value, played in ((3, exporter), (5, importer)):
        for cache in played.caches.values():
            cache.fill_(value)
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    importer.side.begin_step(metadata)
    compute, target = importer.driver.compute_stream(), importer.caches["layer.0"][6]
    late = importer.driver.make(target.numel() * target.element_size())
    with importer.driver.hold(compute):
        # The forward pass runs, and some kernel in it still writes to the block.
        nbytes = target.numel() * target.element_size()
        importer.driver.copy(target.data_ptr(), late, nbytes, compute)
        importer.side.begin_loads(metadata)
        until(lambda: transport.copy_stream.stream.owner.work)
        assert finished(importer.side) == set()
    until(lambda: "request" in finished(importer.side))
    assert importer.side.take_bad() == set()
    for cache in importer.caches.values():
        assert bool((cache[6] == 3).all())
        assert bool((cache[5] == 5).all())


@pytest.mark.parametrize("speculative", [None, object()])
def test_a_copy_waits_for_the_forward_pass_only_where_a_drafter_may_write_late(
    make: Make, config: VllmConfig, speculative: Any
) -> None:
    """vLLM frees blocks when no step under way writes to them; it knows nothing of the drafter's
    writes after a step's output."""
    exporter = make(1)
    config.speculative_config = speculative
    importer = make(2)
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    with importer.driver.hold(importer.driver.compute_stream()):
        importer.side.begin_loads(metadata)
        transport: Any = importer.side._transport
        if speculative:
            until(lambda: transport.copy_stream.stream.owner.work)
            assert finished(importer.side) == set()
        else:
            until(lambda: "request" in finished(importer.side))


def test_a_copy_does_not_wait_for_the_forward_pass_behind_its_load(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the load's thread comes to it only when that pass is on its way."""
    exporter, importer = make(1), make(2)
    transport: Any = importer.side._transport
    transport.late_writers = True
    launched, begin = threading.Event(), transport.copy_stream.begin

    def begin_behind_the_launch(*arguments: Any) -> Any:
        assert launched.wait(30)
        return begin(*arguments)

    monkeypatch.setattr(transport.copy_stream, "begin", begin_behind_the_launch)
    importer.side.begin_loads(StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)]))
    compute, forward = importer.driver.compute_stream(), importer.driver.make(64)
    compute.owner.run()  # the steps before have ended
    with importer.driver.hold(compute):
        importer.driver.copy(forward, forward, 64, compute)
        launched.set()
        until(lambda: "request" in finished(importer.side))
    assert importer.side.take_bad() == set()


def test_a_load_at_once_waits_for_all_that_was_launched_before_it(make: Make) -> None:
    exporter, importer = make(1), make(2)
    transport: Any = importer.side._transport
    transport.late_writers = True
    importer.side.begin_loads(StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)]))
    until(lambda: "request" in finished(importer.side))
    importer.side.take_report()
    compute, late = importer.driver.compute_stream(), importer.driver.make(64)
    records = exporter.table.scan()
    piece = Piece(exporter.table.epoch, (), records, b"\0", (BlockId(5),), 8)
    load = LoadOrder("at once", importer.table.epoch, NO_TICKET, 0, (piece,), ())
    with importer.driver.hold(compute):
        importer.driver.copy(late, late, 64, compute)
        importer.side.load_at_once(StepMetadata(step=3, at_once=[load], patience=0.02))
    (report,) = importer.side.take_report().loads
    assert [failure.reason for failure in report.failures] == [LoadFailure.TOO_LATE]


def test_a_block_reused_while_it_is_copied_is_a_load_error(make: Make) -> None:
    exporter, importer = make(1), make(2)
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    transport: Any = importer.side._transport
    transport.late_writers = True  # so that the copy can be held
    with importer.driver.hold(importer.driver.compute_stream()):
        importer.side.begin_loads(metadata)
        until(lambda: transport.copy_stream.stream.owner.work)
        exporter.table.retract([BlockId(1)])
        exporter.table.force([BlockId(1)])
    until(lambda: "request" in finished(importer.side))
    assert importer.side.take_bad() == {6}


def test_a_load_waits_for_its_copy_without_polling(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that runs the model needs the interpreter."""
    exporter, importer = make(1), make(2)
    waits, go_on, polls = threading.Event(), threading.Event(), []
    real, poll = FakeDriver.synchronize_event, CudaCopy.poll

    def wait(driver: FakeDriver, event: Any) -> None:
        waits.set()
        assert go_on.wait(30)
        real(driver, event)

    monkeypatch.setattr(FakeDriver, "synchronize_event", wait)
    monkeypatch.setattr(CudaCopy, "poll", lambda copy: polls.append(copy) or poll(copy))
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    transport: Any = importer.side._transport
    with importer.driver.hold(transport.copy_stream.stream):
        importer.side.begin_loads(metadata)
        assert waits.wait(30)
        polled = len(polls)
        for _ in range(20):
            assert finished(importer.side) == set()
            time.sleep(0.001)
        assert len(polls) == polled
    go_on.set()
    until(lambda: "request" in finished(importer.side))
    assert importer.side.take_bad() == set()
    importer.side.close()
    assert importer.driver.entered == {"kvshm-loads", "kvshm-attach", "kvshm-unmap"}


def test_a_load_ends_though_nothing_can_wait_for_its_copy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = make(1), make(2)

    def refuse(*_: object) -> None:
        raise CudaError("cuEventSynchronize", "CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(FakeDriver, "synchronize_event", refuse)
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    transport: Any = importer.side._transport
    with importer.driver.hold(transport.copy_stream.stream):
        importer.side.begin_loads(metadata)
        until(lambda: transport.copy_stream.stream.owner.work)
    until(lambda: "request" in finished(importer.side))
    assert importer.side.take_bad() == set()


def test_a_fence_is_passed_when_all_that_was_launched_has_ended(make: Make) -> None:
    played = make(1)
    asked = StepMetadata(step=0, fence=7)
    with played.driver.hold(played.driver.compute_stream()):
        for _ in range(3):
            played.side.begin_step(asked)
            assert played.side.take_report().fence == 0
    played.side.begin_step(asked)
    assert played.side.take_report().fence == 7
    played.side.begin_step(StepMetadata(step=8))
    assert played.side.take_report().fence == 0


@pytest.mark.parametrize("staging", [False, True])
def test_the_setting_for_staging_reaches_the_transport(
    make: Make, config: VllmConfig, tmp_path: Path, staging: bool
) -> None:
    played = make(1)
    planned = cache_config(config, "LBNHC", BLOCKS, LAYERS)
    side = WorkerSide(Config(staging=staging), tmp_path, config, planned)
    side.register(played.caches)
    transport: Any = side._transport
    assert transport.staging is staging
    side.close()


def test_a_rank_without_a_thread_to_be_had_is_a_reason_and_no_failure(
    make: Make, config: VllmConfig, tmp_path: Path
) -> None:
    played = make(1)
    planned = cache_config(config, "LBNHC", BLOCKS, LAYERS)
    side = WorkerSide(Config(), tmp_path, config, planned)
    with no_threads():
        side.register(played.caches)
    assert "ulimit -u" in side.describe().refusal
    side.close()


def test_a_gpu_that_cannot_share_is_a_reason_and_no_failure(
    make: Make, config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = make(1)

    def missing() -> None:
        raise TransportError("no driver here")

    monkeypatch.setattr(cuda_transport, "current_driver", missing)
    planned = cache_config(config, "LBNHC", BLOCKS, LAYERS)
    side = WorkerSide(Config(), tmp_path, config, planned)
    side.register(played.caches)
    assert side.describe().refusal == "no driver here"
    side.close()
