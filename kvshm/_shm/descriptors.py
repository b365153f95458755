"""Hands out memory that has no name: a client asks for it, and gets descriptors.

::

    client                                       owner
      | -- {"kind": "slots", "epoch": e} ------>  |  finds it, or gives a reason
      | <-- {"found": true} + descriptors ------  |  closes its own copies
      | === left open ==========================  |  its end tells each side that the other has gone

Slot tables and replicas (kvshm/_node/segment_server.py) and the KV memory of ranks (the transports)
are asked for in this way.  kvshm/_shm/fds.py carries the messages.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvshm.errors import SegmentError, SegmentNotFound, StaleAttachment, TransportError

from .fd_server import FdServer
from .fds import close_all, fetch_keep_open

MEMORY_KIND = "memory"
"""The KV memory of a rank.  The kinds of segments are in kvshm/_shm/segment.py."""
MEMORY_SECONDS = 5.0
"""How long the owner of KV memory may take to answer, which it does on a thread of its own."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client asks for."""

    kind: str
    epoch: int
    """In which it is valid, or the id of an export.  Never 0."""
    writable: bool = False
    """Whether the client will write to it."""
    number: int = 0
    """Which one, if there are several."""

    def encode(self) -> bytes:
        """Return the request as sent."""
        return msgspec.msgpack.encode(self)


class Reply(msgspec.Struct, frozen=True):
    """Whether descriptors come with the reply; if not, why."""

    found: bool
    reason: str = ""


Find = Callable[[Request], Sequence[int]]
"""Returns descriptors.  Runs on the server's thread; raises SegmentNotFound if there is nothing to
hand out, and SegmentError if nothing can be handed out now, which is not answered."""

UNDECODABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What decoding a message raises: ValueError for text that is no UTF-8."""

_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


class DescriptorServer:
    """Answers requests at ``path`` until ``close``; raises TransportError if it cannot."""

    def __init__(
        self, path: str | Path, find: Find, max_kept: int | None = None, keep: bool = False
    ) -> None:
        """``keep``: the descriptors stay the owner's, instead of being closed once sent."""
        self._find = find
        self._keep = keep
        self._sent: Sequence[int] = ()
        self._server = FdServer(path, self._answer, max_kept=max_kept, sent=self._close_sent)

    @property
    def connections(self) -> int:
        """How many clients are connected.  Any thread."""
        return self._server.connections

    def _answer(self, packed: bytes) -> tuple[bytes, Sequence[int]]:
        try:
            wanted = _request_decoder.decode(packed)
            if not wanted.epoch:
                raise SegmentNotFound("no epoch is served here")
            found = self._find(wanted)
        except (*UNDECODABLE, SegmentNotFound) as exc:
            return msgspec.msgpack.encode(Reply(False, str(exc))), ()
        except SegmentError as exc:  # it exists, but for example no descriptors are left: no reply
            raise OSError(str(exc)) from exc
        if not self._keep:
            self._sent = found
        return msgspec.msgpack.encode(Reply(True)), found

    def _close_sent(self) -> None:
        """The client has its own copies, or has gone."""
        sent, self._sent = self._sent, ()
        close_all(sent)

    def close(self) -> None:
        """Stop handing out.  Idempotent; waits for the reply under way."""
        self._server.close()
        self._find = _nothing  # the old one may refer to this object, and to whole segments


def _nothing(wanted: Request) -> Sequence[int]:
    raise SegmentNotFound(f"epoch {wanted.epoch:016x} is over")


def ask(path: str | Path, wanted: Request, timeout: float) -> tuple[list[int], socket.socket]:
    """Ask the server at ``path``.  Return the descriptors, and the connection to leave open while
    they are in use; the caller closes all of them.  Blocks, each step for ``timeout`` seconds at
    most.  Raises StaleAttachment if the server has no such thing, and TransportError if there is no
    reply, or none that can be used."""
    packed, fds, connection = fetch_keep_open(path, wanted.encode(), timeout)
    try:
        return read_reply(packed, fds, os.fspath(path)), connection
    except BaseException:
        connection.close()
        raise


def read_reply(packed: bytes, fds: list[int], what: str) -> list[int]:
    """Return the descriptors of a reply.  Raises StaleAttachment and TransportError as ``ask``
    does, after it has closed them."""
    try:
        reply = _reply_decoder.decode(packed)
    except UNDECODABLE as exc:
        close_all(fds)
        raise TransportError(f"{what}: undecodable reply: {exc}") from exc
    if reply.found:
        return fds
    close_all(fds)
    raise StaleAttachment(f"{what}: {reply.reason}")


def only_one(fds: list[int], what: str) -> int:
    """Return the only descriptor.  Raises TransportError, after it has closed them, if there is
    another number of them."""
    if len(fds) == 1:
        return fds[0]
    close_all(fds)
    raise TransportError(f"{what}: the reply came with {len(fds)} descriptors")
