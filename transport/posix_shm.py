"""Transport for KV caches in host memory (vLLM's CPU backend).

The exporter's cache lies in memfds.  Peers ask its descriptor socket for read-only descriptors,
map them once, and copy blocks out of the mapping.  The exporter does nothing for a copy, and may
even have ended::

    exporter                                     importer
    KVMemory (memfd, mapped writable)            PosixAttachment (same pages, PROT_READ)
       | read_only_fd                               | begin_copy
    FdServer  <--- {"epoch": e} --------------   fetch
              ---- {"status": "ok"} + fds ---->  mmap
              ==== left open: its end tells ==>  the exporter has ended
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvshm import _native
from kvshm.errors import StaleAttachment, TransportError
from kvshm.ids import BlockId, Epoch
from kvshm.interfaces import MemoryDescriptor, Region, unpack_details
from kvshm.shm.fd_server import FdServer
from kvshm.shm.fds import close_all, fetch_keep_open, peer_has_closed, sibling_socket

from .copier import BlockCopy, Copier, CopyPlan, StridedRun
from .faults import ZERO, check_fault, misdirect
from .memory import KVMemory, check_sealed_memory
from .regions import (
    block_checksum,
    check_blocks,
    check_bounds,
    check_layouts,
    check_pairs,
    count_blocks,
)

FETCH_TIMEOUT = 5.0
"""Seconds that an exporter's socket may take to answer; a separate thread answers."""


class ShmDetails(msgspec.Struct, frozen=True):
    """``MemoryDescriptor.details`` of this transport."""

    socket: str
    """Its name in the run directory."""


class MemoryRequest(msgspec.Struct, frozen=True):
    """An importer's request to the descriptor socket."""

    epoch: int


class MemoryReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply: "ok" (with the descriptors) or "stale", and the epoch served."""

    status: str
    epoch: int
    stays: bool = False
    """Whether the exporter leaves the connection open until its own end."""


_request_decoder = msgspec.msgpack.Decoder(MemoryRequest)
_reply_decoder = msgspec.msgpack.Decoder(MemoryReply)


def _runs(regions: Sequence[Region], addresses: Sequence[int]) -> list[StridedRun]:
    return [
        (addresses[r.handle] + r.offset, r.stride, r.block_bytes, r.num_blocks) for r in regions
    ]


def _map_read_only(fds: Sequence[int]) -> list[mmap.mmap]:
    try:
        for fd in fds:
            check_sealed_memory(fd)
        return [mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) for fd in fds]
    except (OSError, ValueError) as exc:
        raise TransportError(f"the peer's KV memory cannot be mapped: {exc}") from exc


def _check_count(descriptor: MemoryDescriptor, fds: Sequence[int]) -> None:
    """Raise TransportError unless there is exactly one descriptor per memory of the regions."""
    wanted = 1 + max((region.handle for region in descriptor.regions), default=-1)
    if len(fds) != wanted:
        raise TransportError(f"the peer sent {len(fds)} descriptors, its regions lie in {wanted}")


def _fetch_memory(
    descriptor: MemoryDescriptor, own_socket: str
) -> tuple[list[mmap.mmap], socket.socket | None]:
    """Ask the exporter for its descriptors and map them.  Also returns the connection, if it stays
    open.  Raises StaleAttachment or TransportError."""
    details = unpack_details(descriptor, PosixShmTransport.name, ShmDetails)
    socket_path = sibling_socket(own_socket, details.socket)
    request = msgspec.msgpack.encode(MemoryRequest(descriptor.epoch))
    reply, fds, connection = fetch_keep_open(socket_path, request, FETCH_TIMEOUT)
    stays = False
    try:
        answer = _reply_decoder.decode(reply)
        if answer.status != "ok" or answer.epoch != descriptor.epoch:
            raise StaleAttachment(
                f"{socket_path} serves epoch {answer.epoch:#x}, not {descriptor.epoch:#x}"
            )
        _check_count(descriptor, fds)
        mappings, stays = _map_read_only(fds), answer.stays
        return mappings, connection if stays else None
    except msgspec.DecodeError as exc:
        raise TransportError(f"{socket_path}: undecodable answer: {exc}") from exc
    finally:
        close_all(fds)
        if not stays:
            connection.close()


@dataclass(frozen=True, slots=True)
class _PeerMemory:
    """A peer's mapped memory, unmapped when neither attachment nor pending copy holds it."""

    regions: list[StridedRun]
    mappings: list[mmap.mmap]


