"""A log file that several processes append to, that may be moved away, and that may fill its disk.

Each line is one ``write`` to a descriptor with O_APPEND: on a local file system lines of several
processes do not mix.  A line that the file does not take goes elsewhere; the process goes on.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvshm.errors import ConfigError

from .core_lines import CoreLine
from .log_format import LineFormatter

MODE = 0o600
# A FIFO that nobody reads, or a full one, must not hold the process up either.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_WRONG_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""What a mistyped path causes; other errors pass by themselves."""


class _Open(NamedTuple):
    fd: int
    place: tuple[int, int]
    """Device and inode."""


class LogFile(logging.Handler):
    """Appends lines to the file at ``path``, which is opened again when another file, or none, is
    there.  Any thread; never raises, and never waits but for the disk."""

    def __init__(
        self,
        path: str,
        lines: LineFormatter,
        instead: Callable[[logging.LogRecord], object],
        say: Callable[[str], object],
    ) -> None:
        """``instead`` gets the records that the file does not take; ``say`` says elsewhere, once
        for each failure, that the file is not written.  Raises ConfigError if the path is wrong:
        no such folder, no permission."""
        super().__init__()
        self.path, self.as_json = path, lines.as_json
        self.setFormatter(lines)
        self._instead = instead
        self._say = say
        self._file: _Open | None = None
        self.missed = 0
        """Lines that the file has not taken since it last took one."""
        self._torn = False
        """Whether the last line stands there in part, because the disk is full."""
        try:
            self._file = self._opened()
        except _WRONG_PATH as exc:
            raise ConfigError(
                f"KVSHM_LOG_FILE or --log-file: {path!r} cannot be opened: {exc.strerror}; correct "
                "it, or leave it out to log without a file"
            ) from None
        except (OSError, ValueError):
            pass  # the first line tries again, and says so

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # like every handler of logging: no log line ends the program
            self.handleError(record)
            return
        try:
            if self.missed:
                told = self._formatted(str(CoreLine.MISSING_IN_FILE.fill(self.missed)))
                line = f"{told}\n{line}"
            self._append(line)
            self.missed = 0
        except (OSError, ValueError) as exc:
            self.missed += 1
            if self.missed == 1:
                self._say(str(CoreLine.NOT_IN_FILE.fill(self.path, exc)))
            self._instead(record)

    def close(self) -> None:
        self.acquire()
        try:
            file, self._file = self._file, None
            if file is not None:
                os.close(file.fd)
        finally:
            self.release()
        super().close()

    def _formatted(self, text: str) -> str:
        about = {"name": __name__, "msg": text, "levelno": logging.WARNING, "levelname": "WARNING"}
        return self.format(logging.makeLogRecord(about))

    def _append(self, line: str) -> None:
        """Write lines at once.  Raises OSError if they are not all in the file."""
        file = self._current()
        data = line.encode(errors="backslashreplace") + b"\n"
        if self._torn:
            data = b"\n" + data
        with _others_wait(file.fd):
            written = os.write(file.fd, data)
            if written:
                self._torn = written < len(data) and not _take_back(file.fd, written)
        if written < len(data):
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def _current(self) -> _Open:
        """The file at the path, opened anew if it is not the one that is open."""
        try:
            found = os.stat(self.path)
            place = found.st_dev, found.st_ino
        except FileNotFoundError:
            place = None
        if self._file is None or self._file.place != place:
            old, self._file, self._torn = self._file, None, False
            if old is not None:
                os.close(old.fd)
            self._file = self._opened()
        return self._file

    def _opened(self) -> _Open:
        fd = os.open(self.path, _FLAGS, MODE)
        try:
            found = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        return _Open(fd, (found.st_dev, found.st_ino))


@contextmanager
def _others_wait(fd: int) -> Iterator[None]:
    """Hold the file's lock, unless another process has it, which may be stopped."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def _take_back(fd: int, written: int) -> bool:
    """Remove the part of a line that was written last, unless another process has written since:
    its next line would else be joined to that part.  Return whether it is removed."""
    try:
        end = os.lseek(fd, 0, os.SEEK_CUR)  # where the write has ended, also with O_APPEND
        if os.fstat(fd).st_size == end:
            os.ftruncate(fd, end - written)
            return True
    except OSError:
        pass  # not a file of a disk
    return False
