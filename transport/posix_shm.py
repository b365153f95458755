"""Transport for KV caches in host memory (vLLM's CPU backend).

The exporter's cache lies in memfds.  Peers ask its descriptor socket for read-only descriptors,
map them once, and copy blocks out of the mapping.  The exporter does nothing for a copy, and may
even have ended::

    exporter                                     importer
    KVMemory (memfd, mapped writable)            PosixAttachment (same pages, PROT_READ)
       | read_only_fd                               | begin_copy
    DescriptorServer  <--------------------->    ask, mmap (kvshm/_shm/descriptors.py)
              ==== left open: its end tells ==>  the exporter has ended
              <== ... or tells the exporter ===  the importer has unmapped the memory
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvshm import _native
from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import BlockId, Epoch
from kvshm._shm.descriptors import (
    MEMORY_KIND,
    MEMORY_SECONDS,
    DescriptorServer,
    Request,
    ask,
)
from kvshm._shm.fds import close_all, peer_has_closed, sibling_socket
from kvshm.config import Fault
from kvshm.errors import SegmentNotFound, TransportError
from kvshm.interfaces import MemoryDescriptor, Region, unpack_details

from .copier import BlockCopy, Copier, CopyPlan, StridedRun
from .memory import KVMemory, map_read_only
from .own_cache import OwnCache
from .regions import block_checksum, check_blocks, count_blocks


class ShmDetails(msgspec.Struct, frozen=True):
    """``MemoryDescriptor.details`` of this transport."""

    socket: str


def _runs(regions: Sequence[Region], addresses: Sequence[int]) -> list[StridedRun]:
    return [
        (addresses[r.handle] + r.offset, r.stride, r.block_bytes, r.num_blocks) for r in regions
    ]


def _map_read_only(descriptor: MemoryDescriptor, fds: Sequence[int]) -> list[mmap.mmap]:
    """Map the peer's memories.  Raises TransportError unless there is exactly one descriptor for
    each memory of the regions, and each is sealed."""
    wanted = 1 + max((region.handle for region in descriptor.regions), default=-1)
    if len(fds) != wanted:
        raise TransportError(f"the peer sent {len(fds)} descriptors, its regions lie in {wanted}")
    return [map_read_only(fd) for fd in fds]


def _fetch_memory(
    descriptor: MemoryDescriptor, own_socket: str
) -> tuple[list[mmap.mmap], socket.socket]:
    """Ask the exporter for its descriptors and map them.  Also returns the connection.  Raises
    StaleAttachment or TransportError."""
    details = unpack_details(descriptor, PosixShmTransport.name, ShmDetails)
    socket_path = sibling_socket(own_socket, details.socket)
    wanted = Request(MEMORY_KIND, descriptor.epoch)
    fds, connection = ask(socket_path, wanted, MEMORY_SECONDS)
    try:
        return _map_read_only(descriptor, fds), connection
    except BaseException:
        connection.close()
        raise
    finally:
        close_all(fds)


class PosixAttachment:
    """A peer rank's memory, mapped read-only (kvshm.interfaces.Attachment)."""

    path = CopyPath.SHM

    def __init__(
        self,
        own: PosixShmTransport,
        descriptor: MemoryDescriptor,
        mappings: list[mmap.mmap],
        connection: socket.socket,
    ) -> None:
        own.check_peer(descriptor, [len(mapping) for mapping in mappings])
        self._connection = connection
        self.epoch = Epoch(descriptor.epoch)
        self._own = own
        self._num_blocks = count_blocks(descriptor.regions)
        addresses = [_native.address(mapping) for mapping in mappings]
        self._regions = _runs(descriptor.regions, addresses)
        self._mappings: list[mmap.mmap] | None = mappings
        """Unmapped when neither the attachment nor a pending copy holds the list."""

    @property
    def closed(self) -> bool:
        return self._mappings is None

    @property
    def ended(self) -> bool:
        return peer_has_closed(self._connection)

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
    ) -> BlockCopy:
        own, mappings = self._own, self._mappings
        if mappings is None:
            raise TransportError(f"the attachment to epoch {self.epoch:016x} is closed")
        blocks = own.blocks_to_read(source, self._num_blocks, target)
        regions, zeros = self._regions, b""
        if own.fault == Fault.ZERO:
            regions, zeros = _all_zeros(regions)
        plan = CopyPlan(regions, blocks, own.target, target, (mappings, zeros, own.memory))
        copier = own.copier
        return copier.begin(plan) if keep_going is None else copier.copy_now(plan, keep_going)

    def close(self) -> None:
        """Unmap on the copy thread, after this attachment's copies.  Idempotent, never blocks."""
        mappings, self._mappings = self._mappings, None
        if mappings is None:
            return
        last = [mappings]  # clearing this list unmaps the memory, unless a copy still holds it
        del mappings
        connection = self._connection

        def unmap() -> None:
            last.clear()
            connection.close()  # afterwards: it tells the exporter that its memory is unmapped

        try:
            self._own.copier.submit(unmap)
        except TransportError:
            unmap()  # a closed transport has no queue any more


