"""The coordinator's sockets, and how much others may take of it by them.

Whoever may enter the run directory may connect as often as it likes, and send messages and
subscriptions without end.  libzmq stores the parts of a message until the last one is there, and
aborts the process when it has no descriptor left for a connection (src/ipc_listener.cpp).  So

- with MAX_DESCRIPTORS open, or three quarters of what is permitted, the sockets lose their names
  in the run directory: who is connected stays, nobody else gets in until others have left;
- with MAX_MEMORY in use both sockets are closed and made anew: what was kept for anybody is
  freed, and engines connect again by themselves.
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

import zmq
from zmq.constants import Event

from kvshm.errors import KvshmError, RunDirectoryError
from kvshm.node.protocol import MAX_RECEIVED_BYTES, QUEUE_FRAMES
from kvshm.resources import require_descriptors
from kvshm.rundir import closed_socket
from kvshm.shm.fds import FileId, file_at, remove_own

from . import logfmt
from .actions import Log

BACKLOG = 2
"""Connections that may wait for being accepted when a socket loses its name."""
MAX_DESCRIPTORS = 2048
MAX_MEMORY = 512 << 20
"""Bytes of the process's own memory, that which it shares with engines not counted."""
MAX_SUBSCRIPTION_BYTES = 1024
FEW_DESCRIPTORS = 512
"""With fewer permitted, hundreds that connect within a millisecond get in before they are shut out.
"""
_OWN_DESCRIPTORS = 16
"""What the sockets take while nobody is connected."""
_SAY_AGAIN_SECONDS = 60.0


def raise_descriptor_limit() -> int:
    """Permit this process as many descriptors as it may permit itself; return the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return MAX_DESCRIPTORS * 2 if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int | None:
    """How many this process has open; None if not even that can be looked up."""
    try:
        # Linux 6.2 tells with the folder's size, which takes no descriptor and no time.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return None


@functools.cache
def _statm() -> int:
    """Opened once: when no descriptor is left the memory is still to be bounded."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def private_bytes() -> int:
    """Memory that is this process's alone, as far as it is resident; 0 if unknown."""
    try:
        resident, shared = os.pread(_statm(), 200, 0).split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class _Door:
    """The name of a listening socket in the run directory, which libzmq never touches."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._aside = closed_socket(self._path)
        self._own: FileId | None = None
        self._shut = False

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
        self._shut = False
        return listener.detach()

    def shut(self, shut: bool) -> None:
        """Take the name away, or give it back.  Raises OSError, or what ``check`` does."""
        if shut != self._shut:
            self.check()
            old, new = (self._path, self._aside) if shut else (self._aside, self._path)
            old.rename(new)
            self._shut = shut

    def check(self) -> None:
        """Raise KvshmError if the name is not this socket's any more: nobody could connect."""
        path = self._aside if self._shut else self._path
        try:
            found = file_at(path)
        except OSError:
            return  # perhaps another time
        if found != self._own:
            raise KvshmError(
                f"socket {path} was removed or replaced while the coordinator served, so that no "
                "engine finds it any more; start the coordinator again, and keep others from "
                "clearing up there"
            )

    def remove(self) -> None:
        """Leave what another coordinator has put there."""
        for path in (self._path, self._aside):
            with suppress(OSError):
                remove_own(path, self._own)


