"""The owner's side of kvshm/_shm/fds.py: a thread that answers requests for file descriptors."""

from __future__ import annotations

import math
import os
import resource
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from kvshm._base.core_lines import CoreLine
from kvshm._base.forks import guard_forks
from kvshm._base.log import LogLimit, logger
from kvshm._base.resources import start_thread
from kvshm.errors import TransportError

from .fds import (
    MAX_REQUEST_BYTES,
    FileId,
    file_at,
    is_served,
    new_socket,
    peer_credentials,
    remove_own,
)

MAX_CLIENTS = 64
MAX_KEPT = 1024
"""Most connections left open after their reply, if the process may have LIMIT_SHARE times as many
descriptors."""
LIMIT_SHARE = 8
MIN_KEPT = 32
"""Connections left open even with few descriptors: about as many as there are lease bits."""
CHECK_SECONDS = 2.0
"""How often a server checks that its socket is still at its path."""
_log = logger(__name__)

RequestHandler = Callable[[bytes], tuple[bytes, Sequence[int]]]
"""Request -> (reply, descriptors), which stay its own.  Runs on the server's thread and must not
block.  If it raises, the peer gets no reply."""


def _max_kept() -> int:
    """Computed each time, since vLLM raises the limit of descriptors after its start."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = MAX_KEPT if soft == resource.RLIM_INFINITY else soft // LIMIT_SHARE
    return min(MAX_KEPT, max(MIN_KEPT, share))


def _remove_stale(path: str) -> None:
    """Remove what a dead process left at ``path``; TransportError if one serves there."""
    # No socket of kvshm is a link; what the link leads to is not ours.
    if not os.path.islink(path) and is_served(path):
        raise TransportError(f"{path}: another process serves this socket")
    Path(path).unlink(missing_ok=True)


def _listen(path: str) -> tuple[socket.socket, FileId | None]:
    """Listen at ``path``, with mode 0600 before a peer can connect; return the socket and the id of
    its file.  Raises TransportError."""
    with ExitStack() as undo:
        listener = undo.enter_context(new_socket(path))
        try:
            _remove_stale(path)
            listener.bind(path)
            Path(path).chmod(0o600)
            listener.listen(MAX_CLIENTS)
            own = file_at(path)
        except OSError as exc:
            raise TransportError(
                f"{path}: cannot serve descriptors here: {exc.strerror}; remove what lies there, "
                "or make room in that directory"
            ) from exc
        listener.setblocking(False)
        undo.pop_all()
    return listener, own


class _Clients:
    """The connections of a server: those that have yet to ask, and those that stay."""

    def __init__(self, timeout: float, max_kept: int | None) -> None:
        self._timeout = timeout
        self._max_kept = max_kept
        self.deadlines: dict[socket.socket, float] = {}
        """Until when each has to ask."""
        self.kept: dict[socket.socket, int] = {}
        """Their pids, in the order of their answers."""

    def add(self, client: socket.socket) -> socket.socket | None:
        """Wait for the request of a client.  Returns the one that waits longest if there are too
        many: the caller removes it."""
        many = len(self.deadlines) >= MAX_CLIENTS
        longest = next(iter(self.deadlines)) if many else None
        self.deadlines[client] = time.monotonic() + self._timeout
        return longest

    def silent(self, now: float) -> list[socket.socket]:
        """Return those that have not asked in time."""
        return [client for client, deadline in self.deadlines.items() if deadline <= now]

    def answered(self, client: socket.socket) -> Iterator[socket.socket]:
        """Keep a client.  Yields those that are too many: the caller removes each."""
        del self.deadlines[client]
        self.kept[client] = peer_credentials(client).pid  # 0 for all peers of other containers
        most = _max_kept() if self._max_kept is None else self._max_kept
        while len(self.kept) > most:
            [(greediest, _)] = Counter(self.kept.values()).most_common(1)
            yield next(kept for kept, pid in self.kept.items() if pid == greediest)

    def remove(self, client: socket.socket) -> None:
        """The client is about to be closed."""
        self.deadlines.pop(client, None)
        self.kept.pop(client, None)

    def close(self) -> None:
        """Close all."""
        for client in (*self.deadlines, *self.kept):
            client.close()
        self.deadlines.clear()
        self.kept.clear()


class FdServer:
    """Answers ``fetch`` at ``path`` on a daemon thread of its own until ``close``.

    A peer has ``client_timeout`` seconds to send its request, and of more than 64 waiting peers
    the one that waits longest is dropped: a silent, slow or dying peer costs other peers nothing.
    After the reply, a bounded number of peers stay connected until they close or send more.  A
    socket that was removed or replaced is made again within CHECK_SECONDS.  A forked child keeps no
    part of the server.
    """

    def __init__(
        self,
        path: str | Path,
        answer: RequestHandler,
        client_timeout: float = 2.0,
        max_kept: int | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at ``path``.  ``max_kept`` replaces the module's bounds; ``sent`` is called on the
        server's thread when an answer was sent, or could not be.  Raises TransportError: path too
        long, in use or not writable; no descriptors or threads left."""
        self.path = os.fspath(path)
        self._answer = answer
        self._sent = sent
        self._clients = _Clients(client_timeout, max_kept)
        self._log_limit = LogLimit()
        self._listener_limit = LogLimit(math.inf)  # until the socket is made again
        self._closed = False
        self._next_check = time.monotonic() + CHECK_SECONDS
        # poll, not epoll: an epoll object would be shared with a forked child.
        self._selector = selectors.PollSelector()
        self._thread = threading.Thread(target=self._serve, name="kvshm-fds", daemon=True)
        try:
            self._waker, self._woken = socket.socketpair()
        except OSError as exc:
            raise TransportError(f"{self.path}: cannot serve descriptors here: {exc}") from exc
        with ExitStack() as undo:
            undo.callback(self._waker.close)
            undo.callback(self._woken.close)
            self._listener, self._own = _listen(self.path)
            undo.callback(self._close_sockets)
            undo.callback(self._remove_name)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            guard_forks(self)
            start_thread(self._thread)
            undo.pop_all()

    @property
    def connections(self) -> int:
        """How many peers are connected: those that wait for an answer, and those that have one and
        stay.  Any thread."""
        return len(self._clients.deadlines) + len(self._clients.kept)

    def close(self) -> None:
        """Stop answering and remove the socket.  Idempotent; waits for the reply under way."""
        if self._closed:
            return
        self._closed = True
        self._waker.send(b"x")
        self._thread.join()
        self._remove_name()
        self._close_sockets()

    def _remove_name(self) -> None:
        with suppress(OSError):  # removed already
            remove_own(self.path, self._own)

    def _close_sockets(self) -> None:
        for opened in (self._listener, self._waker, self._woken):
            opened.close()
        self._clients.close()

    def forget_in_child(self) -> None:
        """In a forked child, which has no server thread: close the inherited sockets, so that they
        end with the parent, and leave the path alone."""
        self._closed = True
        self._close_sockets()

    # -- on the server's thread

    def _serve(self) -> None:
        clients = self._clients
        while not self._closed:
            for key, _ in self._selector.select(self._select_timeout()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in clients.deadlines:
                    self._reply(key.fileobj)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in clients.kept:
                    self._drop(key.fileobj)  # it closed, or sent more than one request
            now = time.monotonic()
            if now >= self._next_check:
                self._next_check = now + CHECK_SECONDS
                self._restore()
            for client in clients.silent(now):
                self._drop(client)

    def _select_timeout(self) -> float:
        until = min(self._clients.deadlines.values(), default=self._next_check)
        return max(0.0, min(until, self._next_check) - time.monotonic())

    def _restore(self) -> None:
        """Make the socket again if its path was removed or replaced: peers cannot find it then."""
        try:
            if file_at(self.path) == self._own or not os.path.isdir(os.path.dirname(self.path)):
                return
            fresh, self._own = _listen(self.path)
        except (TransportError, OSError) as exc:
            self._warn_once(CoreLine.NOT_SERVED, exc)
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = fresh
        self._selector.register(fresh, selectors.EVENT_READ)
        self._listener_limit.forget(CoreLine.NOT_SERVED, CoreLine.ACCEPT_FAILED)
        _log.line(CoreLine.SOCKET_RESTORED, self.path)

    def _warn_once(self, line: CoreLine, *about: object) -> None:
        """Log a line unless it was logged before, since the socket was made (again)."""
        if self._listener_limit.allows(line, *map(str, about)):
            _log.line(line, *about)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return  # the peer closed before it was accepted
        except OSError as exc:
            self._warn_once(CoreLine.ACCEPT_FAILED, self.path, exc)
            time.sleep(0.1)  # out of descriptors: the listener stays readable
            return
        if (uid := peer_credentials(client).uid) != os.geteuid():
            if self._log_limit.allows(CoreLine.FOREIGN_USER, uid):
                _log.line(CoreLine.FOREIGN_USER, uid, self.path)
            client.close()
            return
        if (longest := self._clients.add(client)) is not None:
            self._drop(longest)
        client.setblocking(False)
        self._selector.register(client, selectors.EVENT_READ)

    def _reply(self, client: socket.socket) -> None:
        try:
            request = client.recv(MAX_REQUEST_BYTES + 1)
            if 0 < len(request) <= MAX_REQUEST_BYTES:
                reply, fds = self._answer(request)
                try:
                    # Never blocks: one packet into an empty queue, or it fails.
                    socket.send_fds(client, [reply], fds)
                finally:
                    self._sent()
                for excess in self._clients.answered(client):
                    self._drop(excess)
                return
        except OSError as exc:
            _log.line(CoreLine.PEER_HUNG_UP, self.path, exc)
        except Exception:
            # No request may end the thread; the peer sees the connection close without a reply.
            if self._log_limit.allows(CoreLine.REQUEST_FAILED):
                _log.line(CoreLine.REQUEST_FAILED, self.path, exc_info=True)
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        self._clients.remove(client)
        client.close()
