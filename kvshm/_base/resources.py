"""Threads and descriptors, which may run out: asks for them, with errors that name the remedy."""

from __future__ import annotations

import os
import signal
import threading

from kvshm.errors import KvshmError, TransportError

_FOR_ANY_THREAD = signal.valid_signals() - {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}
"""Signals of a process, not of the thread that caused them."""


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``, which gets none of the process's signals.  Raises TransportError."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_ANY_THREAD)  # threads inherit it
    try:
        thread.start()
    except RuntimeError as exc:
        raise TransportError(
            f"{thread.name}: {exc}; raise the limit of processes (ulimit -u, TasksMax, pids.max)"
        ) from exc
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def require_descriptors(count: int) -> None:
    """Raise KvshmError unless ``count`` more descriptors may be opened: libzmq would abort."""
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
