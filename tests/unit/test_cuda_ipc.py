"""Handles, mappings, probes and routes of the CUDA transport, over fake processes and GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor, Region
from kvshm.terms import BlockId, Epoch
from kvshm.transport.cuda_copy import Route
from kvshm.transport.cuda_export import REMEDY, DeviceMemory
from kvshm.transport.cuda_fake import FakeDriver, FakeMachine
from kvshm.transport.cuda_ipc import CudaIpcTransport

BLOCK, COUNT = 256, 16
NBYTES = BLOCK * COUNT
REGIONS = [Region(0, BLOCK, BLOCK, COUNT)]
EPOCH = Epoch(0xE1)


@dataclass
class Rank:
    """A fake process with one cache."""

    driver: FakeDriver
    address: int
    transport: CudaIpcTransport

    @property
    def cache(self) -> memoryview:
        return self.driver.bytes_at(self.address, NBYTES)


class Node:
    def __init__(self, run_dir: Any) -> None:
        self.machine = FakeMachine()
        self.run_dir = run_dir
        self.ranks: list[Rank] = []

    def rank(
        self, gpu: str = "gpu-0", kind: str = "ipc", driver: FakeDriver | None = None,
        visible: tuple[str, ...] = (), **extra: Any,
    ) -> Rank:  # fmt: skip
        driver = driver or self.machine.process(gpu, visible)
        address = driver.make(NBYTES, kind)
        memory = DeviceMemory(address, NBYTES)
        socket = f"{self.run_dir}/{len(self.ranks)}"
        transport = CudaIpcTransport(memory, REGIONS, 0, socket, driver=driver, **extra)
        rank = Rank(driver, address, transport)
        rank.cache[:] = bytes([len(self.ranks) + 1]) * NBYTES
        self.ranks.append(rank)
        return rank


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("k"))
    yield made
    for rank in made.ranks:
        rank.transport.close()


def copied(attachment: Any, pairs: int = 1) -> CopyState:
    blocks = [BlockId(i) for i in range(pairs)]
    return attachment.begin_copy(blocks, blocks).poll()


def wire(descriptor: MemoryDescriptor) -> MemoryDescriptor:
    """The descriptor as it arrives: through the roster's msgpack."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(descriptor), type=MemoryDescriptor)


# -- ways to reach memory


@pytest.mark.parametrize("kind", ["ipc", "fd", "fabric"])
def test_every_kind_of_memory_is_shared(node: Node, kind: str) -> None:
    one, two = node.rank(kind=kind), node.rank(kind=kind)
    descriptor = wire(one.transport.export(EPOCH))
    assert descriptor.details["memories"][0][0] == kind
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


# -- mappings