class Sockets:
    """ROUTER for commands, PUB for events.  Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.poller = zmq.Poller()
        self._doors: list[_Door] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._limit = raise_descriptor_limit()
        self._max_descriptors = min(MAX_DESCRIPTORS, self._limit * 3 // 4)
        _statm()
        self._is_shut = False
        self._said: dict[str, float] = {}
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
        self._doors = [_Door(command_endpoint), _Door(event_endpoint)]
        self._listen()
        if self._limit < FEW_DESCRIPTORS:
            remedy = f"permit at least {FEW_DESCRIPTORS} open files (ulimit -Hn)"
            self._say("few", "few-descriptors", {"limit": self._limit, "remedy": remedy})

    def _listen(self) -> None:
        for made, door in zip((self.router, self.publisher), self._doors, strict=True):
            monitor = made.get_monitor_socket(Event.ACCEPTED)
            self._monitors.append(monitor)
            self.poller.register(monitor, zmq.POLLIN)
            made.setsockopt(zmq.USE_FD, door.open())
            made.bind(door.endpoint)
        self.poller.register(self.router, zmq.POLLIN)
        self._is_shut = False

    def close(self) -> None:
        """Hang up on everybody and remove the names."""
        self._hang_up()
        self._context.term()

    def _hang_up(self) -> None:
        for door in self._doors:  # first: else more would come while the monitors are emptied
            door.remove()
        self._empty_monitors()  # a full one would keep libzmq's thread, and this one with it
        for monitor in self._monitors:
            self.poller.unregister(monitor)
        if self._monitors:
            self.router.disable_monitor()
            self.publisher.disable_monitor()
            with suppress(KeyError):  # if its door could not be opened
                self.poller.unregister(self.router)
        for monitor in self._monitors:
            monitor.close()
        self._monitors.clear()
        self.router.close()
        self.publisher.close()

    def _empty_monitors(self) -> None:
        for monitor in self._monitors:
            with suppress(zmq.Again):
                while True:
                    monitor.recv_multipart(zmq.NOBLOCK)

    # -- bounds

    def accepted(self, ready: dict[object, int]) -> bool:
        """Whether somebody has connected, which is a reason to ``look``."""
        return any(monitor in ready for monitor in self._monitors)

    def look(self) -> None:
        """Enforce the bounds: after each new connection and every ``bounds_check_seconds``."""
        used = open_descriptors()
        limit = self._max_descriptors
        # Once shut they stay so until some have left, or each that leaves would open them.
        allowed = limit - limit // 16 if self._is_shut else limit
        self._shut(used is None or used >= allowed, used)
        self._empty_monitors()
        # Who connects, subscribes and leaves is worked off by calls only.
        self.publisher.getsockopt(zmq.EVENTS)
        if (memory := private_bytes()) > MAX_MEMORY:
            self._begin_anew(memory)

    def check(self) -> None:
        """Raise KvshmError if engines cannot find the sockets any more."""
        for door in self._doors:
            door.check()

    def _shut(self, shut: bool, used: int | None) -> None:
        if shut and not self._is_shut:
            remedy = "end who connects so often, or raise the limit of open files (ulimit -n)"
            limit = self._max_descriptors
            self._say("full", "full", {"descriptors": used, "limit": limit, "remedy": remedy})
        self._is_shut = shut
        for door in self._doors:  # one that cannot be moved is tried again with the next look
            try:
                door.shut(shut)
            except OSError as exc:
                what = "shut" if shut else "open"
                self._say("doors", "failed", {"what": what, "reason": exc})

    def _begin_anew(self, memory: int) -> None:
        """Free what libzmq keeps for others: parts of messages, subscriptions, queues."""
        self.check()  # nobody else's names are to be taken
        about: dict[str, object] = {"bytes": memory, "limit": MAX_MEMORY}
        about["remedy"] = "end who sends without end, or subscribes so often, or does not read"
        self._say("memory", "hung-up-on-all", about)
        self.close()  # waits until libzmq's threads have freed everything
        _give_back()
        try:
            self._make()
            self._listen()
        except zmq.ZMQError as exc:  # no descriptors left: whoever starts it again has some
            raise KvshmError(f"the sockets cannot be made anew: {exc}") from exc
        if (left := private_bytes()) > MAX_MEMORY:  # or it would hang up for ever
            raise KvshmError(
                f"{left} bytes of memory are in use, {MAX_MEMORY} are permitted, though nobody is "
                "connected any more; start the coordinator again"
            )

    def _say(self, kind: str, event: str, about: dict[str, object]) -> None:
        now = self._clock()
        if now - self._said.get(kind, -_SAY_AGAIN_SECONDS) >= _SAY_AGAIN_SECONDS:
            self._said[kind] = now
            logfmt.write(Log(logging.WARNING, event, about))


def _give_back() -> None:
    """Return freed memory to the kernel, where the C library has to be told."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
