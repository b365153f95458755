"""Hands file descriptors to peers of the same user: one request, one reply, over AF_UNIX.

A rank that owns memory nobody can open by name (a memfd, CUDA VMM memory) runs an
``FdServer``; peers call ``fetch``.  Connections are SOCK_SEQPACKET, so that a message is one
packet and a cut one is noticed::

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
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .errors import KvshmError, TransportError
from .forks import guard_forks
from .log import Seldom, logger

MAX_PATH_BYTES = 107
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 65536
MAX_FDS = 253
"""The kernel's SCM_MAX_FD: how many descriptors one message can carry."""
MAX_CLIENTS = 64
MAX_KEPT = 1024
"""Connections left open after their answer; beyond that the oldest is ended, whose peer will
ask again."""

_PEER_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred
_log = logger(__name__)

Answer = Callable[[bytes], tuple[bytes, list[int]]]
"""Request -> (reply, descriptors).  Runs on the server's thread, must not block, and keeps
the descriptors: the server only lends them to the kernel.  If it raises, the peer sees the
connection end unanswered."""


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


def _check_path(path: str) -> None:
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise TransportError(
            f"socket path has {length} bytes, at most {MAX_PATH_BYTES} are possible: {path!r}; "
            "set KVSHM_RUN_DIR to a shorter directory"
        )


# -- asking


def socket_name(path: str | Path) -> str:
    """What a peer is told of the socket at ``path``: its name.  The directory is shared, but
    another container may see it at another place."""
    return os.path.basename(path)


def beside(own_path: str | Path, name: str) -> str:
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


def require_descriptors(count: int) -> None:
    """Raise KvshmError unless this process may open so many descriptors more: libzmq, for one,
    aborts the process that runs out of them (src/epoll.cpp)."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as exc:
        raise KvshmError(
            f"only {len(opened)} more files can be opened, {count} are needed ({exc.strerror}); "
            "raise the limit of open files (ulimit -n)"
        ) from exc
    finally:
        close_all(opened)


def _new_socket(path: str) -> socket.socket:
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
    reply, fds, connection = fetch_and_stay(path, request, timeout)
    connection.close()
    return reply, fds


def has_hung_up(connection: socket.socket) -> bool:
    """Whether the owner has ended a connection of ``fetch_and_stay``.  Does not block."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def fetch_and_stay(
    path: str | Path, request: bytes, timeout: float
) -> tuple[bytes, list[int], socket.socket]:
    """The same, and the connection, the caller's to close: ``has_hung_up`` tells when the owner
    ends it.  An owner of an older version ends it at once."""
    name = os.fspath(path)
    _check_path(name)
    if not 0 < len(request) <= MAX_REQUEST_BYTES:
        raise TransportError(f"request has {len(request)} bytes, 1 to {MAX_REQUEST_BYTES} fit")
    connection = _new_socket(name)
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


# -- answering


