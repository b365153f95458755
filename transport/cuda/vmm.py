"""VMM memory: the rank's socket hands out a descriptor of it, and hears when a peer unmaps it.

    importer                                  exporter
      | -- {"export_id": ..., "memory": 0} -->  |  exports the allocation's descriptor
      | <-- {"status": "ok"} + fd ------------- |  (no fd for memory with a fabric handle)
      | === left open while it is mapped ====== |  counts its connections before it sleeps

The descriptor is made for each request: a kept one would hold memory that vLLM's sleep mode wants
to give back.  A peer's mapping holds it, too.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from kvshm._base.log import logger
from kvshm._shm.fd_server import FdServer
from kvshm._shm.fds import close_all, fetch_keep_open
from kvshm.errors import StaleAttachment, TransportError

from ..log_lines import TransportLine
from .driver import Driver

_log = logger(__name__)

FETCH_TIMEOUT = 5.0
"""Seconds that an exporter's socket may take to answer; a separate thread answers."""


class MemoryRequest(msgspec.Struct, frozen=True):
    """Asks for one memory of one export."""

    export_id: int
    memory: int


class MemoryReply(msgspec.Struct, frozen=True):
    """ "ok", with the descriptor, or "stale"."""

    status: str


_request_decoder = msgspec.msgpack.Decoder(MemoryRequest)
_reply_decoder = msgspec.msgpack.Decoder(MemoryReply)


class DescriptorServer:
    """Hands out descriptors of one exporter's memories, on the socket's own thread."""

    def __init__(self, driver: Driver, path: str, addresses: Sequence[int]) -> None:
        """``addresses``: of the memories, by number; 0 for one whose handle peers have already.
        Raises TransportError."""
        self._driver = driver
        self._addresses = addresses
        self.export_id = 0
        """The id that requests must contain; the owner changes it when the memory changes."""
        self._sent: list[int] = []
        self._server = FdServer(path, self._answer, sent=self._close_sent)

    def _answer(self, packed: bytes) -> tuple[bytes, list[int]]:
        request = _request_decoder.decode(packed)
        if request.export_id != self.export_id or not 0 <= request.memory < len(self._addresses):
            return msgspec.msgpack.encode(MemoryReply("stale")), []
        if address := self._addresses[request.memory]:
            self._sent = [self._driver.vmm_descriptor(address)]
        return msgspec.msgpack.encode(MemoryReply("ok")), self._sent

    @property
    def mapped(self) -> int:
        """How many mappings peers have, as far as it is known.  Any thread."""
        return self._server.connections

    def _close_sent(self) -> None:
        """The peer has its own copy of the descriptor."""
        close_all(self._sent)
        self._sent = []

    def close(self) -> None:
        self._server.close()
        self._close_sent()


def fetch_descriptor(path: str, export_id: int, memory: int) -> tuple[int, socket.socket]:
    """Return a descriptor of a peer's memory, and the connection to leave open until the memory is
    unmapped; the caller closes both.  Blocks.  Raises TransportError or StaleAttachment."""
    fds, connection = _fetch(path, export_id, memory)
    if len(fds) == 1:
        return fds[0], connection
    close_all(fds)
    connection.close()
    raise TransportError(f"{path}: {len(fds)} descriptors for one memory")


def hold_memory(path: str, export_id: int, memory: int) -> socket.socket | None:
    """Tell a peer that its memory, whose handle is known, is about to be mapped; returns the
    connection to leave open until it is unmapped.  None if the peer does not listen: kvshm's older
    versions do not.  Blocks.  Raises StaleAttachment."""
    try:
        fds, connection = _fetch(path, export_id, memory)
    except StaleAttachment:
        raise
    except TransportError as exc:
        _log.line(TransportLine.OWNER_NOT_TOLD, exc)
        return None
    close_all(fds)
    return connection


def _fetch(path: str, export_id: int, memory: int) -> tuple[list[int], socket.socket]:
    request = msgspec.msgpack.encode(MemoryRequest(export_id, memory))
    reply, fds, connection = fetch_keep_open(path, request, FETCH_TIMEOUT)
    try:
        if (status := _reply_decoder.decode(reply).status) != "ok":
            raise StaleAttachment(f"{path} does not serve that memory any more: {status}")
    except BaseException as exc:
        close_all(fds)
        connection.close()
        if isinstance(exc, msgspec.DecodeError):
            raise TransportError(f"{path}: undecodable reply: {exc}") from exc
        raise
    return fds, connection
