"""A transport as another package may bring it, made from what kvshm.interfaces says alone."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import xxhash

from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState, Epoch, MemoryDescriptor, Region


class ProcMemory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("other-package")
        os.ftruncate(self.fd, nbytes)
        mapping = mmap.mmap(self.fd, nbytes)
        self.buffer = memoryview(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))

    def close(self) -> None:
        os.close(self.fd)


class EndedCopy:
    """A copy that ended when it began."""

    def __init__(self, state: CopyState) -> None:
        self._state = state

    def poll(self) -> CopyState:
        return self._state

    def cancel(self) -> None:
        pass

    def fence(self) -> bool:
        return False


def spans(regions: Sequence[Region], block: int) -> Iterator[slice]:
    for region in regions:
        begin = region.offset + block * region.stride
        yield slice(begin, begin + region.block_bytes)


class ProcAttachment:
    """A peer's memory, mapped read-only."""

    ended = False

    def __init__(self, own: ProcTransport, descriptor: MemoryDescriptor) -> None:
        if descriptor.transport != own.name:
            raise TransportError(f"no memory of {own.name}: {descriptor.transport}")
        try:
            fd = os.open(descriptor.details.decode(), os.O_RDONLY)
        except OSError as exc:
            raise StaleAttachment(f"the peer has ended: {exc}") from exc
        self.epoch = Epoch(descriptor.epoch)
        self._own, self._regions = own, descriptor.regions
        self._source = memoryview(mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ))
        os.close(fd)

    def begin_copy(
        self,
        source: Sequence[int],
        target: Sequence[int],
        keep_going: Callable[[], bool] | None = None,
    ) -> EndedCopy:
        if keep_going is not None and not keep_going():
            return EndedCopy(CopyState.FAILED)
        for one, other in zip(source, target, strict=True):
            here, there = spans(self._own.regions, other), spans(self._regions, one)
            for to, begin in zip(here, there, strict=True):
                self._own.memory.buffer[to] = self._source[begin]
        return EndedCopy(CopyState.DONE)

    def close(self) -> None:
        self._source = memoryview(b"")


class ProcTransport:
    name = "procfs"
    devices = ("cpu",)
    late_writers = True
    allocate = staticmethod(ProcMemory)

    def __init__(
        self,
        memory: ProcMemory,
        regions: Sequence[Region],
        rank: int,
        socket_path: object,
        fault: str | None,
    ) -> None:
        self.memory, self.regions, self.rank = memory, list(regions), rank

    def export(self, epoch: int) -> MemoryDescriptor:
        place = f"/proc/{os.getpid()}/fd/{self.memory.fd}"
        return MemoryDescriptor(self.name, epoch, self.rank, self.regions, place.encode())

    def attach(self, descriptor: MemoryDescriptor) -> ProcAttachment:
        return ProcAttachment(self, descriptor)

    def checksum(self, blocks: Sequence[int]) -> list[int]:
        sums = []
        for block in blocks:
            digest = xxhash.xxh3_64()
            for span in spans(self.regions, block):
                digest.update(self.memory.buffer[span])
            sums.append(digest.intdigest())
        return sums

    def close(self) -> None:
        pass
