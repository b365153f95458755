"""VMM memory: the rank's socket hands out a descriptor of it.

    importer                                  exporter
      | -- {"export_id": ..., "memory": 0} -->  |  exports the allocation's descriptor
      | <-- {"status": "ok"} + fd ------------- |

The descriptor is made for each request: a kept one would hold memory that vLLM's sleep mode wants
to give back.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvshm._shm.fd_server import FdServer
from kvshm._shm.fds import close_all, fetch
from kvshm.errors import StaleAttachment, TransportError

from .driver import Driver

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
        """``addresses``: of the memories, by number.  Raises TransportError."""
        self._driver = driver
        self._addresses = addresses
        self.export_id = 0
        """The id that requests must contain; the owner changes it when the memory changes."""
        self._sent: list[int] = []
        self._server = FdServer(path, self._answer)

    def _answer(self, packed: bytes) -> tuple[bytes, list[int]]:
        # The previous reply was sent: the peer has its own copy of that descriptor.
        self._close_sent()
        request = _request_decoder.decode(packed)
        if request.export_id != self.export_id or not 0 <= request.memory < len(self._addresses):
            return msgspec.msgpack.encode(MemoryReply("stale")), []
        self._sent = [self._driver.vmm_descriptor(self._addresses[request.memory])]
        return msgspec.msgpack.encode(MemoryReply("ok")), self._sent

    def _close_sent(self) -> None:
        close_all(self._sent)
        self._sent = []

    def close(self) -> None:
        self._server.close()
        self._close_sent()


def fetch_descriptor(socket: str, export_id: int, memory: int) -> int:
    """A descriptor of a peer's memory, which the caller closes.  Blocks.  Raises TransportError or
    StaleAttachment."""
    request = msgspec.msgpack.encode(MemoryRequest(export_id, memory))
    reply, fds = fetch(socket, request, FETCH_TIMEOUT)
    try:
        status = _reply_decoder.decode(reply).status
    except msgspec.DecodeError as exc:
        close_all(fds)
        raise TransportError(f"{socket}: undecodable reply: {exc}") from exc
    if status == "ok" and len(fds) == 1:
        return fds[0]
    close_all(fds)
    if status != "ok":
        raise StaleAttachment(f"{socket} does not serve that memory any more")
    raise TransportError(f"{socket}: {len(fds)} descriptors for one memory")
