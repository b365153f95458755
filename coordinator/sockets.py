"""The coordinator's sockets: their names in the run directory, and libzmq's side of them."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.constants import Event

from kvshm._base.resources import require_descriptors
from kvshm._node.protocol import MAX_RECEIVED_BYTES, QUEUE_FRAMES
from kvshm._shm.fds import FileId, file_at, remove_own
from kvshm.errors import KvshmError, RunDirectoryError

BACKLOG = 2
"""Connections that may wait to be accepted between two checks of the bounds."""
MAX_SUBSCRIPTION_BYTES = 1024
_OWN_DESCRIPTORS = 16


class _SocketName:
    """The name of a listening socket in the run directory, which libzmq never touches."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._own: FileId | None = None

    def open(self) -> int:
        """Listen under the name; return the descriptor.  Raises RunDirectoryError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)  # of a coordinator that has died
            listener.bind(os.fspath(self._path))
            listener.listen(BACKLOG)
            self._own = file_at(self._path)
        except OSError as exc:
            listener.close()
            raise RunDirectoryError(
                f"socket {exc.filename or self._path} cannot be made: {exc.strerror}; remove what "
                "lies there, make room in that directory, or set KVSHM_RUN_DIR to another one"
            ) from exc
        return listener.detach()

    def check(self) -> None:
        """Raise KvshmError if the name is not this socket's any more: engines could not connect."""
        try:
            found = file_at(self._path)
        except OSError:
            return  # the next check may succeed
        if found != self._own:
            raise KvshmError(
                f"socket {self._path} was removed or replaced while the coordinator served, so "
                "that no engine finds it any more; start the coordinator again, and keep others "
                "from cleaning up there"
            )

    def remove(self) -> None:
        with suppress(OSError):
            remove_own(self._path, self._own)


class Sockets:
    """ROUTER for commands, PUB for events.  Used by one thread."""

    def __init__(self) -> None:
        require_descriptors(_OWN_DESCRIPTORS)  # libzmq aborts without
        self.poller = zmq.Poller()
        self._names: list[_SocketName] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._context = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.publisher = self._context.socket(zmq.PUB)
        for made in (self.router, self.publisher):
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
            made.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
        self.router.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.publisher.setsockopt(zmq.MAXMSGSIZE, MAX_SUBSCRIPTION_BYTES)

    def open(self, command_endpoint: str, event_endpoint: str) -> None:
        """Let engines connect; the caller holds the lock.  Raises RunDirectoryError."""
        self._names = [_SocketName(command_endpoint), _SocketName(event_endpoint)]
        for made, name in zip((self.router, self.publisher), self._names, strict=True):
            monitor = made.get_monitor_socket(Event.ACCEPTED)
            self._monitors.append(monitor)
            self.poller.register(monitor, zmq.POLLIN)
            made.setsockopt(zmq.USE_FD, name.open())
            made.bind(name.endpoint)
        self.poller.register(self.router, zmq.POLLIN)

    def close(self) -> None:
        """Close the connections, remove the names; blocks until libzmq has freed everything."""
        for name in self._names:  # first: no connection may come while the monitors are emptied
            name.remove()
        self._empty_monitors()  # a full monitor would block libzmq's thread, and then this thread
        for monitor in self._monitors:
            self.poller.unregister(monitor)
        if self._monitors:
            self.router.disable_monitor()
            self.publisher.disable_monitor()
            with suppress(KeyError):  # if its name could not be opened
                self.poller.unregister(self.router)
        for monitor in self._monitors:
            monitor.close()
        self._monitors.clear()
        self.router.close()
        self.publisher.close()
        self._context.term()

    def have_accepted(self) -> bool:
        """Whether a process has connected since the last ``turn``."""
        return any(int(m.getsockopt(zmq.EVENTS)) & zmq.POLLIN for m in self._monitors)

    def turn(self) -> None:
        """Give libzmq a turn: it handles connections, subscriptions and departures only within
        calls.  Call it after each connection and every ``bounds_check_seconds``."""
        self._empty_monitors()
        self.publisher.getsockopt(zmq.EVENTS)

    def check(self) -> None:
        """Raise KvshmError if engines cannot find the sockets any more."""
        for name in self._names:
            name.check()

    def _empty_monitors(self) -> None:
        for monitor in self._monitors:
            with suppress(zmq.Again):
                while True:
                    monitor.recv_multipart(zmq.NOBLOCK)
