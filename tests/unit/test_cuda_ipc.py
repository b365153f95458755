"""Handles, probes, routes and copies of the CUDA transport, over fake processes and GPUs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvshm._base.ids import Epoch
from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor
from kvshm.transport.cuda.driver import Route
from kvshm.transport.cuda.export import REMEDY, DeviceMemory
from kvshm.transport.cuda.transport import CudaIpcTransport

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


def test_memory_no_one_can_export_is_refused_with_the_setting_to_change(node: Node) -> None:
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


def test_a_stale_descriptor_is_distinguished_from_a_broken_path(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    one.transport.export(Epoch(9))
    with pytest.raises(StaleAttachment, match=r"serves epoch 0{15}9"):
        two.transport.attach(descriptor)
    with pytest.raises(TransportError, match="other bytes than its own"):
        two.transport.attach(with_details(descriptor, probe_checksum=1))
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0


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
