"""One line per event, key=value or JSON, so that both people and grep can read the log.

If the reader of the log stops reading, lines wait here; the coordinator never waits for the reader.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from contextlib import suppress

from kvshm._base.log import LineLimit
from kvshm._base.log_file import LogFile
from kvshm._base.log_format import EVENT, FIELDS, LineFormatter, key_values

MAX_WAITING_BYTES = 1 << 20
"""Bytes of unread lines that are kept; further lines are counted and lost."""
_AT_ONCE = select.PIPE_BUF
"""Bytes that fit into any descriptor that poll calls writable."""
LAST_SECONDS = 1.0
"""How long ``end`` waits for the reader."""
MAX_LINES = 1000
"""Lines a minute.  More than a node has engines, and pairs of engines that differ."""

_LOGGER = logging.getLogger("kvshm.coordinator")


def write(level: int, event: str, **fields: object) -> None:
    """Write a line of the coordinator."""
    _write(level, event, fields)


def write_bug(what: str, exc: Exception) -> None:
    """Write that ``what`` has raised ``exc``, with the traceback."""
    _write(logging.ERROR, "bug", {"what": what, "reason": exc}, exc)


def _write(level: int, event: str, fields: dict[str, object], exc: Exception | None = None) -> None:
    about = key_values({"event": event, **fields})
    _LOGGER.log(level, "%s", about, exc_info=exc, extra={EVENT: event, FIELDS: fields})


class _LineWriter(logging.Handler):
    """Writes as much as the descriptor takes without waiting, the rest later.  Any thread."""

    def __init__(self, fd: int, lines: LineFormatter) -> None:
        super().__init__()
        self._fd = fd
        self.as_json = lines.as_json
        self._waiting = bytearray()
        self._lost = 0
        self._writable = select.poll()
        self._writable.register(fd, select.POLLOUT)
        self.setFormatter(lines)

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
        self.add(self.format(_record(logging.WARNING, "lines-lost", about)))


def _record(level: int, event: str, fields: dict[str, object]) -> logging.LogRecord:
    """A record that goes past the limits."""
    args, extra = (key_values({"event": event, **fields}),), {EVENT: event, FIELDS: fields}
    return _LOGGER.makeRecord(_LOGGER.name, level, "", 0, "%s", args, None, extra=extra)


_writers: list[_LineWriter] = []
"""The writer to stderr that ``start`` made; empty without stderr."""
_files: list[LogFile] = []
"""The log file; empty without one."""


def start(level: str, log_format: str = "text", log_file: str = "") -> None:
    """Send lines of at least ``level`` to stderr, or to a file.  Raises ConfigError if there is no
    such folder, or no permission."""
    lines = LineFormatter("coordinator", log_format == "json")
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        _writers[:] = [_LineWriter(sys.stderr.fileno(), lines)]
    stderr: logging.Handler = _writers[0] if _writers else logging.NullHandler()

    def not_written(text: str) -> None:
        stderr.handle(_record(logging.WARNING, "not-in-file", {"reason": text}))

    def left_out(text: str) -> None:
        handler.handle(_record(logging.WARNING, "left-out", {"reason": text}))

    if log_file:
        _files[:] = [LogFile(log_file, lines, stderr.handle, not_written)]
    handler = _files[0] if _files else stderr
    _LOGGER.addFilter(LineLimit(left_out, MAX_LINES))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def write_waiting() -> None:
    """Write waiting lines.  Call it now and then."""
    for writer in _writers:
        writer.write_waiting()


def end(text: str = "") -> None:
    """Write the waiting lines, then ``text``: why the coordinator cannot serve, for a person who
    sees stderr.  Blocks for LAST_SECONDS at most."""
    last = _record(logging.ERROR, "fatal", {"reason": text})
    if text and not _writers:
        print(text, file=sys.stderr)
    for file in _files if text else ():
        file.handle(last)
    for writer in _writers:
        if text:
            writer.add(writer.format(last) if writer.as_json else text)
        writer.write_waiting(LAST_SECONDS)
