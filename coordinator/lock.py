"""One coordinator per run directory and namespace.

A second bind on a live ``ipc://`` path succeeds and steals it, so the lock is taken before
any socket is touched.  The kernel lets go of it when its holder ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvshm.errors import AlreadyRunning, RunDirectoryError


def take_lock(path: Path) -> int:
    """Take the lock for the life of this process; return its descriptor.

    Raises AlreadyRunning, naming the holder, or RunDirectoryError.  The file stays behind
    on purpose: removing it could let two coordinators hold two locks of one name.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise RunDirectoryError(f"lock file {path} cannot be opened: {exc.strerror}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise AlreadyRunning(f"another coordinator (pid {holder}) holds {path}") from exc
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
