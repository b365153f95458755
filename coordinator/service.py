"""One namespace, from its lock to the removal of its files: served by the program kvshm-coordinator
(__main__.py), or by a thread of another program (in_process.py)."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from kvshm._base.forks import guard_forks
from kvshm._base.resources import require_descriptors
from kvshm._base.rundir import command_endpoint, event_endpoint, lock_path
from kvshm._node.leftovers import clear, left_by_engines, take_namespace
from kvshm._node.locks import cleanup_lock, has_name, release_lock, take_lock
from kvshm.version import __version__

from . import logfmt
from .bounds import FEW_DESCRIPTORS, Bounds
from .log_lines import Event
from .roster import State
from .server import Server
from .tables import Tables

DESCRIPTORS = 34
"""Descriptors that the coordinator needs to serve one engine."""
MOST_NAMED = 20
"""Removed files of one sweep that the log names; further files are counted."""
_UNIX_SOCKETS = Path("/proc/net/unix")


class _Lock:
    def __init__(self, run_dir: Path, namespace: str) -> None:
        """Raises AlreadyRunning, RunDirectoryError or OSError."""
        self._run_dir = run_dir
        self._path = lock_path(run_dir, namespace)
        with cleanup_lock(run_dir):
            self._fd = take_namespace(run_dir, namespace)

    def keep(self) -> None:
        """Take the lock again if its file was removed.  Raises KvshmError or OSError.  If two
        coordinators start at the same moment, one of them finds that its socket was replaced."""
        if has_name(self._fd, self._path):
            return
        with cleanup_lock(self._run_dir, patience=0.0) as alone:
            if not alone:
                return  # a process that cleans up holds it: try again later
            fd = take_lock(self._path)
        self.close()
        self._fd = fd
        logfmt.write(Event.RESTORED, path=self._path)

    def forget_in_child(self) -> None:
        """Close the descriptor if its number is not another file's by now; the lock is kept."""
        with suppress(OSError):
            if has_name(self._fd, self._path):
                os.close(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            release_lock(fd)


class Service:
    """The only coordinator of a namespace.  One thread makes it, and one thread uses it then."""

    def __init__(self, run_dir: Path, namespace: str, wake_fd: int, bounds: Bounds) -> None:
        """Take the lock and let engines connect; KvshmError or OSError leaves nothing open."""
        require_descriptors(DESCRIPTORS)
        self._run_dir = run_dir
        self._namespace = namespace
        self._state = State(epoch=secrets.randbits(63) + 1, namespace=namespace, uid=os.geteuid())
        self._tables = Tables(run_dir, namespace, time.monotonic)
        self._endpoints = command_endpoint(run_dir, namespace), event_endpoint(run_dir, namespace)
        guard_forks(self)
        with ExitStack() as undo:
            self._lock = _Lock(run_dir, namespace)
            undo.callback(self._lock.close)
            self._server = Server(
                self._state, self._tables, self._sweep_files, self._lock.keep, bounds=bounds
            )
            undo.callback(self._server.close)
            self._tables.serve()
            self._server.open(*self._endpoints, wake_fd)
            undo.pop_all()
        if bounds.limit < FEW_DESCRIPTORS:
            remedy = f"permit at least {FEW_DESCRIPTORS} open files (ulimit -Hn)"
            logfmt.write(Event.FEW_DESCRIPTORS, limit=bounds.limit, remedy=remedy)
        about = {"run_dir": run_dir, "namespace": namespace, "version": __version__}
        logfmt.write(Event.SERVING, pid=os.getpid(), **about)

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until ``stopping`` returns True.  Raises as Server.run does."""
        self._server.run(stopping)

    def close(self) -> None:
        """Let go of the engines, and then of the lock."""
        self._server.close()
        self._lock.close()

    def clean_up(self) -> None:
        """Remove files without an owner, after ``close``.  Raises KvshmError or OSError."""
        cleared = clear(self._run_dir, self._namespace)
        for removed in cleared.removed:
            logfmt.write(Event.REMOVED, name=removed)
        for left in cleared.left:
            logfmt.write(Event.LEFT_ALONE, reason=left)
        logfmt.write(Event.ENDED, pid=os.getpid(), complaints=self._state.num_reports)

    def forget_in_child(self) -> None:
        """Close the inherited descriptors in a forked child."""
        self._tables.forget_in_child()
        lock: _Lock | None = getattr(self, "_lock", None)
        if lock is not None:
            lock.forget_in_child()
        _close_by_name(lock_path(self._run_dir, self._namespace), *self._endpoints)

    def _sweep_files(self) -> None:
        left = left_by_engines(self._run_dir, self._namespace)
        for number, path in enumerate(left):
            with suppress(OSError):
                path.unlink(missing_ok=True)
                if number < MOST_NAMED:
                    logfmt.write(Event.REMOVED, path=path)
        if len(left) > MOST_NAMED:
            logfmt.write(Event.REMOVED, more=len(left) - MOST_NAMED)


def _close_by_name(lock: Path, *endpoints: str) -> None:
    """Close a lock file's descriptors and those of sockets, libzmq's too: else the names would seem
    to be served after the parent's end.  By name, since another thread may have been opening them
    when the process was forked."""
    names = {endpoint.removeprefix("ipc://") for endpoint in endpoints}
    with suppress(OSError):
        rows = [row.split(maxsplit=7) for row in _UNIX_SOCKETS.read_text().splitlines()]
        # Connections have their listener's name, also when the file has gone.
        ours = {f"socket:[{row[6]}]" for row in rows if len(row) == 8 and row[7] in names}
        ours |= {f"{lock.resolve()}", f"{lock.resolve()} (deleted)"}
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of that folder
                if os.readlink(f"/proc/self/fd/{fd}") in ours:
                    os.close(int(fd))
