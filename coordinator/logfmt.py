"""One line per event, key=value, so that both people and grep can read the log.

Whoever reads it may stand still: lines then wait here, and the coordinator for nobody.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from contextlib import suppress

from .actions import Log

MAX_VALUE = 1000
"""Characters of a value that are written."""

MAX_WAITING_BYTES = 1 << 20
"""Of lines that nobody has read yet; further ones are counted and lost."""
_AT_ONCE = select.PIPE_BUF
"""So much fits into whatever poll calls writable."""
LAST_SECONDS = 1.0
"""How long the end waits for whoever reads."""

_LOGGER = logging.getLogger("kvshm.coordinator")


def quote(value: object) -> str:
    """Return a value as it stands in a line: quoted if it would not be one word."""
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
    """A value is what an engine says, which may be megabytes."""
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def write(log: Log, exc: Exception | None = None) -> None:
    """Write a line of the coordinator, with the traceback of ``exc``."""
    _LOGGER.log(log.level, "%s", line(log.event, log.fields), exc_info=exc)


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


class _Lines(logging.Handler):
    """Writes to a descriptor what it takes without waiting, and the rest later.  Any thread."""

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
        except Exception:  # as each handler of logging does: no log ends the program
            self.handleError(record)
            return
        self.go_on()

    def add(self, text: str) -> None:
        encoded = text.encode(errors="backslashreplace") + b"\n"
        if len(self._waiting) + len(encoded) > MAX_WAITING_BYTES:
            self._lost += 1
        else:
            self._waiting += encoded

    def go_on(self, patience: float = 0.0) -> None:
        """Write what waits, as long as somebody reads, waiting for that so many seconds."""
        until = time.monotonic() + patience
        self.acquire()  # which a thread may do again
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
                    written = len(self._waiting)  # nobody will ever read it
                del self._waiting[:written]
                if not self._waiting and self._lost:
                    self._tell_lost()
        finally:
            self.release()

    def _tell_lost(self) -> None:
        about = {"lines": self._lost, "remedy": "have the log read all the time"}
        self._lost = 0
        text = line("lines-lost", about)
        record = _LOGGER.makeRecord(_LOGGER.name, logging.WARNING, "", 0, text, (), None)
        self.add(self.format(record))


_lines: list[_Lines] = []
"""The one of ``start``; none where there is no stderr."""


def start(level: str) -> None:
    """Send lines of at least ``level`` to stderr."""
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        _lines[:] = [_Lines(sys.stderr.fileno())]
    handlers: list[logging.Handler] = [*_lines] or [logging.NullHandler()]
    logging.basicConfig(level=level.upper(), handlers=handlers)


def go_on() -> None:
    """Write lines that have waited for whoever reads them; now and then."""
    for lines in _lines:
        lines.go_on()


def end(text: str = "") -> None:
    """Write what waits, and ``text`` behind it.  Takes LAST_SECONDS at most if nobody reads."""
    if text and not _lines:
        print(text, file=sys.stderr)
    for lines in _lines:
        if text:
            lines.add(text)
        lines.go_on(LAST_SECONDS)
