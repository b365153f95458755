"""Where an engine's lines go: to vLLM's log, as text or JSON, or to a file (KVSHM_LOG_...).

Only lines of kvshm are touched.  vLLM removes handlers below its own when it configures its log, so
``start_log`` is called again when a connector is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .core_lines import CoreLine
from .log import OURS
from .log_file import LogFile
from .log_format import PREFIX, LineFormatter


def start_log(level: str, log_format: str = "text", log_file: str = "") -> None:
    """Log lines of this severity and above, in this format, to this file if one is given.  Any
    number of times.  Raises ConfigError if the file cannot be there."""
    ours, as_json = logging.getLogger(OURS), log_format == "json"
    for old in [h for h in ours.handlers if isinstance(h, _LowerLevel)]:
        ours.removeHandler(old)
    ours.setLevel(level)
    wanted = (as_json, log_file) if as_json or log_file else None
    known = next((h for h in ours.handlers if isinstance(h, LogFile | _AsJson)), None)
    if known is not None and wanted != _what(known):
        ours.removeHandler(known)
        known.close()
        ours.propagate, known = True, None
    if wanted is None:
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.level > ours.level:
                ours.addHandler(_LowerLevel(handler))
    elif known is None:
        ours.addHandler(_handler(ours, as_json, log_file))
        ours.propagate = False


def _what(handler: logging.Handler) -> tuple[bool, str]:
    return (handler.as_json, handler.baseFilename) if isinstance(handler, LogFile) else (True, "")


def _handler(ours: logging.Logger, as_json: bool, log_file: str) -> logging.Handler:
    """Return what writes all lines: to the file, or to vLLM's log as JSON."""
    elsewhere = _AsJson()
    if not log_file:
        return elsewhere

    def instead(record: logging.LogRecord) -> None:
        if as_json:
            elsewhere.handle(record)
        else:
            logging.getLogger("vllm").handle(record)

    def say(text: str, level: int = logging.WARNING) -> None:
        if ours.isEnabledFor(level):
            instead(ours.makeRecord(OURS, level, __file__, 0, f"{PREFIX}%s", (text,), None))

    file = LogFile(log_file, LineFormatter("engine", as_json), instead, say)
    say(str(CoreLine.LOG_FILE.fill(log_file)), logging.INFO)
    return file


@contextmanager
def shown_on_stderr(level: str) -> Iterator[None]:
    """A context in which kvshm's lines are shown on stderr, for a program without vLLM."""
    handler, vllm = logging.StreamHandler(), logging.getLogger("vllm")
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s"))
    ours = logging.getLogger(OURS)
    before = ours.level, vllm.propagate
    vllm.addHandler(handler)
    ours.setLevel(level)
    vllm.propagate = False
    try:
        yield
    finally:
        vllm.removeHandler(handler)
        ours.setLevel(before[0])
        vllm.propagate = before[1]


class _AsJson(logging.Handler):
    """Writes lines as JSON where vLLM's handlers write theirs; others get the record as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter("engine", as_json=True))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            for handler in _handlers_of_vllm(record.levelno):
                if isinstance(handler, logging.StreamHandler) and handler.stream is not None:
                    _write(handler, f"{line}\n")
                else:
                    handler.handle(record)
        except Exception:  # like every handler of logging: no log line ends the program
            self.handleError(record)


def _write(handler: logging.StreamHandler[Any], line: str) -> None:
    handler.acquire()  # else the line could stand within another one
    try:
        handler.stream.write(line)
        handler.flush()
    finally:
        handler.release()


def _handlers_of_vllm(level: int) -> list[logging.Handler]:
    found: list[logging.Handler] = []
    logger: logging.Logger | None = logging.getLogger("vllm")
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    last = logging.lastResort
    if not found and last is not None and level >= last.level:
        found.append(last)
    return found


class _LowerLevel(logging.StreamHandler):  # type: ignore[type-arg]  # vLLM's stream has any type
    """A handler that shows only the lines below the level of another handler."""

    def __init__(self, other: logging.StreamHandler) -> None:  # type: ignore[type-arg]
        super().__init__(other.stream)
        self._other = other
        self.setFormatter(other.formatter)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < self._other.level