class PosixAttachment:
    """A peer rank's memory, mapped read-only (kvshm.interfaces.Attachment)."""

    def __init__(
        self,
        own: PosixShmTransport,
        descriptor: MemoryDescriptor,
        mappings: list[mmap.mmap],
        connection: socket.socket | None,
    ) -> None:
        check_layouts(own.regions, descriptor.regions)
        check_bounds(descriptor.regions, [len(mapping) for mapping in mappings])
        self._connection = connection
        self.epoch = Epoch(descriptor.epoch)
        self._own = own
        self._num_blocks = count_blocks(descriptor.regions)
        addresses = [_native.address(mapping) for mapping in mappings]
        self._peer: _PeerMemory | None = _PeerMemory(_runs(descriptor.regions, addresses), mappings)

    @property
    def closed(self) -> bool:
        return self._peer is None

    @property
    def ended(self) -> bool:
        return self._connection is not None and peer_has_closed(self._connection)

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
    ) -> BlockCopy:
        own, peer = self._own, self._peer
        if peer is None:
            raise TransportError(f"the attachment to epoch {self.epoch:#x} is closed")
        check_pairs(source, self._num_blocks, target, own.num_blocks)
        regions, zeros = peer.regions, b""
        if own.fault == ZERO:
            regions, zeros = _all_zeros(regions)
        blocks = misdirect(source, self._num_blocks, own.fault)
        plan = CopyPlan(regions, blocks, own.target, target, (peer, zeros, own.memory))
        copier = own.copier
        return copier.begin(plan) if keep_going is None else copier.copy_now(plan, keep_going)

    def close(self) -> None:
        """Unmap on the copy thread, after this attachment's copies.  Idempotent, never blocks."""
        peer, self._peer = self._peer, None
        if peer is None:
            return
        if self._connection is not None:
            self._connection.close()
        last = [peer]  # clearing the list unmaps the memory, unless a copy still holds it
        del peer
        # A closed transport has no queue any more: the memory is then unmapped on return.
        with suppress(TransportError):
            self._own.copier.submit(last.clear)


def _all_zeros(regions: list[StridedRun]) -> tuple[list[StridedRun], bytes]:
    """Regions in which every block is the same zeros; also the zeros, which must be kept."""
    zeros = bytes(max(block_bytes for _, _, block_bytes, _ in regions))
    address = _native.address(zeros)
    return [(address, 0, block_bytes, count) for _, _, block_bytes, count in regions], zeros


class PosixShmTransport:
    """One rank's KV cache in shared host memory (kvshm.interfaces.Transport).

    ``export``, copies and ``checksum`` belong to one thread; ``attach`` and closing may be
    called by others.  A forked child must not use it.
    """

    name = "posix_shm"
    late_writers = True
    """Without effect here: on a CPU, the model's launched work has ended."""
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
        TransportError if the regions do not fit the memory.
        """
        check_fault(fault)
        self.memory = (memory,) if isinstance(memory, KVMemory) else tuple(memory)
        self.regions = list(regions)
        check_bounds(self.regions, [m.nbytes for m in self.memory])
        self.rank = rank
        self.fault = fault
        self.num_blocks = count_blocks(self.regions)
        self.target = _runs(self.regions, [m.address for m in self.memory])
        self.copier = Copier()
        self._views = [m.buffer.toreadonly() for m in self.memory]
        self._socket_path = os.fspath(socket_path)
        self._lock = threading.Lock()
        self._closed = False
        self._epoch = Epoch(0)
        self._fds: list[int] = []
        self._server: FdServer | None = None
        self._attachments: list[PosixAttachment] = []

    def export(self, epoch: Epoch) -> MemoryDescriptor:
        with self._lock:
            if self._closed:
                raise TransportError("the transport is closed")
            self._epoch = epoch
            while len(self._fds) < len(self.memory):
                self._fds.append(self.memory[len(self._fds)].read_only_fd())
            if self._server is None:
                self._server = FdServer(self._socket_path, self._answer)
        details = msgspec.msgpack.encode(ShmDetails(os.path.basename(self._socket_path)))
        return MemoryDescriptor(self.name, epoch, self.rank, self.regions, details)

    def _answer(self, packed: bytes) -> tuple[bytes, list[int]]:
        """Answer one request, on the server's thread, without the lock: ``close`` holds it."""
        epoch = self._epoch
        try:
            wanted = _request_decoder.decode(packed).epoch
        except msgspec.DecodeError:
            return msgspec.msgpack.encode(MemoryReply("bad request", epoch)), []
        if wanted != epoch:
            return msgspec.msgpack.encode(MemoryReply("stale", epoch)), []
        return msgspec.msgpack.encode(MemoryReply("ok", epoch, stays=True)), self._fds

    def attach(self, descriptor: MemoryDescriptor) -> PosixAttachment:
        mappings, connection = _fetch_memory(descriptor, self._socket_path)
        try:
            attachment = PosixAttachment(self, descriptor, mappings, connection)
            with self._lock:
                if self._closed:
                    raise TransportError("the transport is closed")
                self._attachments = [a for a in self._attachments if not a.closed]
                self._attachments.append(attachment)
        except BaseException:
            if connection is not None:
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
            if self._closed:
                return
            self._closed = True
        if self._server is not None:
            self._server.close()
        for attachment in self._attachments:
            attachment.close()
        self.copier.close()
        close_all(self._fds)
        # Break reference cycles, which would keep gigabytes until the garbage collector runs.
        self._fds, self._attachments, self._server = [], [], None
