"""One line per event, key=value, so that both people and grep can read the log.

If the reader of the log stops reading, lines wait here; the coordinator never waits for the reader.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from contextlib import suppress

MAX_VALUE = 1000
"""At most so many characters of a value are written."""

MAX_WAITING_BYTES = 1 << 20
"""Bytes of unread lines that are kept; further lines are counted and lost."""
_AT_ONCE = select.PIPE_BUF
"""Bytes that fit into any descriptor that poll calls writable."""
LAST_SECONDS = 1.0
"""How long ``end`` waits for the reader."""

_LOGGER = logging.getLogger("kvshm.coordinator")


def quote(value: object) -> str:
    """Return a value as a line shows it: in quotes unless it is one word."""
    text = str(value)
    if text and not any(c.isspace() or c in '"=\\' or not c.isprintable() for c in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped)
    return f'"{"".join(shown)}"'


def line(event: str, fields: dict[str, object]) -> str:
    """Return ``event=... key=value ...``."""
    words = ((key, _cut(str(value))) for key, value in {"event": event, **fields}.items())
    return " ".join(f"{key}={quote(value)}" for key, value in words)


def _cut(text: str) -> str:
    """An engine may send values of megabytes."""
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def write(level: int, event: str, **fields: object) -> None:
    """Write a line of the coordinator."""
    _LOGGER.log(level, "%s", line(event, fields))


def write_bug(what: str, exc: Exception) -> None:
    """Write that ``what`` has raised ``exc``, with the traceback."""
    _LOGGER.error("%s", line("bug", {"what": what, "reason": exc}), exc_info=exc)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"time={stamp}.{int(record.msecs):03d}Z level={record.levelname.lower()}"
        text = record.getMessage()
        if record.name != _LOGGER.name:
            text = line("log", {"logger": record.name, "message": text})
        if record.exc_info:
            text += f" traceback={quote(self.formatException(record.exc_info))}"
        return f"{head} {text}"


class _LineWriter(logging.Handler):
    """Writes as much as the descriptor takes without waiting, the rest later.  Any thread."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._waiting = bytearray()
        self._lost = 0
        self._writable = select.poll()
        self._writable.register(fd, select.POLLOUT)
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.add(self.format(record))
        except Exception:  # like every handler of logging: no log line ends the program
            self.handleError(record)
            return
        self.write_waiting()

    def add(self, text: str) -> None:
        encoded = text.encode(errors="backslashreplace") + b"\n"
        if len(self._waiting) + len(encoded) > MAX_WAITING_BYTES:
            self._lost += 1
        else:
            self._waiting += encoded

    def write_waiting(self, patience: float = 0.0) -> None:
        """Write the waiting lines; wait ``patience`` seconds at most for the reader."""
        until = time.monotonic() + patience
        self.acquire()  # reentrant
        try:
            while self._waiting:
                left = max(0.0, until - time.monotonic())
                if not self._writable.poll(left * 1000):
                    return
                try:
                    written = os.write(self._fd, self._waiting[:_AT_ONCE])
                except BlockingIOError:
                    return
                except OSError:
                    written = len(self._waiting)  # the reader is gone for good
                del self._waiting[:written]
                if not self._waiting and self._lost:
                    self._report_lost()
        finally:
            self.release()

    def _report_lost(self) -> None:
        about = {"lines": self._lost, "remedy": "have the log read all the time"}
        self._lost = 0
        text = line("lines-lost", about)
        record = _LOGGER.makeRecord(_LOGGER.name, logging.WARNING, "", 0, text, (), None)
        self.add(self.format(record))


_writers: list[_LineWriter] = []
"""The writer that ``start`` made; empty without stderr."""


def start(level: str) -> None:
    """Send lines of at least ``level`` to stderr."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        _writers[:] = [_LineWriter(sys.stderr.fileno())]
    handlers: list[logging.Handler] = [*_writers] or [logging.NullHandler()]
    logging.basicConfig(level=level.upper(), handlers=handlers)


def write_waiting() -> None:
    """Write waiting lines.  Call it now and then."""
    for writer in _writers:
        writer.write_waiting()


def end(text: str = "") -> None:
    """Write the waiting lines, then ``text``.  Blocks for LAST_SECONDS at most."""
    if text and not _writers:
        print(text, file=sys.stderr)
    for writer in _writers:
        if text:
            writer.add(text)
        writer.write_waiting(LAST_SECONDS)
