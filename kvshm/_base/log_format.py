"""What a line of the log says, and its two forms: key=value for people and grep, JSON for programs.

An *event* is a name, such as ``join``, with fields; a line without one is a message.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any

PREFIX = "kvshm: "
"""What the lines of engines begin with, for a search in vLLM's log."""

MAX_VALUE = 1000
"""Characters of a value or message that are written at most."""
MAX_MESSAGE = 4000
MAX_TRACEBACK = 16_000

EVENT, FIELDS = "kvshm_event", "kvshm_fields"

OWN_EPOCHS: dict[int, str] = {}
"""Epochs of this process, and their engines' names, if known: a line says its only one."""


def note_own_epoch(epoch: int, name: str = "") -> None:
    """An epoch of an engine in this process has begun."""
    OWN_EPOCHS[epoch] = name or OWN_EPOCHS.get(epoch, "")


def forget_own_epoch(epoch: int) -> None:
    OWN_EPOCHS.pop(epoch, None)


def quote(value: object) -> str:
    """Return a value as a line of text shows it: in quotes unless it is one word."""
    text = str(value)
    if text and not any(c.isspace() or c in '"=\\' or not c.isprintable() for c in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(escaped)}"'


def printable(text: str) -> str:
    """Return a text in one line, without anything that a terminal could obey or that hides or
    reorders what stands beside it: such characters as Python writes them, ``\\n``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def key_values(about: dict[str, object]) -> str:
    return " ".join(f"{key}={quote(_cut(str(value)))}" for key, value in about.items())


class PlainText(logging.Filter):
    """Makes every line printable: it may quote a client, another engine or a file.  Any thread."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            record.msg, record.args = printable(_shortened(record.getMessage())), None
            if record.exc_info and not record.exc_text:
                text = _cut_middle(_TRACEBACKS.formatException(record.exc_info))
                record.exc_text = "\n".join(map(printable, text.split("\n")))
        except Exception:  # of a wrong format: handlers say so, as for every logger
            return True
        return True


_TRACEBACKS = logging.Formatter()


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


class LineFormatter(logging.Formatter):
    """Formats records as lines, without the line's end.  Any thread."""

    def __init__(self, component: str, as_json: bool) -> None:
        """``component``: ``engine`` or ``coordinator``."""
        super().__init__()
        self._component = component
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        return self._json(record) if self.as_json else self._text(record)

    def _json(self, record: logging.LogRecord) -> str:
        event, fields = getattr(record, EVENT, ""), getattr(record, FIELDS, {})
        about: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "component": self._component,
            "pid": record.process,
            "logger": record.name.removeprefix("vllm."),
            "message": _cut(_message(record)),
        }
        if process := getattr(record, "vllm_process_name", ""):
            about["process"] = process
        if len(OWN_EPOCHS) == 1:
            ((epoch, name),) = OWN_EPOCHS.items()
            about |= {"engine": name} if name else {}
            about["epoch"] = f"{epoch:016x}"
        if event:
            about |= {"event": event, "fields": {k: _plain(v) for k, v in fields.items()}}
        if record.exc_info:
            about["traceback"] = _cut_middle(self.formatException(record.exc_info))
        return json.dumps(about)

    def _text(self, record: logging.LogRecord) -> str:
        about: dict[str, object] = {"time": _time(record), "level": record.levelname.lower()}
        if self._component != "coordinator":
            about |= {"component": self._component, "pid": record.process}
        if event := getattr(record, EVENT, ""):
            about |= {"event": event, **getattr(record, FIELDS, {})}
        else:
            name = record.name.removeprefix("vllm.")
            about |= {"event": "log", "logger": name, "message": _message(record)}
        line = key_values(about)
        if record.exc_info:
            line += f" traceback={quote(_cut_middle(self.formatException(record.exc_info)))}"
        return line


def _time(record: logging.LogRecord) -> str:
    """ISO 8601 with microseconds, UTC."""
    whole, part = divmod(round(record.created * 1_000_000), 1_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{part:06d}Z"


def _message(record: logging.LogRecord) -> str:
    return record.getMessage().removeprefix(PREFIX)


def _cut(text: str) -> str:
    """An engine may send values of megabytes, and bytes that are no text."""
    text = _encodable(text)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def _cut_middle(text: str) -> str:
    """Of a traceback the first and the last lines say most."""
    text = _encodable(text)
    if len(text) <= MAX_TRACEBACK:
        return text
    half = MAX_TRACEBACK // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


def _encodable(text: str) -> str:
    """Without lone surrogates, which strict readers of JSON refuse."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: object) -> object:
    """A value as JSON has it: a number or truth value as such, all else as text."""
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _cut(str(value))
