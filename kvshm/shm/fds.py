"""Hands file descriptors to peers of the same user: one request, one reply, over AF_UNIX.

A rank that owns memory nobody can open by name (a memfd, CUDA VMM memory) runs an
``FdServer`` (kvshm/shm/fd_server.py); peers call ``fetch``.  Connections are SOCK_SEQPACKET, so
that a message is one packet and a cut one is noticed::

    peer                                owner
      | -- request, <= 4096 bytes ------> |   uid from SO_PEERCRED, else closed unanswered
      | <- reply, <= 65536 bytes -------- |   fds ride on it (SCM_RIGHTS), at most 253
      | <- end of connection ------------ |   only when the owner ends, unless the peer does before

The owner leaves the connection open: its end tells the peer that the export, or the process
itself, is over.  What the bytes mean is the transport's business; by custom they are msgpack.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvshm.errors import TransportError
from kvshm.rundir import path_too_long

MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 65536
MAX_FDS = 253
"""The kernel's SCM_MAX_FD: how many descriptors one message can carry."""
_PEER_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred


class Credentials(NamedTuple):
    """Of the process at the other end, as the kernel recorded them."""

    pid: int
    """0: in a pid namespace that cannot be seen from here."""
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Return who made the other end of the connection."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return Credentials(*_PEER_CREDENTIALS.unpack(packed))


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end."""
    return peer_credentials(connection).uid


def check_path(path: str) -> None:
    """Raise TransportError for a path that is too long for a socket."""
    if error := path_too_long(path):
        raise TransportError(error)


class FileId(NamedTuple):
    """Which file lies under a name.  While a socket is bound to it, no other one has the same."""

    device: int
    inode: int


def file_at(path: str | Path) -> FileId | None:
    """What lies there, links not followed; None if nothing does.  Raises OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return FileId(found.st_dev, found.st_ino)


def remove_own(path: str | Path, own: FileId | None) -> None:
    """Remove the name unless something else has taken it.  Raises OSError."""
    if own is not None and file_at(path) == own:
        os.unlink(path)


# -- asking


def socket_name(path: str | Path) -> str:
    """What a peer is told of the socket at ``path``: its name.  The directory is shared, but
    another container may see it at another place."""
    return os.path.basename(path)


def sibling_socket(own_path: str | Path, name: str) -> str:
    """Where the socket lies that a peer calls ``name``: beside the own one.  TransportError if
    that is no name."""
    if not name or os.path.basename(name) != name:
        raise TransportError(f"{name!r} is no name of a socket in the run directory")
    return os.path.join(os.path.dirname(own_path), name)


def _received_fds(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def new_socket(path: str) -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as exc:
        raise TransportError(
            f"{path}: no socket can be opened: {exc.strerror}; raise the limit of open files "
            "(ulimit -n)"
        ) from exc


def close_all(fds: Iterable[int]) -> None:
    """Close every descriptor of ``fds``."""
    for fd in fds:
        os.close(fd)


def _exchange(connection: socket.socket, path: str, request: bytes) -> tuple[bytes, list[int]]:
    connection.connect(path)
    if peer_uid(connection) != os.geteuid():
        raise TransportError(f"{path}: served by uid {peer_uid(connection)}, not by this user")
    connection.send(request)
    return receive(connection, path)


def receive(connection: socket.socket, path: str) -> tuple[bytes, list[int]]:
    """Take the reply to a request that was sent, and its descriptors.  Raises TransportError or
    OSError; no descriptor survives an error."""
    reply, ancillary, flags, _ = connection.recvmsg(
        MAX_REPLY_BYTES, socket.CMSG_SPACE(MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = _received_fds(ancillary)
    if reply and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        return reply, fds
    close_all(fds)
    if flags & socket.MSG_CTRUNC:
        raise TransportError(f"{path}: descriptors were lost on arrival (open file limit?)")
    if flags & socket.MSG_TRUNC:
        raise TransportError(f"{path}: reply is longer than {MAX_REPLY_BYTES} bytes")
    raise TransportError(f"{path}: the owner ended the connection without an answer")


def fetch(path: str | Path, request: bytes, timeout: float) -> tuple[bytes, list[int]]:
    """Send ``request`` to the FdServer at ``path``; return its reply and descriptors.

    Blocks, each step for at most ``timeout`` seconds.  The descriptors are close-on-exec and
    the caller's to close.  Raises TransportError: no such socket, nobody listens, another
    user's, no answer in time, cut answer.  No descriptor survives an error.
    """
    reply, fds, connection = fetch_keep_open(path, request, timeout)
    connection.close()
    return reply, fds


def peer_has_closed(connection: socket.socket) -> bool:
    """Whether the owner has ended a connection of ``fetch_keep_open``.  Does not block."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def fetch_keep_open(
    path: str | Path, request: bytes, timeout: float
) -> tuple[bytes, list[int], socket.socket]:
    """The same, and the connection, the caller's to close: ``peer_has_closed`` tells when the owner
    ends it.  An owner of an older version ends it at once."""
    name = os.fspath(path)
    check_path(name)
    if not 0 < len(request) <= MAX_REQUEST_BYTES:
        raise TransportError(f"request has {len(request)} bytes, 1 to {MAX_REQUEST_BYTES} fit")
    connection = new_socket(name)
    try:
        connection.settimeout(timeout)
        reply, fds = _exchange(connection, name, request)
        connection.setblocking(False)
    except BaseException as exc:
        connection.close()
        if isinstance(exc, OSError):
            raise TransportError(f"{name}: {_what_failed(exc, timeout)}") from exc
        raise
    return reply, fds, connection


def _what_failed(exc: OSError, timeout: float) -> str:
    if isinstance(exc, FileNotFoundError):
        return "no such socket, its owner has gone"
    if isinstance(exc, ConnectionRefusedError):
        return "nobody listens, its owner has died"
    return f"no answer within {timeout} s" if isinstance(exc, TimeoutError) else str(exc)
