"""Other processes' GPU memory, mapped into this one: every allocation once.

A mapping is identified by the export_id of the peer's memory and the handle, never by the handle
alone: drivers return byte-identical handles for new memory at an old address.  A mapping is closed
with its last user, on a separate thread because closing may wait for the device.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvshm import _native
from kvshm._base.log import logger
from kvshm._shm.fds import close_all, sibling_socket
from kvshm.errors import TransportError

from ..log_lines import TransportLine
from ..memory import map_read_only
from .driver import CudaError, Driver
from .export import FABRIC, FD, HOST, IPC, CudaDetails, SharedMemory
from .vmm import fetch_descriptor, hold_memory

_log = logger(__name__)


class _Key(NamedTuple):
    export_id: int
    kind: str
    handle: bytes
    number: int


@dataclass
class PeerMapping:
    address: int
    unmap: Callable[[], None] = field(repr=False)
    key: _Key
    users: int = 1


class PeerMappings:
    """The mappings of one transport.  Any thread; a wait for a peer or for the GPU delays only
    threads that want the same memory."""

    def __init__(self, driver: Driver, own_socket: str) -> None:
        self._driver = driver
        self._own_socket = own_socket
        self._open: dict[_Key, PeerMapping] = {}
        self._changing: set[_Key] = set()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._open) + len(self._changing)

    def open(self, details: CudaDetails, memory: SharedMemory, under: str) -> PeerMapping:
        """Map the allocation that holds ``memory``, unless it is mapped already.  Blocks.
        ``under``: the GPU in whose context it is opened.  Raises TransportError."""
        key = _Key(details.export_id, memory.kind, memory.handle, memory.number)
        with self._changed:
            self._changed.wait_for(lambda: key not in self._changing)
            if (found := self._open.get(key)) is not None:
                found.users += 1
                return found
            if key.kind == IPC and self._mapped_for_another_export(key):
                # The driver would return the old mapping, whose memory is gone.
                raise TransportError("an earlier export of this memory is still mapped here")
            self._changing.add(key)
        opened = None
        try:
            opened = PeerMapping(*self._map(details, memory, under), key)
        finally:
            self._end_change(key, opened)
        return opened

    def _end_change(self, key: _Key, opened: PeerMapping | None) -> None:
        with self._changed:
            if opened is not None:
                self._open[key] = opened
            self._changing.remove(key)
            self._changed.notify_all()

    def _mapped_for_another_export(self, key: _Key) -> bool:
        known = (*self._open, *self._changing)
        return any(k.handle == key.handle and k.export_id != key.export_id for k in known)

    def _map(
        self, details: CudaDetails, memory: SharedMemory, under: str
    ) -> tuple[int, Callable[[], None]]:
        if memory.kind == IPC:
            return self._map_allocation(memory, under)
        if memory.kind not in (FABRIC, FD, HOST):
            raise TransportError(f"memory of unknown kind {memory.kind!r}")
        path = sibling_socket(self._own_socket, details.socket)
        about = path, details.export_id, memory.number
        if memory.kind == HOST:
            return self._map_host(memory, *fetch_descriptor(*about))
        fd, connection = -1, None
        with ExitStack() as undone:
            if memory.kind == FD:
                fd, connection = fetch_descriptor(*about)
            else:
                connection = hold_memory(*about)
            if connection is not None:
                undone.callback(connection.close)
            try:
                exported = fd if memory.kind == FD else memory.handle
                address = self._driver.vmm_map(exported, memory.allocation)
            finally:
                close_all([fd] if fd >= 0 else [])
            undone.pop_all()
        return address, partial(self._unmap, address, memory.allocation, connection)

    def _unmap(self, address: int, nbytes: int, connection: socket.socket | None) -> None:
        """Unmap VMM memory, and then tell its owner, by the connection's end."""
        try:
            self._driver.vmm_unmap(address, nbytes)
        finally:
            if connection is not None:
                connection.close()

    def _map_host(
        self, memory: SharedMemory, fd: int, connection: socket.socket
    ) -> tuple[int, Callable[[], None]]:
        with ExitStack() as undone:
            undone.callback(connection.close)
            try:
                pages = map_read_only(fd)
            finally:
                os.close(fd)
            if len(pages) < memory.allocation:
                raise TransportError(f"the peer's memory has {len(pages)} bytes: {memory}")
            own = _native.address(pages)
            address = self._driver.host_register(own, len(pages), read_only=True)
            undone.pop_all()
        return address, partial(self._unmap_host, own, pages, connection)

    def _unmap_host(self, address: int, pages: mmap.mmap, connection: socket.socket) -> None:
        try:
            self._driver.host_unregister(address)
            pages.close()
        finally:
            connection.close()

    def _map_allocation(self, memory: SharedMemory, under: str) -> tuple[int, Callable[[], None]]:
        address = self._driver.ipc_open(memory.handle, under)
        unmap = partial(self._driver.ipc_close, address, under)
        try:
            self._check_length(address, memory)
        except BaseException:
            with suppress(CudaError):  # the first error is the one to report
                unmap()
            raise
        return address, unmap

    def _check_length(self, address: int, memory: SharedMemory) -> None:
        """Raise TransportError if what was mapped ends before the peer's cache.  If the driver does
        not tell how long it is, what the peer says of its allocation must do."""
        try:
            _, nbytes = self._driver.address_range(address)
        except CudaError as exc:
            _log.line(TransportLine.LENGTH_UNKNOWN, exc)
            return
        if nbytes < memory.offset + memory.nbytes:
            raise TransportError(
                f"the peer's allocation has {nbytes} bytes here, its cache ends at "
                f"{memory.offset + memory.nbytes}"
            )

    def release(self, mapping: PeerMapping) -> None:
        """One user less; after the last one, unmap the memory.  May wait for the GPU."""
        with self._changed:
            mapping.users -= 1
            if mapping.users:
                return
            del self._open[mapping.key]
            self._changing.add(mapping.key)
        try:
            mapping.unmap()
        except CudaError as exc:
            _log.line(TransportLine.NOT_UNMAPPED, exc)
        finally:
            self._end_change(mapping.key, None)

    def close(self) -> None:
        """Unmap the rest.  Nothing may read it any more."""
        for mapping in list(self._open.values()):
            mapping.users = 1
            self.release(mapping)
