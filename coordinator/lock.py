"""One coordinator per run directory and namespace, and per /dev/shm and namespace.

A second bind on a live ``ipc://`` path succeeds and steals it, so the first lock is taken
before any socket is touched.  The second one keeps apart coordinators of other run
directories, perhaps in containers that see /dev/shm but not each other's pids: each would
take the other's engines for dead and sweep them.  The kernel lets go of a lock when its
holder ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvshm.errors import AlreadyRunning, RunDirectoryError, SegmentError


def lock_segment(path: Path, namespace: str) -> int | None:
    """Take the lock that goes with the segment at ``path``, for the life of this process;
    return its descriptor, None if there is no such segment (any more).

    Raises AlreadyRunning, or SegmentError if it is another user's.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise SegmentError(f"{path} cannot be opened: {exc.strerror}; set KVSHM_NAMESPACE") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except FileNotFoundError:
        pass  # its last holder ended between the two
    except BlockingIOError as exc:
        os.close(fd)
        raise AlreadyRunning(
            f"another coordinator, with another run directory or in another container, serves "
            f"namespace {namespace!r} in this /dev/shm; give each its own KVSHM_NAMESPACE"
        ) from exc
    os.close(fd)
    return None


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
