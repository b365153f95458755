"""The log lines, written by a thread that no reader or disk holds up."""

from __future__ import annotations

import atexit
import logging
import logging.handlers
import math
import os
import queue
import select
import sys
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from kvshm._base.log import LineLimit
from kvshm._base.log_file import LogFile
from kvshm._base.log_format import EVENT, FIELDS, LineFormatter, key_values
from kvshm._base.resources import start_thread

from .log_lines import Event

MAX_WAITING = 1000
_AT_ONCE = select.PIPE_BUF
"""Bytes that fit into any descriptor that poll calls writable."""
LAST_SECONDS = 1.0
"""How long ``end`` waits for the reader or the disk."""
INSTEAD_SECONDS = 0.1
"""How long a line that the file does not take waits for the reader of stderr."""
MAX_LINES = 1000
"""Lines a minute."""

_LOGGER = logging.getLogger("kvshm.coordinator")


def write(event: Event, **fields: object) -> None:
    _write(event, fields)


def write_bug(what: str, exc: Exception) -> None:
    """Write that ``what`` has raised ``exc``, with the traceback."""
    _write(Event.BUG, {"what": what, "reason": exc}, exc)


def _write(event: Event, fields: dict[str, object], exc: Exception | None = None) -> None:
    about = key_values({"event": event.id, **fields})
    _LOGGER.log(event.level, "%s", about, exc_info=exc, extra={EVENT: event.id, FIELDS: fields})


def _record(event: Event, **fields: object) -> logging.LogRecord:
    """Return a record that goes past the limits."""
    args, extra = (key_values({"event": event.id, **fields}),), {EVENT: event.id, FIELDS: fields}
    return _LOGGER.makeRecord(_LOGGER.name, event.level, "", 0, "%s", args, None, extra=extra)


class _Lines(LineFormatter):
    """Takes the line of a record that has waited: ``QueueHandler.prepare`` made it."""

    def format(self, record: logging.LogRecord) -> str:
        line: str | None = getattr(record, "message", None)
        return super().format(record) if line is None else line


class _Descriptor(logging.Handler):
    """Writes lines to a descriptor; waits until it takes them."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self.format(record))

    def write(self, line: str, until: float = math.inf) -> None:
        """Write a line; give up when the clock shows ``until``, or if the reader has gone."""
        data = line.encode(errors="backslashreplace") + b"\n"
        writable = select.poll()  # of this call: another thread may wait in its own
        writable.register(self._fd, select.POLLOUT)
        while data:
            left = until - time.monotonic()
            if not writable.poll(None if left == math.inf else max(0.0, 1000 * left)):
                return
            try:
                data = data[os.write(self._fd, data[:_AT_ONCE]) :]
            except BlockingIOError:  # another process has written since
                continue
            except OSError:
                return


class _Queue(logging.handlers.QueueHandler):
    """Hands lines to a thread that writes them.  Any thread; never waits."""

    queue: queue.Queue[logging.LogRecord]

    def __init__(self, lines: LineFormatter, writer: logging.Handler) -> None:
        """Raises TransportError if there can be no thread."""
        super().__init__(queue.Queue(MAX_WAITING))
        self.setFormatter(lines)
        self._writer = writer
        self._lost = 0
        start_thread(threading.Thread(target=self._write_all, name="kvshm-log", daemon=True))

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def drain(self, until: float) -> None:
        """Wait until all lines are written, or the clock shows ``until``."""
        with self.queue.all_tasks_done:
            left = max(0.0, until - time.monotonic())
            self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, left)

    def _write_all(self) -> None:
        while True:
            self._writer.handle(self.queue.get())
            if self.queue.empty():
                self._report_lost()
            self.queue.task_done()

    def _report_lost(self) -> None:
        self.acquire()
        lost, self._lost = self._lost, 0
        self.release()
        if lost:
            remedy = "have the log read all the time, by a disk that does not hang"
            self._writer.handle(_record(Event.LINES_LOST, lines=lost, remedy=remedy))


class _Log(NamedTuple):
    stderr: _Descriptor | None
    waiting: _Queue
    has_file: bool
    as_json: bool


_started: list[_Log] = []


def start(level: str, log_format: str = "text", log_file: str = "") -> None:
    """Send lines of at least ``level`` to stderr, or to a file.  Raises ConfigError if there is no
    such folder, or no permission; TransportError if there can be no thread."""
    lines = _Lines("coordinator", log_format == "json")
    stderr = None
    with suppress(OSError, ValueError, AttributeError):  # closed, or none
        stderr = _Descriptor(sys.stderr.fileno())
    shown: logging.Handler = stderr or logging.NullHandler()
    shown.setFormatter(lines)

    def not_written(text: str) -> None:
        instead(_record(Event.NOT_IN_FILE, reason=text))

    def left_out(text: str) -> None:
        waiting.handle(_record(Event.LEFT_OUT, reason=text))

    def instead(record: logging.LogRecord) -> None:
        if stderr is not None:  # the file may have room again long before anybody reads
            stderr.write(stderr.format(record), time.monotonic() + INSTEAD_SECONDS)

    writer = LogFile(log_file, lines, instead, not_written) if log_file else shown
    waiting = _Queue(LineFormatter("coordinator", lines.as_json), writer)
    _started[:] = [_Log(stderr, waiting, bool(log_file), lines.as_json)]
    # At the exit it would wait for the lock of a handler that waits for the disk.
    atexit.unregister(logging.shutdown)
    _LOGGER.addFilter(LineLimit(left_out, MAX_LINES))
    logging.basicConfig(level=level.upper(), handlers=[waiting])


def end(text: str = "") -> None:
    """Write the waiting lines, then why the coordinator ends.  Blocks for LAST_SECONDS at most."""
    now = time.monotonic()
    until = now + LAST_SECONDS
    for log in _started:
        log.waiting.drain(now + LAST_SECONDS / 2)  # the rest is for the last line
        if text:
            last = _record(Event.FATAL, reason=text)
            if log.has_file:
                log.waiting.handle(last)
            if log.stderr is not None:
                log.stderr.write(log.stderr.format(last) if log.as_json else text, until)
            log.waiting.drain(until)
    if text and not _started:
        print(text, file=sys.stderr)
