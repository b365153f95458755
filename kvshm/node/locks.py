"""One coordinator per run directory and namespace.

A second bind on a live ``ipc://`` path succeeds and steals it, so the lock is taken before any
socket is touched.  The kernel lets go of it when its holder ends, however it ends.

Whoever clears up after the dead while there is no coordinator (kvshm/node/leftovers.py) holds it
meanwhile, and a second one, of the run directory, which a starting coordinator waits for.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvshm.errors import AlreadyRunning, RunDirectoryError

CLEARING_SECONDS = 5.0
"""How long a starting coordinator waits for somebody who clears up; that takes milliseconds."""
_PAUSE_SECONDS = 0.01
"""Between two tries for a lock: flock tells nobody that another process has let go in time."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HOLDER_BYTES = 32


def take_lock(path: Path) -> int:
    """Take the lock for the life of this process, creating its file; return its descriptor.

    Raises AlreadyRunning, naming the holder, or RunDirectoryError.  Who holds it may remove
    the file: nobody takes the lock of a file that has lost its name.
    """
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
        os.close(fd)  # removed between the two, by its last holder


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


def _lock(fd: int, path: Path) -> bool:
    """Lock the file; whether it still has its name.  Raises AlreadyRunning, RunDirectoryError."""
    try:
        if not _try_lock(fd):
            holder = os.pread(fd, _HOLDER_BYTES, 0).decode("ascii", "replace").strip()
            raise AlreadyRunning(f"another coordinator (pid {holder or 'unknown'}) holds {path}")
        return has_name(fd, path)
    except OSError as exc:
        raise RunDirectoryError(f"lock file {path} cannot be locked: {exc.strerror}") from exc


def has_name(fd: int, path: Path) -> bool:
    """Whether a lock that is held still keeps others out: its file may have been removed, and
    another one be there.  Raises OSError."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _name_holder(fd: int) -> None:
    with suppress(OSError):  # for people only; the file system may be full
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _check_file(fd: int, path: Path) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        reason = f"lock file {path} cannot be opened: it is no regular file; remove it"
        raise RunDirectoryError(reason)
    if found.st_uid != os.geteuid():
        raise RunDirectoryError(f"lock file {path} belongs to uid {found.st_uid}: remove it")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
