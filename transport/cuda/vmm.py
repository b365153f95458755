"""VMM memory: handed over chunk by chunk, as descriptors over the rank's socket.

One virtual range may consist of many physical chunks, each with a handle of its own: one for
vLLM's cumem allocator, one per 2 or 20 MiB for expandable segments.  A message carries at most
253 descriptors, so an importer asks page by page::

    importer                                   exporter
      | -- {"life": i, "memory": 0, "first": 0} -> |  exports the next chunks' descriptors
      | <- {"nbytes": [...], "more": true} + fds - |
      | -- {"life": i, "memory": 0, "first": 128}> |  ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvshm.errors import StaleAttachment, TransportError
from kvshm.fd_server import FdServer
from kvshm.fds import close_all, fetch

from .driver import Chunk, Driver

PAGE = 128
MAX_FABRIC_CHUNKS = 256
"""More would make the roster's message long; such memory goes by descriptor or not at all."""
_FETCH_TIMEOUT = 5.0


def chunk_starts(driver: Driver, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Address and bytes of every chunk below [address, address + nbytes)."""
    start, end = address, address + nbytes
    while start < end:
        base, length = driver.address_range(start)
        yield base, length
        start = base + length


def length_of_chunks(driver: Driver, address: int, nbytes: int) -> tuple[int, int]:
    """Begin and length of the chunks below a memory; CudaError unless the first of them can be
    handed over as a descriptor."""
    chunks = list(chunk_starts(driver, address, nbytes))
    close_all([driver.vmm_chunk(chunks[0][0], fabric=False).fd])
    return chunks[0][0], sum(length for _, length in chunks)


def fabric_chunks(driver: Driver, address: int, nbytes: int) -> tuple[int, list[Chunk]]:
    """Begin and fabric handles of the chunks below a memory.  Raises CudaError."""
    chunks = list(chunk_starts(driver, address, nbytes))
    return chunks[0][0], [driver.vmm_chunk(base, fabric=True) for base, _ in chunks]


class Request(msgspec.Struct, frozen=True):
    """Which chunks of which memory."""

    export_id: int = msgspec.field(name="life")
    memory: int
    first: int


class Answer(msgspec.Struct, frozen=True):
    """Bytes of each chunk whose descriptor rides along, and whether there are further ones."""

    status: str
    nbytes: tuple[int, ...] = ()
    more: bool = False


_request_decoder = msgspec.msgpack.Decoder(Request)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


class ChunkServer:
    """Hands out the chunks of one exporter's memories; on the socket's own thread."""

    def __init__(
        self, driver: Driver, path: str, export_id: int, memories: Sequence[tuple[int, int]]
    ) -> None:
        """``memories``: address and bytes by number.  Raises TransportError."""
        self._driver = driver
        self.export_id = export_id
        """What requests must name; the owner changes it when the memory was made anew."""
        self._memories = list(memories)
        self._lent: list[int] = []
        self._server = FdServer(path, self._answer)

    def _answer(self, packed: bytes) -> tuple[bytes, list[int]]:
        # The server has sent the last answer: those descriptors live on at the peer's.
        close_all(self._lent)
        self._lent = []
        request = _request_decoder.decode(packed)
        if request.export_id != self.export_id or not 0 <= request.memory < len(self._memories):
            return msgspec.msgpack.encode(Answer("stale")), []
        starts = list(chunk_starts(self._driver, *self._memories[request.memory]))
        page = starts[request.first : request.first + PAGE]
        chunks = [self._driver.vmm_chunk(base, fabric=False) for base, _ in page]
        self._lent = [chunk.fd for chunk in chunks]
        sizes = tuple(chunk.nbytes for chunk in chunks)
        more = request.first + len(page) < len(starts)
        return msgspec.msgpack.encode(Answer("ok", sizes, more)), self._lent

    def close(self) -> None:
        self._server.close()
        close_all(self._lent)
        self._lent = []


def fetch_chunks(socket: str, export_id: int, memory: int) -> list[Chunk]:
    """All chunks of a peer's memory; their descriptors are the caller's to close.  Blocks.
    Raises TransportError, StaleAttachment."""
    chunks: list[Chunk] = []
    more = True
    try:
        while more:
            page, more = _fetch_page(socket, Request(export_id, memory, len(chunks)))
            chunks += page
    except BaseException:
        close_all([chunk.fd for chunk in chunks])
        raise
    return chunks


def _fetch_page(socket: str, request: Request) -> tuple[list[Chunk], bool]:
    reply, fds = fetch(socket, msgspec.msgpack.encode(request), _FETCH_TIMEOUT)
    try:
        answer = _answer_decoder.decode(reply)
        if answer.status != "ok":
            raise StaleAttachment(f"{socket} does not serve that memory any more")
        if len(answer.nbytes) != len(fds) or not fds:
            raise TransportError(f"{socket}: {len(fds)} descriptors for {answer.nbytes}")
    except msgspec.DecodeError as exc:
        close_all(fds)
        raise TransportError(f"{socket}: undecodable answer: {exc}") from exc
    except BaseException:
        close_all(fds)
        raise
    return [Chunk(n, fd) for n, fd in zip(answer.nbytes, fds, strict=True)], answer.more


def map_chunks(driver: Driver, chunks: list[Chunk], wanted: int) -> tuple[int, Callable[[], None]]:
    """Map a peer's chunks one after the other, ``wanted`` bytes at least; their address, and
    how to unmap them.  The chunks' descriptors are closed here.  Raises TransportError."""
    try:
        if (total := sum(chunk.nbytes for chunk in chunks)) < wanted:
            raise TransportError(f"the peer's memory has {total} bytes, its cache {wanted}")
        address = driver.vmm_map(chunks)
    finally:
        close_all([chunk.fd for chunk in chunks if chunk.fd >= 0])
    return address, lambda: driver.vmm_unmap(address, chunks)
