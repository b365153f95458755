"""Sends file descriptors to peers of the same user: one request, one reply, over AF_UNIX.

The owner of memory that has no name runs an ``FdServer`` (kvshm/_shm/fd_server.py); peers call
``fetch``.  Connections are SOCK_SEQPACKET, so that truncation is noticed::

    peer                                owner
      | -- request, <= 4096 bytes ------> |   uid from SO_PEERCRED, else closed unanswered
      | <- reply, <= 65536 bytes -------- |   with descriptors (SCM_RIGHTS), at most 253
      | <- end of connection ------------ |   when the owner ends, unless the peer closes first
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvshm._base.forks import close_in_children
from kvshm._base.rundir import path_too_long
from kvshm.errors import SegmentError, TransportError

MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 65536
MAX_FDS = 253
"""The kernel's SCM_MAX_FD: most descriptors in one message."""
_UNSERVED = (errno.ECONNREFUSED, errno.ENOENT, errno.ELOOP)
_PEER_CREDENTIALS = struct.Struct("iI4x")  # struct ucred: pid, uid, and gid, which is not read


class Credentials(NamedTuple):
    """Credentials of the process at the other end, as recorded by the kernel."""

    pid: int
    """0 if the process is in a pid namespace that is not visible here."""
    uid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Return the credentials of the process that made the other end of the connection."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return Credentials(*_PEER_CREDENTIALS.unpack(packed))


FileId = tuple[int, int]
"""Device and inode of the file at a path.  Unique while a socket is bound to the file."""


def file_at(path: str | Path) -> FileId | None:
    """The id of the file at ``path``, links not followed; None if there is none.  Raises
    OSError."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def remove_own(path: str | Path, own: FileId | None) -> None:
    """Remove ``path`` unless another file is there.  Raises OSError."""
    if own is not None and file_at(path) == own:
        os.unlink(path)


def is_served(path: str | Path) -> bool:
    """Whether a process serves the socket.  Never blocks, and makes no connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        return probe.connect_ex(os.fspath(path)) not in _UNSERVED


# -- asking


def sibling_socket(own_path: str | Path, name: str) -> str:
    """Return the path of a peer's socket ``name``, in the directory of the own one.  Raises
    TransportError if it is no file name."""
    if not name or os.path.basename(name) != name:
        raise TransportError(f"{name!r} is not the name of a socket in the run directory")
    return os.path.join(os.path.dirname(own_path), name)


def _received_fds(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def new_socket(path: str) -> socket.socket:
    """Return a socket that can be bound or connected to ``path``.  Raises TransportError."""
    if error := path_too_long(path):
        raise TransportError(error)
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as exc:
        raise TransportError(
            f"{path}: no socket can be opened: {exc.strerror}; raise the limit of open files "
            "(ulimit -n)"
        ) from exc


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def receive(connection: socket.socket, path: str) -> tuple[bytes, list[int]]:
    """Receive the reply to a sent request, and its descriptors.  Raises TransportError or OSError;
    no descriptor stays open after an error."""
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
    """Send ``request`` to the FdServer at ``path``; return its reply and descriptors, which the
    caller closes.  Blocks, each step for at most ``timeout`` seconds.  Raises TransportError, with
    no descriptor open."""
    reply, fds, connection = fetch_keep_open(path, request, timeout)
    connection.close()
    return reply, fds


def peer_has_closed(connection: socket.socket) -> bool:
    """Whether the owner has closed a connection of ``fetch_keep_open``.  Does not block."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def fetch_keep_open(
    path: str | Path, request: bytes, timeout: float
) -> tuple[bytes, list[int], socket.socket]:
    """``fetch``, and return the connection, too, which the caller, or a fork, closes."""
    name = os.fspath(path)
    if not 0 < len(request) <= MAX_REQUEST_BYTES:
        raise TransportError(f"request has {len(request)} bytes, 1 to {MAX_REQUEST_BYTES} fit")
    connection = new_socket(name)
    try:
        connection.settimeout(timeout)
        connection.connect(name)
        if (uid := peer_credentials(connection).uid) != os.geteuid():
            raise TransportError(f"{name}: served by uid {uid}, not by this user")
        connection.send(request)
        reply, fds = receive(connection, name)
        connection.setblocking(False)
        close_in_children(connection)
    except BaseException as exc:
        connection.close()
        if isinstance(exc, OSError):
            raise TransportError(f"{name}: {_what_failed(exc, timeout)}") from exc
        raise
    return reply, fds, connection


def _what_failed(exc: OSError, timeout: float) -> str:
    if isinstance(exc, FileNotFoundError):
        return "there is no such socket: its owner has gone"
    if isinstance(exc, ConnectionRefusedError):
        return "no process listens: its owner has died"
    return f"no answer within {timeout} s" if isinstance(exc, TimeoutError) else str(exc)


def size_of_sealed(fd: int, what: str, largest: int | None = None) -> int:
    """Return how many bytes of received memory may be mapped.  Raises SegmentError unless it is
    memory of this user, of at most ``largest`` bytes, that cannot shrink and has all its pages, so
    that reads never fault."""
    try:  # before the size, which counts only if it is sealed
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:
        sealed = 0  # no memfd
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise SegmentError(f"{what} is not memory of uid {os.geteuid()}")
    if not sealed:
        raise SegmentError(f"{what} may be cut short by its owner: it is not sealed")
    if largest is not None and found.st_size > largest:
        raise SegmentError(f"{what} has {found.st_size} bytes, at most {largest} were expected")
    if (existing := found.st_blocks * 512) < found.st_size:
        raise SegmentError(f"{what} has {found.st_size} bytes, but only {existing} of them exist")
    return found.st_size
