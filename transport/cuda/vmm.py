"""VMM and host memory: the rank's socket hands out a descriptor, and hears when a peer unmaps it.

The messages are those of kvshm/_shm/descriptors.py.  An importer asks for one memory of one export
and leaves the connection open while it is mapped; the exporter counts its connections before it
sleeps.  For memory with a fabric handle no descriptor comes.

The descriptor is made for each request: a kept one would hold memory that vLLM's sleep mode wants
to give back.  A peer's mapping holds it, too.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from kvshm._base.log import logger
from kvshm._shm.descriptors import (
    MEMORY_KIND,
    MEMORY_SECONDS,
    DescriptorServer,
    Request,
    ask,
    only_one,
)
from kvshm._shm.fds import close_all
from kvshm.errors import SegmentNotFound, TransportError

from ..log_lines import TransportLine

_log = logger(__name__)


class MemoryServer(DescriptorServer):
    def __init__(self, path: str, descriptors: Sequence[Callable[[], int] | None]) -> None:
        """``descriptors``: what makes one of each memory, by number; None for memory whose handle
        peers have already.  Raises TransportError."""
        self._descriptors = descriptors
        self.export_id = 0
        """The id that requests must contain; the owner changes it when the memory changes.  0: no
        memory is handed out."""
        super().__init__(path, self._descriptor)

    def _descriptor(self, wanted: Request) -> list[int]:
        if wanted.epoch != self.export_id or not 0 <= wanted.number < len(self._descriptors):
            raise SegmentNotFound("that memory is not served any more")
        make = self._descriptors[wanted.number]
        return [] if make is None else [make()]


def fetch_descriptor(path: str, export_id: int, memory: int) -> tuple[int, socket.socket]:
    """Return a descriptor of a peer's memory, and the connection to leave open until the memory is
    unmapped; the caller closes both.  Blocks.  Raises TransportError or StaleAttachment."""
    fds, connection = ask(path, _request(export_id, memory), MEMORY_SECONDS)
    try:
        return only_one(fds, path), connection
    except BaseException:
        connection.close()
        raise


def hold_memory(path: str, export_id: int, memory: int) -> socket.socket | None:
    """Tell a peer that its memory, whose handle is known, is about to be mapped; returns the
    connection to leave open until it is unmapped.  None if the peer cannot be reached, since the
    handle is enough.  Blocks.  Raises StaleAttachment."""
    try:
        fds, connection = ask(path, _request(export_id, memory), MEMORY_SECONDS)
    except TransportError as exc:
        _log.line(TransportLine.OWNER_NOT_NOTIFIED, exc)
        return None
    close_all(fds)
    return connection


def _request(export_id: int, memory: int) -> Request:
    return Request(MEMORY_KIND, export_id, number=memory)