def _all_zeros(regions: list[StridedRun]) -> tuple[list[StridedRun], bytes]:
    """Regions in which every block is the same zeros; also the zeros, which must be kept."""
    zeros = bytes(max(block_bytes for _, _, block_bytes, _ in regions))
    address = _native.address(zeros)
    return [(address, 0, block_bytes, count) for _, _, block_bytes, count in regions], zeros


class PosixShmTransport(OwnCache):
    """One rank's KV cache in shared host memory (kvshm.interfaces.Transport).  ``export``, copies
    and ``checksum`` belong to one thread; ``attach`` and closing may be called by others.  A forked
    child must not use it."""

    name = "posix_shm"
    devices = ("cpu",)
    late_writers = True
    allocate = staticmethod(KVMemory.create)

    def __init__(
        self,
        memory: KVMemory | Sequence[KVMemory],
        regions: Sequence[Region],
        rank: int,
        socket_path: str | Path,
        fault: str | None = None,
    ) -> None:
        """Share ``memory`` (``Region.handle`` indexes it) as laid out in ``regions``.
        ``socket_path`` is the path of this rank's socket in the run directory.  ``fault`` makes
        every copy wrong on purpose (faults.py).  The caller closes the memory.  Raises
        TransportError if the regions do not fit the memory."""
        self.memory = (memory,) if isinstance(memory, KVMemory) else tuple(memory)
        super().__init__([m.nbytes for m in self.memory], regions, rank, fault)
        self.target = _runs(self.regions, [m.address for m in self.memory])
        self.copier = Copier()
        self._views = [m.buffer.toreadonly() for m in self.memory]
        self._socket_path = os.fspath(socket_path)
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._server: DescriptorServer | None = None
        self._attachments: list[PosixAttachment] = []

    def export(self, epoch: Epoch) -> MemoryDescriptor:
        with self._lock:
            self.check_open()
            self.epoch = epoch
            while len(self._fds) < len(self.memory):
                self._fds.append(self.memory[len(self._fds)].read_only_fd())
            if self._server is None:
                self._server = DescriptorServer(self._socket_path, self._find, keep=True)
            return self.describe(ShmDetails(os.path.basename(self._socket_path)))

    def _find(self, wanted: Request) -> list[int]:
        """On the server's thread, without the lock: ``close`` holds it."""
        if (epoch := self.epoch) != wanted.epoch or wanted.kind != MEMORY_KIND:
            raise SegmentNotFound(f"it serves epoch {epoch:016x}, not {wanted.epoch:016x}")
        return self._fds

    def withdraw(self) -> Callable[[], int]:
        """See SupportsWithdraw."""
        self.epoch = Epoch(0)
        return lambda: 0 if self._server is None else self._server.connections

    def attach(self, descriptor: MemoryDescriptor) -> PosixAttachment:
        mappings, connection = _fetch_memory(descriptor, self._socket_path)
        try:
            attachment = PosixAttachment(self, descriptor, mappings, connection)
            with self._lock:
                self.check_open()
                self._attachments = [a for a in self._attachments if not a.closed]
                self._attachments.append(attachment)
        except BaseException:
            connection.close()
            raise
        return attachment

    def checksum(self, blocks: Sequence[BlockId]) -> list[int]:
        check_blocks(blocks, self.num_blocks, "this cache's")
        return [block_checksum(self._views, self.regions, block) for block in blocks]

    def close(self) -> None:
        """End the export, cancel copies, close attachments.  Idempotent.  Returns when nothing is
        written any more: after the block that is being copied at most."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self._server is not None:
            self._server.close()
        for attachment in self._attachments:
            attachment.close()
        self.copier.close()
        close_all(self._fds)
        # Break reference cycles, which would keep gigabytes until the garbage collector runs.
        self._fds = []
        self._attachments = []
        self._server = None
