"""One coordinator per run directory and namespace, and per /dev/shm and namespace.

A second bind on a live ``ipc://`` path succeeds and steals it, so the first lock is taken
before any socket is touched.  The second one keeps apart coordinators of other run
directories, perhaps in containers that see /dev/shm but not each other's pids: each would
take the other's engines for dead and sweep them.  The kernel lets go of a lock when its
holder ends, however it ends.

Whoever clears up after the dead while there is no coordinator (kvshm/leftovers.py) holds both
meanwhile, and a third one, of the run directory, which a starting coordinator waits for.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import AlreadyRunning, RunDirectoryError, SegmentError

CLEARING_SECONDS = 5.0
"""How long a starting coordinator waits for somebody who clears up; that takes milliseconds."""
_PAUSE_SECONDS = 0.01
"""Between two tries for a lock: flock tells nobody that another process has let go in time."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def lock_segment(path: Path, namespace: str) -> int | None:
    """Take the lock that goes with the segment at ``path``, for the life of this process;
    return its descriptor, None if there is no such segment (any more).

    Raises AlreadyRunning, or SegmentError if it is another user's.
    """
    try:
        return _lock(path, _FLAGS)
    except FileNotFoundError:
        return None
    except BlockingIOError as exc:
        raise AlreadyRunning(
            f"another coordinator, with another run directory or in another container, serves "
            f"namespace {namespace!r} in this /dev/shm; give each its own KVSHM_NAMESPACE"
        ) from exc
    except OSError as exc:
        raise SegmentError(f"{path} cannot be opened: {exc.strerror}; set KVSHM_NAMESPACE") from exc


def take_lock(path: Path) -> int:
    """Take the lock for the life of this process, creating its file; return its descriptor.

    Raises AlreadyRunning, naming the holder, or RunDirectoryError.  Who holds it may remove
    the file: nobody takes the lock of a file that has lost its name.
    """
    try:
        fd = _lock(path, _FLAGS | os.O_CREAT)
    except BlockingIOError as exc:
        raise AlreadyRunning(f"another coordinator (pid {_holder(path)}) holds {path}") from exc
    except OSError as exc:
        raise RunDirectoryError(f"lock file {path} cannot be opened: {exc.strerror}") from exc
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


@contextmanager
def clearing(
    run_dir: Path,
    patience: float = CLEARING_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[bool]:
    """Hold the run directory's own lock: only one process at a time clears up, and none while
    a coordinator takes its locks.  Yields False after ``patience`` seconds without it."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = clock() + patience
        while not (held := _try_lock(fd)) and clock() < deadline:
            time.sleep(_PAUSE_SECONDS)
        yield held
    finally:
        os.close(fd)


def _lock(path: Path, flags: int) -> int:
    """Open and lock the file that has this name.  Raises BlockingIOError if it is locked,
    FileNotFoundError, or another OSError."""
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass  # removed between the two, by its last holder
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip() or "unknown"
    except OSError:
        return "unknown"
