"""One coordinator per run directory and namespace: a second bind on a live ``ipc://`` path would
take the path over, so the lock is taken before any socket is touched.

A process that cleans up without a coordinator (kvshm/_node/leftovers.py) holds this lock meanwhile,
and a second one, on the run directory, for which a starting coordinator waits.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvshm.errors import AlreadyRunning, RunDirectoryError

CLEANUP_SECONDS = 5.0
"""How long a starting coordinator waits for a process that cleans up, which takes milliseconds."""
PAUSE_SECONDS = 0.01
"""The pause between two tries for a lock: flock has no wait with a time limit."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HOLDER_BYTES = 32


def take_lock(path: Path) -> int:
    """Take the lock, creating its file; return the descriptor that holds it.  Raises
    AlreadyRunning, naming the holder, or RunDirectoryError."""
    while True:
        try:
            fd = os.open(path, _FLAGS, 0o600)
        except OSError as exc:
            raise RunDirectoryError(
                f"lock file {path} cannot be opened: {exc.strerror}; remove it, make room in that "
                "directory, or set KVSHM_RUN_DIR to another one"
            ) from exc
        try:
            _check_file(fd, path)
            if _lock(fd, path):
                _name_holder(fd)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the last holder removed the file after it was opened here


def release_lock(fd: int) -> None:
    """Release the lock and close its descriptor.  Closing alone would leave it to a child that has
    just been forked, until that child has closed its copy.  Never in a forked child: it would
    release the parent's lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


@contextmanager
def cleanup_lock(run_dir: Path, patience: float = CLEANUP_SECONDS) -> Iterator[bool]:
    """Hold the run directory's lock, under which one process cleans up, and no coordinator takes
    its locks.  Yields False after ``patience`` seconds.  Raises RunDirectoryError."""
    try:
        fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise RunDirectoryError(
            f"run directory {run_dir} cannot be opened: {exc.strerror}; create it with mode 0700, "
            "or set KVSHM_RUN_DIR to a directory of your own"
        ) from exc
    try:
        deadline = time.monotonic() + patience
        while not (held := try_lock(fd)) and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
        yield held
    finally:
        release_lock(fd)


def _lock(fd: int, path: Path) -> bool:
    try:
        if not try_lock(fd):
            holder = os.pread(fd, _HOLDER_BYTES, 0).decode("ascii", "replace").strip()
            raise AlreadyRunning(f"another coordinator (pid {holder or 'unknown'}) holds {path}")
        return has_name(fd, path)
    except OSError as exc:
        raise RunDirectoryError(f"lock file {path} cannot be locked: {exc.strerror}") from exc


def has_name(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _name_holder(fd: int) -> None:
    with suppress(OSError):  # the pid is for people only, and the file system may be full
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _check_file(fd: int, path: Path) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        reason = f"lock file {path} cannot be opened: it is not a regular file; remove it"
        raise RunDirectoryError(reason)
    if found.st_uid != os.geteuid():
        raise RunDirectoryError(f"lock file {path} belongs to uid {found.st_uid}: remove it")


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Take the lock of an open file if nobody is in the way; returns whether.  Raises OSError."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
