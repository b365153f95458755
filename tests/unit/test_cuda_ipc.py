"""Handles, probes, routes and copies of the CUDA transport, over fake processes and GPUs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvshm._ground.ids import BlockId, Epoch
from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor
from kvshm.transport.cuda import checksum
from kvshm.transport.cuda.driver import CudaError, Route
from kvshm.transport.cuda.export import REMEDY, DeviceMemory
from kvshm.transport.cuda.transport import CudaIpcTransport

from ..doubles.cuda_fake import FakeDriver
from .cuda_ranks import (
    BLOCK,
    EPOCH,
    NBYTES,
    REGIONS,
    Node,
    copied,
    details_of,
    wire,
    with_details,
)

# -- ways to reach memory


@pytest.mark.parametrize("kind", ["ipc", "fd", "fabric"])
def test_every_kind_of_memory_is_shared(node: Node, kind: str) -> None:
    one, two = node.rank(kind=kind), node.rank(kind=kind)
    descriptor = wire(one.transport.export(EPOCH))
    assert details_of(descriptor)["memories"][0][0] == kind
    attachment = two.transport.attach(descriptor)
    assert copied(attachment, 3) is CopyState.DONE
    assert two.cache[: 3 * BLOCK] == bytes([1]) * (3 * BLOCK)
    assert two.cache[3 * BLOCK] == 2


def test_memory_inside_an_allocation_is_found_by_its_offset(node: Node) -> None:
    driver = node.machine.process()
    base = driver.make(3 * NBYTES)
    driver.bytes_at(base, 3 * NBYTES)[:] = bytes(NBYTES) + b"k" * NBYTES + b"v" * NBYTES
    memories = [DeviceMemory(base + NBYTES * i, NBYTES) for i in (1, 2)]
    regions = [REGIONS[0], msgspec.structs.replace(REGIONS[0], handle=1)]
    exporter = CudaIpcTransport(memories, regions, 0, driver=driver)
    other = node.machine.process()
    parts = [DeviceMemory(other.make(NBYTES), NBYTES) for _ in range(2)]
    importer = CudaIpcTransport(parts, regions, 0, driver=other)
    attachment = importer.attach(wire(exporter.export(EPOCH)))
    assert node.machine.opens == 2  # one allocation behind two tensors, and the probe
    assert copied(attachment) is CopyState.DONE
    assert [bytes(other.bytes_at(p.address, 2)) for p in parts] == [b"kk", b"vv"]
    importer.close()
    exporter.close()


def test_a_peer_in_the_same_process_is_read_directly(node: Node) -> None:
    one = node.rank()
    two = node.rank(driver=one.driver)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert node.machine.opens == 0
    assert copied(attachment) is CopyState.DONE
    assert two.cache[:BLOCK] == one.cache[:BLOCK]
    descriptor = one.transport.export(EPOCH)
    one.transport.close()
    with pytest.raises(TransportError, match="has closed"):
        two.transport.attach(descriptor)


def test_memory_nobody_can_export_is_refused_with_the_setting_to_change(node: Node) -> None:
    with pytest.raises(TransportError) as caught:
        node.rank(kind="async").transport.export(EPOCH)
    assert REMEDY in str(caught.value)
    assert "expandable_segments" in REMEDY


@pytest.mark.parametrize("kind", ["ipc", "fd", "fabric"])
def test_memory_in_several_allocations_is_refused_with_the_setting_to_change(
    node: Node, kind: str
) -> None:
    """As expandable segments make it, which vLLM may move: kvshm's hook refuses the setting."""
    driver = node.machine.process()
    memory = DeviceMemory(driver.make(NBYTES, kind), (1 << 16) + NBYTES)
    transport = CudaIpcTransport(memory, REGIONS, 0, driver=driver)
    with pytest.raises(TransportError, match="several allocations") as caught:
        transport.export(EPOCH)
    assert REMEDY in str(caught.value)
    transport.close()


@pytest.mark.parametrize("kind", ["ipc", "fd", "fabric"])
def test_a_handle_of_another_length_is_refused_before_the_driver_reads_it(
    node: Node, kind: str
) -> None:
    descriptor = wire(node.rank(kind=kind).transport.export(EPOCH))
    memories = [list(m) for m in details_of(descriptor)["memories"]]
    memories[0][4] = b"short"
    with pytest.raises(TransportError, match="a handle of 5 bytes"):
        node.rank(kind=kind).transport.attach(with_details(descriptor, memories=memories))


# -- the probe


def test_a_descriptor_made_before_its_epoch_serves_it(node: Node) -> None:
    """The roster completes what a rank said before its epoch was known."""
    one, two = node.rank(), node.rank()
    early = wire(one.transport.export(Epoch(0)))
    one.transport.export(EPOCH)
    assert two.transport.attach(msgspec.structs.replace(early, epoch=EPOCH)).epoch == EPOCH


