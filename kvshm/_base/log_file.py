"""A log file that several processes append to, that may be moved away, and that may fill its disk:
what it does not take goes elsewhere."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from logging.handlers import WatchedFileHandler
from typing import Any

from kvshm.errors import ConfigError

from .core_lines import CoreLine
from .log_format import LineFormatter

MODE = 0o600
# With O_NONBLOCK a path that is a pipe without a reader is an error and blocks no caller.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_WRONG_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""What a mistyped path causes; other errors pass by themselves."""


class LogFile(WatchedFileHandler):
    """Appends lines to the file at ``path``, which is opened again when another file, or none, is
    there.  Any thread; never raises, and never waits but for the disk."""

    def __init__(
        self,
        path: str,
        lines: LineFormatter,
        instead: Callable[[logging.LogRecord], object],
        say: Callable[[str], object],
    ) -> None:
        """``instead`` gets the records that the file does not take; ``say`` says so elsewhere, once
        for each failure.  Raises ConfigError if the path is wrong."""
        super().__init__(path, delay=True)
        self.baseFilename = path  # not its absolute form: with a link before ".." that is another
        self.as_json = lines.as_json
        self.setFormatter(lines)
        self._instead, self._say = instead, say
        self.missed = 0
        """Lines that the file has not taken since it last took one."""
        self._line = ""
        try:
            self.stream = self._open()
        except _WRONG_PATH as exc:
            raise ConfigError(
                f"KVSHM_LOG_FILE or --log-file: {path!r} cannot be opened: {exc.strerror}; correct "
                "it, or leave it out to log without a file"
            ) from None
        except (OSError, ValueError):
            pass  # the first line tries again, and says so

    def _open(self) -> Any:
        stream = _WholeTexts(os.open(self.baseFilename, _FLAGS, MODE))
        try:
            found = os.fstat(stream.fileno())
        except OSError:
            stream.close()
            raise
        self.dev, self.ino = found.st_dev, found.st_ino
        return stream

    def format(self, record: logging.LogRecord) -> str:
        return self._line

    def _line_of(self, record: logging.LogRecord) -> str:
        """Return the line, behind one about lines that are missing in the file."""
        line = super().format(record)
        if not self.missed:
            return line
        about = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
        about["msg"] = str(CoreLine.MISSING_IN_FILE.fill(self.missed))
        return f"{super().format(logging.makeLogRecord(about))}\n{line}"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._line = self._line_of(record)
        except Exception:  # of a wrong format: as every handler says it
            super().handleError(record)
            return
        missed = self.missed
        try:
            super().emit(record)
        except (OSError, ValueError):  # the file cannot be opened again
            self.handleError(record)
        if self.missed == missed:
            self.missed = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Have a record that the file did not take written elsewhere."""
        reason = sys.exc_info()[1]
        if not isinstance(reason, OSError | ValueError):
            super().handleError(record)
            return
        self.missed += 1
        if self.missed == 1:
            self._say(str(CoreLine.NOT_IN_FILE.fill(self.baseFilename, reason)))
        self._instead(record)


class _WholeTexts:
    """A text stream each of whose writes is one ``write`` to a descriptor with O_APPEND: on a local
    file system texts of several processes do not mix."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, text: str) -> None:
        """Raises OSError if the file takes only a part, which stays there."""
        data = text.encode(errors="backslashreplace")
        if (written := os.write(self._fd, data)) < len(data):
            reason = f"only {written} of {len(data)} bytes were written"
            raise OSError(errno.ENOSPC, reason)

    def flush(self) -> None:
        """Nothing waits here."""

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
