"""Bounds on what clients can use up of the coordinator's process.

A process that may enter the run directory may connect, send messages and subscribe without end.
libzmq stores the parts of a message until the last part is there, and aborts the process when no
descriptor is left for a connection (src/ipc_listener.cpp).  A coordinator that has reached a bound
stops serving; its successor starts without those connections, and engines join that by themselves
(docs/decisions/0031-an-exhausted-coordinator-is-restarted.md).
"""

from __future__ import annotations

import errno
import functools
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress

from kvshm.errors import KvshmError

MAX_DESCRIPTORS = 2048
MAX_MEMORY = 512 << 20
"""Bytes of the process's private memory, without memory that it shares with engines."""
FEW_DESCRIPTORS = 512
"""With a lower limit, a burst of connections may use up the rest between two checks."""
EXHAUSTED_SECONDS = 1.0
"""How long MAX_DESCRIPTORS may be exceeded: a burst of clients passes."""


class Exhausted(KvshmError):
    """Clients have used up the coordinator's descriptors or memory; names the remedy."""


def raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors as far as permitted."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_open_descriptors() -> int:
    """Return the number of open descriptors; the limit if none is left to count, 0 if unknown."""
    try:
        # From Linux 6.2 on the folder's size is the number, and needs no descriptor.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
    except OSError as exc:
        return _soft_limit() if exc.errno == errno.EMFILE else 0


def _soft_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


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


class Bounds:
    """How much of its process the coordinator may use.  Used by one thread."""

    def __init__(
        self, max_descriptors: int, max_memory: int | None, clock: Callable[[], float]
    ) -> None:
        """``max_descriptors``: of the process, if its limit permits that many.  ``max_memory``:
        private bytes of the process; None: any number."""
        self._max_descriptors = max_descriptors
        self._max_memory = max_memory
        self._clock = clock
        self._exceeded_since: float | None = None
        if max_memory is not None:
            private_bytes()  # opens its file while a descriptor is left

    @classmethod
    def of_a_program(cls, clock: Callable[[], float] = time.monotonic) -> Bounds:
        """For a process that does nothing else; raises its limit of descriptors."""
        raise_descriptor_limit()
        return cls(MAX_DESCRIPTORS, MAX_MEMORY, clock)

    @classmethod
    def within_a_program(cls, clock: Callable[[], float] = time.monotonic) -> Bounds:
        """For a process with other work: its limit stays, its own descriptors count on top of the
        bound, and its memory is not bounded, since the clients' part of it is unknown."""
        return cls(MAX_DESCRIPTORS + num_open_descriptors(), None, clock)

    @property
    def limit(self) -> int:
        return _soft_limit()

    @property
    def has_room(self) -> bool:
        """Whether the descriptors are so far below the bound that serving can start again."""
        bound = self._bound
        return num_open_descriptors() < bound - bound // 16

    def check(self) -> None:
        """Call it after each connection and every ``bounds_check_seconds``.  Raises Exhausted."""
        self._check_descriptors(num_open_descriptors())
        if self._max_memory is not None and (memory := private_bytes()) > self._max_memory:
            raise Exhausted(
                f"{memory >> 20} MiB of memory are in use, {self._max_memory >> 20} MiB are "
                "permitted; end the process that sends or subscribes without end, or does not read"
            )

    def _check_descriptors(self, used: int) -> None:
        bound, now = self._bound, self._clock()
        if used < bound - bound // 16:  # not at the bound itself: the number may go up and down
            self._exceeded_since = None
        elif used >= bound and self._exceeded_since is None:
            self._exceeded_since = now
        since = self._exceeded_since
        lasting = since is not None and now - since >= EXHAUSTED_SECONDS
        if lasting or used >= self._most:  # the rest may be gone before the next check
            raise Exhausted(self._reason(used))

    @property
    def _most(self) -> int:
        return self.limit * 3 // 4

    @property
    def _bound(self) -> int:
        return min(self._max_descriptors, self._most)

    def _reason(self, used: int) -> str:
        bound = self._bound
        remedy = "end the processes that connect so often"
        if bound < self._max_descriptors:
            remedy += ", or raise the limit of open files (ulimit -n)"
        return f"{used} descriptors are open, {bound} are permitted; {remedy}"