def test_a_stale_descriptor_is_told_from_a_broken_path(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    one.transport.export(Epoch(9))
    with pytest.raises(StaleAttachment, match=r"serves epoch 0{15}9"):
        two.transport.attach(descriptor)
    with pytest.raises(TransportError, match="other bytes than its own"):
        two.transport.attach(with_details(descriptor, probe_checksum=1))
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0


def test_a_closed_exporter_serves_no_epoch(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    one.transport.close()
    with pytest.raises(StaleAttachment):
        two.transport.attach(descriptor)


def test_an_allocation_shorter_than_described_is_refused(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    memories = [list(m) for m in details_of(descriptor)["memories"]]
    memories[0][2] = 2 * NBYTES
    memories[0][3] = 4 * NBYTES
    with pytest.raises(TransportError, match="bytes here"):
        two.transport.attach(with_details(descriptor, memories=memories))


@pytest.mark.parametrize("details", [{}, {"process": 1}, {"socket": "/x"}])
def test_details_that_make_no_sense_are_refused(node: Node, details: dict[str, Any]) -> None:
    descriptor = with_details(MemoryDescriptor("cuda_ipc", EPOCH, 0, REGIONS), **details)
    with pytest.raises(TransportError, match="undecodable"):
        node.rank().transport.attach(descriptor)
    with pytest.raises(TransportError, match="no cuda_ipc memory"):
        node.rank().transport.attach(msgspec.structs.replace(descriptor, transport="posix_shm"))


# -- several GPUs


def test_a_peer_gpu_is_known_by_uuid_whether_or_not_it_is_visible(node: Node) -> None:
    one = node.rank("gpu-1")
    descriptor = wire(one.transport.export(EPOCH))
    assert details_of(descriptor)["device"] == "gpu-1"
    for importer in (node.rank("gpu-0"), node.rank("gpu-0", visible=("gpu-1",))):
        attachment = importer.transport.attach(descriptor)
        assert attachment.route in (Route.KERNEL, Route.BATCH)
        assert copied(attachment) is CopyState.DONE
        assert importer.cache[0] == 1


def test_gpus_that_cannot_reach_each_other_stay_unshared_unless_staging_is_allowed(
    node: Node,
) -> None:
    node.machine.unreachable.add(frozenset(("gpu-0", "gpu-1")))
    descriptor = wire(node.rank("gpu-1").transport.export(EPOCH))
    strict = node.rank("gpu-0", visible=("gpu-1",))
    with pytest.raises(TransportError, match="cannot reach"):
        strict.transport.attach(descriptor)
    staging = node.rank("gpu-0", visible=("gpu-1",), staging=True)
    attachment = staging.transport.attach(descriptor)
    assert attachment.route is Route.STAGED
    assert copied(attachment) is CopyState.DONE
    assert staging.cache[0] == 1


def test_an_invisible_gpu_that_cannot_be_reached_is_found_out_by_trying(node: Node) -> None:
    node.machine.unreachable.add(frozenset(("gpu-0", "gpu-1")))
    descriptor = wire(node.rank("gpu-1").transport.export(EPOCH))
    with pytest.raises(TransportError, match="PEER_ACCESS"):
        node.rank("gpu-0").transport.attach(descriptor)


def test_the_route_between_gpus_is_measured_once_per_fragment_size(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank("gpu-1"), node.rank("gpu-0")
    launches: list[str] = []
    for way in ("copy_kernel", "copy_batch"):
        real = getattr(two.driver, way)
        note = lambda *a, real=real, way=way: (launches.append(way), real(*a))  # noqa: E731
        monkeypatch.setattr(two.driver, way, note)
    two.transport.attach(wire(one.transport.export(EPOCH)))
    measured = len(launches)
    assert {"copy_kernel", "copy_batch"} == set(launches)
    two.transport.attach(wire(one.transport.export(EPOCH)))
    assert len(launches) == measured + 1  # only the probe


# -- copies


def test_a_copy_waits_for_what_the_model_has_put_on_its_stream(node: Node) -> None:
    """A late writer of the destination must not write after the copy."""
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    late = two.driver.allocate(BLOCK)
    compute = two.driver.compute_stream()
    with two.driver.hold(compute):
        two.driver.copy(two.address, late, BLOCK, compute)
        copy = attachment.begin_copy([BlockId(0)], [BlockId(0)])
        assert copy.poll() is CopyState.PENDING
    assert copy.poll() is CopyState.DONE
    assert two.cache[0] == 1


def test_a_copy_waits_for_nothing_that_the_model_launched_after_its_load(node: Node) -> None:
    """A load waits for what may still write to its blocks: not for the forward pass of its step."""
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    late, forward = two.driver.allocate(BLOCK), two.driver.allocate(BLOCK)
    compute = two.driver.compute_stream()
    two.driver.copy(two.address, late, BLOCK, compute)
    two.transport.note_launched()
    with two.driver.hold(compute):
        assert attachment.begin_copy([BlockId(0)], [BlockId(0)]).poll() is CopyState.PENDING
    two.transport.note_launched()
    compute.owner.run()
    with two.driver.hold(compute):
        two.driver.copy(forward, late, BLOCK, compute)
        assert attachment.begin_copy([BlockId(0)], [BlockId(0)]).poll() is CopyState.DONE
    assert two.cache[0] == 1


@pytest.mark.parametrize("broken", ["copy", "record"])
def test_a_copy_that_could_not_be_begun_writes_nothing_afterwards(
    node: Node, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Its caller gives the blocks away.  Here the second of three fragments is refused, or the
    event behind them."""
    node.machine.unreachable.add(frozenset(("gpu-0", "gpu-1")))
    one, two = node.rank("gpu-1"), node.rank("gpu-0", visible=("gpu-1",), staging=True)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert attachment.route is Route.STAGED
    stream = two.transport.copy_stream.stream
    real, calls = getattr(two.driver, broken), []

    def refuse(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == (2 if broken == "copy" else 1):
            raise CudaError(broken, "CUDA_ERROR_INVALID_VALUE")
        real(*arguments)

    monkeypatch.setattr(two.driver, broken, refuse)
    blocks = [BlockId(i) for i in range(3)]
    with pytest.raises(CudaError, match=broken):
        attachment.begin_copy(blocks, blocks)
    assert not stream.owner.work
    assert copied(attachment, 3) is CopyState.DONE
    assert two.cache[: 3 * BLOCK] == bytes([1]) * 3 * BLOCK


def test_a_rank_closes_though_its_gpu_has_failed(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Each part is given back, even if another one cannot be."""
    one, two = node.rank(), node.rank()
    two.transport.attach(wire(one.transport.export(EPOCH)))
    two.transport.export(EPOCH)
    freed: list[object] = []
    two.driver.free_stream = freed.append  # type: ignore[method-assign]
    two.driver.failing = True
    two.transport.close()
    assert "is not freed" in caplog.text
    assert two.transport._prober.stream in freed
    two.driver.failing = False


def test_a_checksum_covers_what_the_model_has_put_on_its_stream(node: Node) -> None:
    one = node.rank()
    before = one.transport.checksum([BlockId(0)])
    compute, ones = one.driver.compute_stream(), one.driver.allocate(BLOCK)
    one.driver.copy(one.address, ones, BLOCK, compute)
    assert one.transport.checksum([BlockId(0)]) != before


def test_checksums_of_more_blocks_than_the_buffer_holds_are_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node.rank()
    one.cache[:] = bytes(i // BLOCK for i in range(NBYTES))
    blocks = [BlockId(i) for i in (5, 0, 9, 2, 7)]
    at_once = one.transport.checksum(blocks)
    monkeypatch.setattr(checksum, "_BUFFER_BYTES", 2 * BLOCK)
    assert one.transport.checksum(blocks) == at_once
    assert len(set(at_once)) == len(blocks)


def test_more_blocks_than_prepared_buffers_hold_travel_in_one_copy(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copy = attachment.begin_copy([BlockId(0)] * 5000, [BlockId(1)] * 5000)
    assert copy.poll() is CopyState.DONE
    assert two.cache[BLOCK] == 1


def test_an_error_of_the_gpu_fails_the_copy_and_does_not_escape(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copy = attachment.begin_copy([BlockId(0)], [BlockId(0)])
    two.driver.failing = True
    assert copy.poll() is CopyState.FAILED
    two.driver.failing = False
    assert copy.poll() is CopyState.FAILED


def test_after_an_error_that_stays_nothing_of_a_copy_has_to_be_waited_for(node: Node) -> None:
    """Whatever is asked of the context from then on raises: nothing runs there any more."""
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copies = two.transport.copy_stream
    with two.driver.hold(copies.stream):
        copy = attachment.begin_copy([BlockId(0)], [BlockId(0)])
        assert copy.poll() is CopyState.PENDING
        two.driver.failing = True
        assert copy.fence()
        assert copy.poll() is CopyState.FAILED
        two.driver.failing = False


def test_a_driver_without_batched_copies_leaves_the_kernel(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank("gpu-1"), node.rank("gpu-0")

    def missing(*_: object) -> None:
        raise CudaError("cuMemcpyBatchAsync", "not in this driver")

    monkeypatch.setattr(two.driver, "copy_batch", missing)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert attachment.route is Route.KERNEL
    assert copied(attachment) is CopyState.DONE


def test_what_a_first_copy_needs_is_there_when_a_peer_is_attached(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling and allocating would stop the model for as long."""
    one, two = node.rank(), node.rank()
    prepared: list[Any] = []
    monkeypatch.setattr(two.driver, "prepare_kernel", prepared.append)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert attachment._table in prepared
    monkeypatch.setattr(two.driver, "allocate", None)
    monkeypatch.setattr(two.driver, "host_allocate", None)
    assert copied(attachment) is CopyState.DONE


def test_the_kernel_is_there_before_the_engine_serves(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load it may wait for all that the GPU does."""
    prepared: list[int] = []
    note = lambda _, table: prepared.append(table.word)  # noqa: E731
    monkeypatch.setattr(FakeDriver, "prepare_kernel", note)
    one, two = node.rank(), node.rank()
    assert len(prepared) == 2
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert attachment._table.word in prepared[:2]