def _remove_stale(path: str) -> None:
    """Remove the socket a dead process left at ``path``; TransportError if one serves there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        else:
            raise TransportError(f"{path}: another process serves this socket")


def _bind(listener: socket.socket, path: str) -> int:
    """Listen at ``path``, mode 0600 before the first peer can connect; return its inode."""
    try:
        _remove_stale(path)
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(MAX_CLIENTS)
        return os.stat(path).st_ino
    except OSError as exc:
        raise TransportError(f"{path}: cannot serve descriptors here: {exc}") from exc


class FdServer:
    """Answers ``fetch`` at ``path`` from a daemon thread of its own until ``close``.

    Any number of peers may be connected; each has ``client_timeout`` seconds to send its
    request, and beyond 64 the longest waiting one is dropped: a silent, slow or dying peer
    costs the others nothing.  Those that were answered stay connected, up to MAX_KEPT, until
    they leave or say more.  A forked child keeps no part of it.
    """

    def __init__(self, path: str | Path, answer: Answer, client_timeout: float = 2.0) -> None:
        """Listen at ``path``.  Raises TransportError: too long, in use, not writable."""
        self.path = os.fspath(path)
        _check_path(self.path)
        self._answer = answer
        self._client_timeout = client_timeout
        self._deadlines: dict[socket.socket, float] = {}
        self._kept: dict[socket.socket, None] = {}  # in the order of their answers
        self._seldom = Seldom(time.monotonic)
        self._told: set[int | None] = set()  # why nobody could be accepted: each cause once
        self._listener = _new_socket(self.path)
        self._listener.setblocking(False)
        try:
            self._waker, self._woken = socket.socketpair()
        except OSError as exc:
            self._listener.close()
            raise TransportError(f"{self.path}: cannot serve descriptors here: {exc}") from exc
        try:
            self._inode = _bind(self._listener, self.path)
        except TransportError:
            self._close_sockets()
            raise
        # poll, not epoll: an epoll object would be shared with a forked child.
        self._selector = selectors.PollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._closed = False
        guard_forks(self)
        self._thread = threading.Thread(target=self._serve, name="kvshm-fds", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket.  Idempotent; waits for the answer under way."""
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        self._waker.send(b"x")
        self._thread.join()
        self._close_sockets()
        try:
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass  # swept already

    def _close_sockets(self) -> None:
        clients = (*self._deadlines, *self._kept)
        for opened in (self._listener, self._waker, self._woken, *clients):
            opened.close()
        self._deadlines.clear()
        self._kept.clear()

    def forget_in_child(self) -> None:
        """In a forked child, where the thread does not exist: drop the inherited sockets, so
        that the socket dies with the parent, and never touch the path."""
        self._closed = True
        self._close_sockets()

    # -- on the server's thread

    def _serve(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._deadlines:
                    self._reply(key.fileobj)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._kept:
                    self._drop(key.fileobj)  # left, or has no more business here
            now = time.monotonic()
            for client in [c for c, deadline in self._deadlines.items() if deadline <= now]:
                self._drop(client)

    def _patience(self) -> float | None:
        if not self._deadlines:
            return None
        return max(0.0, min(self._deadlines.values()) - time.monotonic())

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return  # gone again before it was accepted
        except OSError as exc:
            if exc.errno not in self._told:
                _log.warning("cannot accept at %s: %s", self.path, exc)
            self._told.add(exc.errno)
            self._closing.wait(0.1)  # out of descriptors: the listener stays readable
            return
        if peer_uid(client) != os.geteuid():
            if self._seldom.passes(f"uid {peer_uid(client)}"):
                _log.warning("uid %d asked at %s: refused", peer_uid(client), self.path)
            client.close()
            return
        if len(self._deadlines) >= MAX_CLIENTS:
            self._drop(next(iter(self._deadlines)))
        client.setblocking(False)
        self._deadlines[client] = time.monotonic() + self._client_timeout
        self._selector.register(client, selectors.EVENT_READ)

    def _reply(self, client: socket.socket) -> None:
        try:
            request = client.recv(MAX_REQUEST_BYTES + 1)
            if 0 < len(request) <= MAX_REQUEST_BYTES:
                reply, fds = self._answer(request)
                # Never blocks: one packet into an empty queue, or it fails.
                socket.send_fds(client, [reply], fds)
                self._keep(client)
                return
        except OSError as exc:
            _log.debug("a peer left %s before its answer: %s", self.path, exc)
        except Exception:
            # The thread outlives any request; the peer sees an end without answer.
            if self._seldom.passes("request"):
                _log.exception("request at %s failed", self.path)
        self._drop(client)

    def _keep(self, client: socket.socket) -> None:
        del self._deadlines[client]
        self._kept[client] = None
        if len(self._kept) > MAX_KEPT:
            self._drop(next(iter(self._kept)))

    def _drop(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        self._deadlines.pop(client, None)
        self._kept.pop(client, None)
        client.close()
