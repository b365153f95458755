"""The coordinator's sockets, and bounds on what clients can use up.

A process that may enter the run directory may connect, send messages and subscribe without end.
libzmq stores the parts of a message until the last part is there, and aborts the process when no
descriptor is left for a connection (src/ipc_listener.cpp).  Therefore

- with MAX_DESCRIPTORS open, or three quarters of the limit, the sockets lose their names in the
  run directory: connected engines stay, and no process can connect until some have left;
- with MAX_MEMORY in use both sockets are closed and made again: libzmq frees all that it kept,
  and engines reconnect by themselves.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.constants import Event

from kvshm._base.resources import require_descriptors
from kvshm._base.rundir import closed_socket
from kvshm._node.protocol import MAX_RECEIVED_BYTES, QUEUE_FRAMES
from kvshm._shm.fds import FileId, file_at, remove_own
from kvshm.errors import KvshmError, RunDirectoryError

from . import logfmt

BACKLOG = 2
"""Connections that may wait to be accepted when a socket loses its name."""
MAX_DESCRIPTORS = 2048
MAX_MEMORY = 512 << 20
"""Bytes of the process's private memory, without memory that it shares with engines."""
MAX_SUBSCRIPTION_BYTES = 1024
FEW_DESCRIPTORS = 512
"""With a lower limit, hundreds of connections within a millisecond are accepted before the names
are taken away."""
_OWN_DESCRIPTORS = 16
"""Descriptors of the sockets without any connection."""
_LOG_AGAIN_SECONDS = 60.0
_UNIX_SOCKETS = Path("/proc/net/unix")


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as permitted; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MAX_DESCRIPTORS * 2 if soft == resource.RLIM_INFINITY else soft


def num_open_descriptors() -> int | None:
    """How many descriptors this process has open; None if no descriptor is left to find out."""
    try:
        # From Linux 6.2 on the folder's size is the number, and needs no descriptor.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return None


