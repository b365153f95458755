"""Ranks on fake GPUs, for the tests of the CUDA transport."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import msgspec

from kvshm._base.ids import BlockId, Epoch
from kvshm.interfaces import CopyState, MemoryDescriptor, Region
from kvshm.transport.cuda.export import HOST, DeviceMemory
from kvshm.transport.cuda.transport import CudaIpcTransport
from kvshm.transport.memory import KVMemory

from ..doubles.cuda_fake import FakeDriver, FakeMachine

BLOCK, COUNT = 256, 16
NBYTES = BLOCK * COUNT
REGIONS = [Region(0, BLOCK, BLOCK, COUNT)]
EPOCH = Epoch(0xE1)


@dataclass
class Rank:
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
        self,
        gpu: str = "gpu-0",
        kind: str = "ipc",
        driver: FakeDriver | None = None,
        visible: tuple[str, ...] = (),
        **extra: Any,
    ) -> Rank:
        driver = driver or self.machine.process(gpu, visible)
        memory: DeviceMemory | KVMemory
        if kind == HOST:
            memory = KVMemory.create(NBYTES)
        else:
            memory = DeviceMemory(driver.make(NBYTES, kind), NBYTES)
        socket = f"{self.run_dir}/{len(self.ranks)}"
        transport = CudaIpcTransport(memory, REGIONS, 0, socket, driver=driver, **extra)
        rank = Rank(driver, memory.address, transport)
        rank.cache[:] = bytes([len(self.ranks) + 1]) * NBYTES
        self.ranks.append(rank)
        return rank


def copied(attachment: Any, pairs: int = 1) -> CopyState:
    blocks = [BlockId(i) for i in range(pairs)]
    return attachment.begin_copy(blocks, blocks).poll()


def wire(descriptor: MemoryDescriptor) -> MemoryDescriptor:
    """The descriptor as it arrives: through the roster's msgpack."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(descriptor), type=MemoryDescriptor)


def details_of(descriptor: MemoryDescriptor) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(descriptor.details or b"\x80")
    return found


def with_details(descriptor: MemoryDescriptor, **details: Any) -> MemoryDescriptor:
    packed = msgspec.msgpack.encode({**details_of(descriptor), **details})
    return msgspec.structs.replace(descriptor, details=packed)


def assert_only_own_memory(rank: Rank) -> None:
    foreign = [
        m for m in rank.driver.mapped.values() if m.allocation and m.allocation.owner != rank.driver
    ]
    assert foreign == []


def wait_for_closer(transport: CudaIpcTransport) -> None:
    """Block until the closing thread has done all it was handed so far."""
    done = threading.Event()
    transport._closer.submit(done.set)
    assert done.wait(30)
