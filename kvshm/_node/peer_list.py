"""The list of an engine's peers, for its own ranks, which attach them ahead of any load.

::

    client's thread                     <run dir>/<namespace>.peers.<own epoch>
       | a peer joined or has gone ------> replaced as a whole
    each rank's load thread, once a second: reads, and attaches new peers

A file, not a message: an idle engine runs no steps that could carry a message, and a rank that
hangs blocks no writer.  The file lies in the run directory, which is closed to other users.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import LogLimit, logger

from .protocol import EngineInfo

log = logger(__name__)

MAX_BYTES = 16 << 20
"""A longer file is refused: the list of a full namespace has some ten thousand bytes."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_decoder = msgspec.msgpack.Decoder(list[EngineInfo])


class PeerList:
    """The writer's half, in the scheduler's process.  One thread writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = b""
        self._written = self._ended = False
        self._log_limit = LogLimit(math.inf)

    def write(self, peers: Iterable[EngineInfo]) -> None:
        """Replace the list.  Never raises: without it ranks attach on first use."""
        # The fingerprint's fields are long, and ranks do not need them.
        slim = [msgspec.structs.replace(info, fields={}) for info in peers]
        self._content = msgspec.msgpack.encode(slim)
        self._written = False
        self.write_again()

    def write_again(self) -> None:
        """Write the list again if that failed or another process has removed the file.  Call it now
        and then.  Never raises."""
        content = self._content
        if not content or (self._written and self._path.exists()):
            return
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            _write_new(fresh, content)
            fresh.replace(self._path)
            self._written = True
            self._log_limit.forget(CoreLine.PEER_LIST_NOT_WRITTEN)
        except OSError as exc:
            if self._log_limit.allows(CoreLine.PEER_LIST_NOT_WRITTEN):
                log.line(CoreLine.PEER_LIST_NOT_WRITTEN, self._path, exc)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
        if self._ended:  # possibly since it was written
            self.end()

    def end(self) -> None:
        """Remove the list for good.  Any thread."""
        self._ended = True
        self._content = b""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _write_new(path: Path, content: bytes) -> None:
    """Never opens an existing file: it may be a FIFO that waits for a reader."""
    path.unlink(missing_ok=True)
    with open(os.open(path, _NEW, 0o600), "wb") as file:
        file.write(content)


class PeerListReader:
    """A rank's half.  Used by one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._log_limit = LogLimit(math.inf)

    def read_new(self) -> list[EngineInfo] | None:
        """The list if it has changed since the last call, else None.  Never raises, never blocks: a
        file that cannot be read or belongs to another user counts as unchanged."""
        try:
            found = os.lstat(self._path)
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if seen == self._seen or found.st_uid != os.geteuid():
                return None
            listed = self._read()
            self._seen = seen  # not before: with more descriptors the next call may succeed
            return _decoder.decode(listed)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, ValueError, RecursionError) as exc:
            self._warn_once(exc)  # ValueError: no UTF-8
            return None

    def _read(self) -> bytes:
        """Raises OSError, also for a file that no PeerList has written."""
        fd = os.open(self._path, _FLAGS)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                raise OSError(errno.EINVAL, f"not a regular file of at most {MAX_BYTES} bytes")
            return os.read(fd, MAX_BYTES)
        finally:
            os.close(fd)

    def _warn_once(self, reason: Exception) -> None:
        if self._log_limit.allows(CoreLine.PEER_LIST_UNREADABLE, text := str(reason)):
            log.line(CoreLine.PEER_LIST_UNREADABLE, self._path, text)