def test_an_allocation_is_opened_once_and_closed_with_its_last_user(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    attachments = [two.transport.attach(descriptor) for _ in range(3)]
    assert node.machine.opens == 2
    for attachment in attachments[:2]:
        attachment.close()
        attachment.close()
    assert copied(attachments[2]) is CopyState.DONE
    attachments[2].close()
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0
    assert_only_own_memory(two)


def assert_only_own_memory(rank: Rank) -> None:
    foreign = [
        m for m in rank.driver.mapped.values() if m.allocation and m.allocation.owner != rank.driver
    ]
    assert foreign == []


def settled(transport: CudaIpcTransport) -> None:
    """What was handed to the closing thread so far is done."""
    done = threading.Event()
    transport._closer.submit(done.set)
    assert done.wait(30)


def test_a_mapping_outlives_copies_begun_before_the_close(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    stream = two.transport.engine.stream
    first = attachment.begin_copy([BlockId(0)], [BlockId(0)])
    stream.owner.run()
    with two.driver.hold(stream):
        second = attachment.begin_copy([BlockId(1)], [BlockId(1)])
        attachment.close()
        assert first.poll() is CopyState.DONE
        settled(two.transport)
        assert len(two.transport.mappings) == 2
        assert second.poll() is CopyState.PENDING
    assert second.poll() is CopyState.DONE
    assert two.cache[BLOCK] == 1
    settled(two.transport)
    assert len(two.transport.mappings) == 0


def test_many_attachments_leave_nothing_behind(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    for _ in range(1000):
        two.transport.attach(descriptor).close()
    two.transport._closer.close()
    assert_only_own_memory(two)
    assert len(two.driver.mapped) < 20


def test_equal_handles_of_two_lives_are_never_confused(node: Node) -> None:
    one, two = node.rank(), node.rank()
    first = wire(one.transport.export(EPOCH))
    attachment = two.transport.attach(first)
    details = dict(first.details, life=first.details["life"] + 1)
    reborn = msgspec.structs.replace(first, details=details)
    with pytest.raises(TransportError, match="earlier life"):
        two.transport.attach(reborn)
    attachment.close()
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0


def test_another_epoch_of_unchanged_memory_uses_the_mapping_that_is_there(node: Node) -> None:
    one, two = node.rank(), node.rank()
    first = wire(one.transport.export(EPOCH))
    two.transport.attach(first)
    one.transport.export(Epoch(0))
    second = wire(one.transport.export(Epoch(2)))
    assert second.details == first.details
    assert two.transport.attach(second).epoch == 2
    assert node.machine.opens == 2


def test_vmm_memory_described_anew_has_another_life(node: Node) -> None:
    one, two = node.rank(kind="fd"), node.rank(kind="fd")
    before = wire(one.transport.export(EPOCH))
    one.transport.export(Epoch(0))
    after = wire(one.transport.export(EPOCH))
    assert after.details["life"] != before.details["life"]
    with pytest.raises(StaleAttachment):
        two.transport.attach(before)
    assert copied(two.transport.attach(after)) is CopyState.DONE


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
    with pytest.raises(StaleAttachment, match="0x9"):
        two.transport.attach(descriptor)
    wrong = dict(descriptor.details, probe_checksum=1)
    with pytest.raises(TransportError, match="other bytes than its own"):
        two.transport.attach(msgspec.structs.replace(descriptor, details=wrong))
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
    memories = [list(m) for m in descriptor.details["memories"]]
    memories[0][2] = 2 * NBYTES
    memories[0][3] = 4 * NBYTES
    longer = msgspec.structs.replace(
        descriptor, details=dict(descriptor.details, memories=memories)
    )
    with pytest.raises(TransportError, match="bytes here"):
        two.transport.attach(longer)


@pytest.mark.parametrize("details", [{}, {"process": 1}, {"socket": "/x"}])
def test_details_that_make_no_sense_are_refused(node: Node, details: dict[str, Any]) -> None:
    descriptor = MemoryDescriptor("cuda_ipc", EPOCH, 0, REGIONS, details)
    with pytest.raises(TransportError, match="undecodable"):
        node.rank().transport.attach(descriptor)
    with pytest.raises(TransportError, match="no cuda_ipc memory"):
        node.rank().transport.attach(msgspec.structs.replace(descriptor, transport="posix_shm"))


# -- several GPUs


def test_a_peer_gpu_is_known_by_uuid_whether_or_not_it_is_visible(node: Node) -> None:
    one = node.rank("gpu-1")
    descriptor = wire(one.transport.export(EPOCH))
    assert descriptor.details["device"] == "gpu-1"
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


def test_a_checksum_covers_what_the_model_has_put_on_its_stream(node: Node) -> None:
    one = node.rank()
    before = one.transport.checksum([BlockId(0)])
    compute, ones = one.driver.compute_stream(), one.driver.allocate(BLOCK)
    one.driver.copy(one.address, ones, BLOCK, compute)
    assert one.transport.checksum([BlockId(0)]) != before


def test_more_blocks_than_a_slot_holds_travel_in_one_copy(node: Node) -> None:
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
