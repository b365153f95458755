"""Threads and descriptors, which may run out: asks for them, with errors that name the remedy."""

from __future__ import annotations

import os
import threading

from kvshm.errors import KvshmError, TransportError


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``.  Raises TransportError if the user, the container or the service has as
    many threads as it may have."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise TransportError(
            f"{thread.name}: {exc}; raise the limit of processes (ulimit -u, TasksMax, pids.max)"
        ) from exc


def require_descriptors(count: int) -> None:
    """Raise KvshmError unless this process may open ``count`` more descriptors.  libzmq, for
    example, aborts a process that runs out of them (src/epoll.cpp)."""
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
        for descriptor in opened:
            os.close(descriptor)
