"""One line per event, key=value, so that both people and grep can read the log."""

from __future__ import annotations

import logging
import sys
import time

from .actions import Log

MAX_VALUE = 1000
"""Characters of a value that are written."""

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


def start(level: str) -> None:
    """Send lines of at least ``level`` to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
