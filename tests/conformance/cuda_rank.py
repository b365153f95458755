"""One rank in a process of its own: the other side of cuda_processes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
from gpu_memory import held
from gpu_node import own_socket
from gpu_peer import answer_calls

from kvshm._base.ids import BlockId, Epoch
from kvshm.interfaces import Copy, MemoryDescriptor, Region
from kvshm.transport.cuda.attachment import CudaAttachment
from kvshm.transport.cuda.driver import write
from kvshm.transport.cuda.export import DeviceMemory
from kvshm.transport.cuda.nvidia import NvidiaDriver
from kvshm.transport.cuda.transport import CudaIpcTransport
from kvshm.transport.memory import KVMemory


class Rank:
    """What is called, once per line, by RankProcess."""

    def __init__(self, device: int) -> None:
        self.driver = NvidiaDriver(device)
        self.stream = self.driver.new_stream()
        self.spare: dict[int, list[int]] = {}
        self.memories: list[DeviceMemory | KVMemory] = []
        self.things: list[Any] = []
        self.holding = ExitStack()

    def build(self, sizes: list[int], regions: str, fault: str | None, kind: str) -> None:
        """``kind``: of the memories, as export.py names it: fd, host or ipc."""
        self.memories = [self._memory(size, kind) for size in sizes]
        decoded = msgspec.msgpack.decode(bytes.fromhex(regions), type=list[Region])
        self.transport = CudaIpcTransport(
            self.memories, decoded, 0, own_socket(), fault, driver=self.driver
        )

    def _memory(self, nbytes: int, kind: str) -> DeviceMemory | KVMemory:
        if kind == "host":
            return KVMemory.create(nbytes)
        return DeviceMemory(self._allocate(nbytes, kind), nbytes)

    def _allocate(self, nbytes: int, kind: str) -> int:
        # Never freed, for a peer may have it open: the next test uses it again.
        spare = self.spare.get(nbytes)
        if spare:
            return spare.pop()
        if kind == "fd":
            return self.driver.vmm_allocate(nbytes, fabric=False)[0]
        return self.driver.allocate_shared(nbytes)

    def put_back(self) -> None:
        """The test is over: keep the memory for the next."""
        for memory in self.memories:
            if isinstance(memory, DeviceMemory):
                self.spare.setdefault(memory.nbytes, []).append(memory.address)
        self.memories = []
        self.things = []

    def read(self, number: int) -> str:
        memory = self.memories[number]
        if isinstance(memory, KVMemory):
            return bytes(memory.buffer).hex()
        buffer = self.driver.host_allocate(memory.nbytes)
        self.driver.copy(buffer.address, memory.address, memory.nbytes, self.stream)
        self.driver.synchronize(self.stream)
        found = bytes(buffer.view)
        self.driver.host_free(buffer)
        return found.hex()

    def write(self, number: int, packed: str) -> None:
        memory = self.memories[number]
        if isinstance(memory, KVMemory):
            memory.buffer[:] = bytes.fromhex(packed)
        else:
            write(self.driver, memory.address, bytes.fromhex(packed), self.stream)

    def hold(self) -> None:
        self.holding.enter_context(held(self.driver, self.transport.copy_stream.stream))

    def release(self) -> None:
        self.holding.close()

    def export(self, epoch: Epoch) -> str:
        return msgspec.msgpack.encode(self.transport.export(epoch)).hex()

    def attach(self, descriptor: str) -> tuple[int, str]:
        found = msgspec.msgpack.decode(bytes.fromhex(descriptor), type=MemoryDescriptor)
        attachment = self.transport.attach(found)
        return self._keep(attachment), attachment.route.value

    def _keep(self, thing: CudaAttachment | Copy) -> int:
        self.things.append(thing)
        return len(self.things) - 1

    def begin_copy(self, attachment: int, source: list[BlockId], target: list[BlockId]) -> int:
        return self._keep(self.things[attachment].begin_copy(source, target))

    def detach(self, attachment: int) -> None:
        self.things[attachment].close()

    def poll(self, copy: int) -> str:
        return str(self.things[copy].poll().value)

    def cancel(self, copy: int) -> None:
        self.things[copy].cancel()

    def checksum(self, blocks: list[BlockId]) -> list[int]:
        return list(self.transport.checksum(blocks))

    def close(self) -> None:
        self.transport.close()


if __name__ == "__main__":
    answer_calls(Rank)
