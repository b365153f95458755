"""The connector's half in a CUDA worker, in the order in which Model Runner V2 calls it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import VllmConfig

from kvshm._base.ids import BlockId
from kvshm._engine.load_plan import NO_TICKET, LoadFailure, LoadOrder, Piece
from kvshm.config import Config
from kvshm.errors import TransportError
from kvshm.hooks.vllm.messages import StepMetadata
from kvshm.hooks.vllm.worker_side import WorkerSide
from kvshm.transport.cuda import transport as cuda_transport

from ..unit.few_threads import no_threads
from .cuda_workers import BLOCKS, LAYERS, Make, finished, load_of, until
from .tiny_config import cache_config


def test_a_load_begun_behind_a_launched_forward_pass_ends_after_it(cuda_worker: Make) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)
    transport: Any = importer.side._cache.transport
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
    assert importer.side.loads.take_bad() == set()
    for cache in importer.caches.values():
        assert bool((cache[6] == 3).all())
        assert bool((cache[5] == 5).all())


@pytest.mark.parametrize("speculative", [None, object()])
def test_a_copy_waits_for_the_forward_pass_only_where_a_drafter_may_write_late(
    cuda_worker: Make, cuda_config: VllmConfig, speculative: Any
) -> None:
    """vLLM frees blocks when no step under way writes to them; it knows nothing of the drafter's
    writes after a step's output."""
    exporter = cuda_worker(1)
    cuda_config.speculative_config = speculative
    importer = cuda_worker(2)
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    with importer.driver.hold(importer.driver.compute_stream()):
        importer.side.begin_loads(metadata)
        transport: Any = importer.side._cache.transport
        if speculative:
            until(lambda: transport.copy_stream.stream.owner.work)
            assert finished(importer.side) == set()
        else:
            until(lambda: "request" in finished(importer.side))


def test_a_copy_does_not_wait_for_the_forward_pass_behind_its_load(
    cuda_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the load's thread comes to it only when that pass is on its way."""
    exporter, importer = cuda_worker(1), cuda_worker(2)
    transport: Any = importer.side._cache.transport
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
    assert importer.side.loads.take_bad() == set()


def test_a_load_at_once_waits_for_all_that_was_launched_before_it(cuda_worker: Make) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)
    transport: Any = importer.side._cache.transport
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


def test_a_block_reused_while_it_is_copied_is_a_load_error(cuda_worker: Make) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    transport: Any = importer.side._cache.transport
    transport.late_writers = True  # so that the copy can be held
    with importer.driver.hold(importer.driver.compute_stream()):
        importer.side.begin_loads(metadata)
        until(lambda: transport.copy_stream.stream.owner.work)
        exporter.table.retract([BlockId(1)])
        exporter.table.force([BlockId(1)])
    until(lambda: "request" in finished(importer.side))
    assert importer.side.loads.take_bad() == {6}


def test_a_fence_is_passed_when_all_that_was_launched_has_ended(cuda_worker: Make) -> None:
    played = cuda_worker(1)
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
    cuda_worker: Make, cuda_config: VllmConfig, tmp_path: Path, staging: bool
) -> None:
    played = cuda_worker(1)
    planned = cache_config(cuda_config, "LBNHC", BLOCKS, LAYERS)
    side = WorkerSide(Config(staging=staging), tmp_path, cuda_config, planned)
    side.register(played.caches)
    transport: Any = side._cache.transport
    assert transport.staging is staging
    side.close()


def test_a_rank_without_a_thread_to_be_had_is_a_reason_and_no_failure(
    cuda_worker: Make, cuda_config: VllmConfig, tmp_path: Path
) -> None:
    played = cuda_worker(1)
    planned = cache_config(cuda_config, "LBNHC", BLOCKS, LAYERS)
    side = WorkerSide(Config(), tmp_path, cuda_config, planned)
    with no_threads():
        side.register(played.caches)
    assert "ulimit -u" in side.describe().refusal
    side.close()


def test_a_gpu_that_cannot_share_is_a_reason_and_no_failure(
    cuda_worker: Make, cuda_config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = cuda_worker(1)

    def missing() -> None:
        raise TransportError("no driver here")

    monkeypatch.setattr(cuda_transport, "current_driver", missing)
    planned = cache_config(cuda_config, "LBNHC", BLOCKS, LAYERS)
    side = WorkerSide(Config(), tmp_path, cuda_config, planned)
    side.register(played.caches)
    assert side.describe().refusal == "no driver here"
    side.close()
