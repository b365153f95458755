"""A board on which ranks of several engines show one digest each, because each computes with what
the others hold, as the ranks of a mixture of experts do.

A file in the run directory, which all of them map::

    entry of rank 0:  times it was cleared (8) | digest (64) | check (8) | 0 (48)
    entry of rank 1:  ...

Nobody waits for anybody: an entry is there or not.  A reader that meets a write half done finds a
check that does not fit, so no entry.  The file has a shared lock for each process that maps it; one
without a lock is left by processes that have ended (kvshm/_node/leftovers.py).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from kvshm._base.forks import close_in_children
from kvshm._base.rundir import board_file
from kvshm._shm.available_memory import reserve
from kvshm.errors import TransportError

from .locks import PAUSE_SECONDS, has_name, try_lock

DIGEST_BYTES = 64
MAKING_SECONDS = 5.0
"""How long a board may take to be locked after it was made."""
CLEANER_SECONDS = 1.0
"""How long a board waits for a process that looks whether it is left, which takes microseconds."""
_ENTRY = struct.Struct("<Q64s8s48x")
_CLEARED = struct.Struct("<Q")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class RankBoard:
    """Any thread; each entry has one process that writes it."""

    def __init__(self, path: Path, ranks: int) -> None:
        """Map the board, making it if it is not there.  ``ranks``: how many show a digest there.
        Raises TransportError."""
        self.path, self.ranks = path, ranks
        self._lock = threading.Lock()
        try:
            self._fd = _open(path)
            try:
                os.ftruncate(self._fd, ranks * _ENTRY.size)  # as everybody does
                reserve(self._fd, ranks * _ENTRY.size)
                self._memory = mmap.mmap(self._fd, ranks * _ENTRY.size)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as exc:
            raise TransportError(f"board {path} cannot be mapped: {exc.strerror}") from exc
        close_in_children(self)

    @classmethod
    def named(cls, run_dir: Path, namespace: str, name: str, ranks: int) -> RankBoard:
        """Map the board ``name`` of one group of ranks.  Raises TransportError."""
        return cls(board_file(run_dir, namespace, name), ranks)

    def show(self, rank: int, digest: bytes) -> None:
        """Show ``digest``, of DIGEST_BYTES, as that of ``rank``."""
        with self._lock:
            times, shown = self._entry(self._memory[:], rank)
            if shown != digest:
                times += shown is not None
                self._write(rank, times, digest, _check(times, digest))

    def clear(self, rank: int) -> None:
        """Show none for ``rank``; whoever looks later finds that one has gone."""
        with self._lock:
            times, shown = self._entry(self._memory[:], rank)
            if shown is not None:
                self._write(rank, times + 1, b"", b"")

    def look(self) -> bytes:
        """Return all entries: equal bytes are the same digests, and none was cleared in between."""
        return self._memory[:]

    def times_cleared(self) -> list[int]:
        """Return how often the entry of each rank was cleared, or changed."""
        found = self._memory[:]
        return [_CLEARED.unpack_from(found, rank * _ENTRY.size)[0] for rank in range(self.ranks)]

    def digests(self, entries: bytes) -> list[bytes | None]:
        """Return the digest of each rank in what ``look`` has returned; None: it shows none."""
        return [self._entry(entries, rank)[1] for rank in range(self.ranks)]

    def close(self) -> None:
        """Idempotent."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self._fd)

    @staticmethod
    def _entry(entries: bytes, rank: int) -> tuple[int, bytes | None]:
        times, digest, check = _ENTRY.unpack_from(entries, rank * _ENTRY.size)
        return times, digest if check == _check(times, digest) else None

    def _write(self, rank: int, times: int, digest: bytes, check: bytes) -> None:
        start = rank * _ENTRY.size
        self._memory[start : start + _ENTRY.size] = _ENTRY.pack(times, digest, check)


def left_boards(boards: Sequence[Path]) -> list[Path]:
    """Return those that no process maps."""
    return [path for path in boards if not _is_held(path)]


def _open(path: Path) -> int:
    """Open the file with a shared lock; not one that is being removed."""
    deadline = time.monotonic() + CLEANER_SECONDS
    while (fd := _try_open(path)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "a process that cleans up holds on to it")
        time.sleep(PAUSE_SECONDS)  # flock has no wait with a time limit
    return fd


def _try_open(path: Path) -> int | None:
    """None while somebody looks whether the board is left, or if it was removed meanwhile."""
    fd = os.open(path, _FLAGS, 0o600)
    try:
        if try_lock(fd, fcntl.LOCK_SH) and has_name(fd, path):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return True  # gone, or nothing that kvshm has made
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(fd).st_mtime < MAKING_SECONDS
    except OSError:
        return True
    finally:
        os.close(fd)


def _check(times: int, digest: bytes) -> bytes:
    return sha256(_CLEARED.pack(times) + digest).digest()[:8]