@functools.cache
def _statm() -> int:
    """Opened once: the bound on memory must hold when no descriptor is left."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def private_bytes() -> int:
    """Resident memory of this process alone, in bytes; 0 if unknown."""
    try:
        resident, shared = os.pread(_statm(), 200, 0).split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class Bounds(NamedTuple):
    """How much of its process the coordinator may use."""

    limit: int
    """The process's limit of descriptors."""
    descriptors: int
    """With so many open in the process, nobody can connect until some have left."""
    memory: int | None
    """With so many private bytes of the process in use, all connections are closed.  None: any."""

    @classmethod
    def of_a_program(cls) -> Bounds:
        """For a process that does nothing else; raises its limit of descriptors."""
        limit = raise_descriptor_limit()
        return cls(limit, min(MAX_DESCRIPTORS, limit * 3 // 4), MAX_MEMORY)

    @classmethod
    def within_a_program(cls) -> Bounds:
        """For a process with other work, which keeps its limits: descriptors are counted with those
        of the process, since libzmq would abort it without; memory is not, since what clients use
        cannot be told from the rest."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        present = num_open_descriptors() or 0
        most = MAX_DESCRIPTORS + present
        limit = most * 2 if soft == resource.RLIM_INFINITY else soft
        return cls(limit, min(most, limit * 3 // 4), None)


class _SocketName:
    """The name of a listening socket in the run directory, which libzmq never touches."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._aside = closed_socket(self._path)
        self._own: FileId | None = None
        self._hidden = False

    def open(self) -> int:
        """Listen under the name; return the descriptor.  Raises RunDirectoryError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            for path in (self._path, self._aside):  # of coordinators that have died
                path.unlink(missing_ok=True)
            listener.bind(os.fspath(self._path))
            listener.listen(BACKLOG)
            self._own = file_at(self._path)
        except OSError as exc:
            listener.close()
            raise RunDirectoryError(
                f"socket {exc.filename or self._path} cannot be made: {exc.strerror}; remove what "
                "lies there, make room in that directory, or set KVSHM_RUN_DIR to another one"
            ) from exc
        self._hidden = False
        return listener.detach()

    def set_hidden(self, hidden: bool) -> None:
        """Take the name away, or give it back.  Raises OSError, or KvshmError like ``check``."""
        if hidden != self._hidden:
            self.check()
            old, new = (self._path, self._aside) if hidden else (self._aside, self._path)
            old.rename(new)
            self._hidden = hidden

    def check(self) -> None:
        """Raise KvshmError if the name is not this socket's any more: engines could not connect."""
        path = self._aside if self._hidden else self._path
        try:
            found = file_at(path)
        except OSError:
            return  # the next check may succeed
        if found != self._own:
            raise KvshmError(
                f"socket {path} was removed or replaced while the coordinator served, so that no "
                "engine finds it any more; start the coordinator again, and keep others from "
                "cleaning up there"
            )

    def remove(self) -> None:
        """Remove the name unless another coordinator has taken it."""
        for path in (self._path, self._aside):
            with suppress(OSError):
                remove_own(path, self._own)


class Sockets:
    """ROUTER for commands, PUB for events.  Used by one thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, bounds: Bounds | None = None
    ) -> None:
        self._clock = clock
        self.poller = zmq.Poller()
        self._names: list[_SocketName] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        bounds = Bounds.of_a_program() if bounds is None else bounds
        self._limit, self._max_descriptors, self._max_memory = bounds
        if self._max_memory is not None:
            _statm()
        self._is_hidden = False
        self._last_logged: dict[str, float] = {}
        self._make()

    def _make(self) -> None:
        require_descriptors(_OWN_DESCRIPTORS)  # libzmq aborts without
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
        self._listen()
        if self._limit < FEW_DESCRIPTORS:
            remedy = f"permit at least {FEW_DESCRIPTORS} open files (ulimit -Hn)"
            self._warn("few-descriptors", limit=self._limit, remedy=remedy)

    def _listen(self) -> None:
        for made, name in zip((self.router, self.publisher), self._names, strict=True):
            monitor = made.get_monitor_socket(Event.ACCEPTED)
            self._monitors.append(monitor)
            self.poller.register(monitor, zmq.POLLIN)
            made.setsockopt(zmq.USE_FD, name.open())
            made.bind(name.endpoint)
        self.poller.register(self.router, zmq.POLLIN)
        self._is_hidden = False

    def close(self) -> None:
        """Close all connections and remove the names.  Blocks until libzmq has freed everything."""
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

    def forget_in_child(self) -> None:
        """In a forked child: close the sockets that libzmq has made in the parent.  Else the names
        would seem to be served after the parent's end, and engines would not notice that end."""
        names = {name.endpoint.removeprefix("ipc://") for name in self._names}
        with suppress(OSError):
            rows = [row.split(maxsplit=7) for row in _UNIX_SOCKETS.read_text().splitlines()]
            # Connections have their listener's name, also when the file has gone.
            ours = {f"socket:[{row[6]}]" for row in rows if len(row) == 8 and row[7] in names}
            for fd in os.listdir("/proc/self/fd"):
                with suppress(OSError):  # the descriptor of that folder
                    if os.readlink(f"/proc/self/fd/{fd}") in ours:
                        os.close(int(fd))

    def _empty_monitors(self) -> None:
        for monitor in self._monitors:
            with suppress(zmq.Again):
                while True:
                    monitor.recv_multipart(zmq.NOBLOCK)

    # -- bounds

    def accepted(self, ready: dict[object, int]) -> bool:
        """Whether a process has connected: then ``look``."""
        return any(monitor in ready for monitor in self._monitors)

    def look(self) -> None:
        """Enforce the bounds: after each connection, and every ``bounds_check_seconds``."""
        used = num_open_descriptors()
        limit = self._max_descriptors
        # Some have to leave before the names return: else each that leaves would bring them back.
        allowed = limit - limit // 16 if self._is_hidden else limit
        self._set_hidden(used is None or used >= allowed, used)
        self._empty_monitors()
        # libzmq handles connections, subscriptions and departures only within calls.
        self.publisher.getsockopt(zmq.EVENTS)
        if self._max_memory is not None and (memory := private_bytes()) > self._max_memory:
            self._recreate(memory, self._max_memory)

    def check(self) -> None:
        """Raise KvshmError if engines cannot find the sockets any more."""
        for name in self._names:
            name.check()

    def _set_hidden(self, hidden: bool, used: int | None) -> None:
        if hidden and not self._is_hidden:
            remedy = "end the processes that connect so often, or raise the limit (ulimit -n)"
            self._warn("full", descriptors=used, limit=self._max_descriptors, remedy=remedy)
        self._is_hidden = hidden
        for name in self._names:  # a name that cannot be moved is tried again at the next look
            try:
                name.set_hidden(hidden)
            except OSError as exc:
                self._warn("failed", what="shut" if hidden else "open", reason=exc)

    def _recreate(self, memory: int, limit: int) -> None:
        """Free what libzmq keeps for clients: parts of messages, subscriptions, queues."""
        self.check()  # must not take the names of another coordinator
        remedy = "end the process that sends or subscribes without end, or does not read"
        self._warn("hung-up-on-all", bytes=memory, limit=limit, remedy=remedy)
        self.close()
        _trim_heap()
        try:
            self._make()
            self._listen()
        except zmq.ZMQError as exc:  # no descriptors left: a new process has some
            raise KvshmError(f"the sockets cannot be made again: {exc}") from exc
        if (left := private_bytes()) > limit:  # else it would disconnect engines for ever
            raise KvshmError(
                f"{left} bytes of memory are in use without any connection, {limit} are "
                "permitted; start the coordinator again"
            )

    def _warn(self, event: str, **fields: object) -> None:
        now = self._clock()
        if now - self._last_logged.get(event, -_LOG_AGAIN_SECONDS) >= _LOG_AGAIN_SECONDS:
            self._last_logged[event] = now
            logfmt.write(logging.WARNING, event, **fields)


def _trim_heap() -> None:
    """Return freed memory to the kernel, which glibc does only when asked."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
