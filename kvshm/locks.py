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

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import AlreadyRunning, RunDirectoryError, SegmentError

CLEARING_SECONDS = 5.0
"""How long a starting coordinator waits for somebody who clears up; that takes milliseconds."""
_PAUSE_SECONDS = 0.01
"""Between two tries for a lock: flock tells nobody that another process has let go in time."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


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
        raise RunDirectoryError(
            f"lock file {path} cannot be opened: {exc.strerror}; remove it, make room in that "
            "directory, or set KVSHM_RUN_DIR to another one"
        ) from exc
    with suppress(OSError):  # only for people to read: no room is no reason not to serve
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
    a coordinator takes its locks.  Yields False after ``patience`` seconds without it.

    Raises RunDirectoryError if the directory cannot be opened (any more).
    """
    try:
        fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise RunDirectoryError(
            f"run directory {run_dir} cannot be opened: {exc.strerror}; create it with mode 0700, "
            "or set KVSHM_RUN_DIR to a directory of your own"
        ) from exc
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
        fd = _open(path, flags)
        try:
            _check_file(os.fstat(fd))
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass  # removed between the two, by its last holder
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    """Never waits: neither for the other end of a FIFO nor for who holds a lease on a file."""
    try:
        return os.open(path, flags, 0o600)
    except BlockingIOError as exc:
        raise OSError(errno.EBUSY, "another process holds it open") from exc


def _check_file(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    if found.st_uid != os.geteuid():
        raise OSError(errno.EACCES, f"it belongs to uid {found.st_uid}")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "unknown"
    try:
        text = os.read(fd, 20).decode("ascii", "replace").strip()
    except OSError:
        text = ""
    finally:
        os.close(fd)
    return text if text.isprintable() and text else "unknown"
