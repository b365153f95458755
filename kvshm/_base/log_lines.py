"""One line of the log: its level and text, and what the operator does about it.

Each component lists its lines as members of a subclass of ``LogLine``: the core in
``core_lines.py``, the others in a ``log_lines.py`` of their own.  ``docs/generate.py`` writes the
tables of docs/operations.md from them.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LogLine(Enum):
    """The base of every component's list of log lines.  A member is ``(level, text, remedy)``:
    a level of ``logging``, a text with ``%``-placeholders, and the remedy in the words of
    docs/operations.md ("none" where the line only informs)."""

    def __init__(self, level: int, text: str, remedy: str) -> None:
        self.level = level
        self.text = text
        self.remedy = remedy

    @property
    def id(self) -> str:
        """The line's name as documents and programs write it: ``peer-died``."""
        return self.name.lower().replace("_", "-")

    def fill(self, *args: object) -> FilledLine:
        """Return the line with what its placeholders stand for, to be logged elsewhere."""
        return FilledLine(self, args)


class FilledLine(NamedTuple):
    """A line of a list together with its arguments; as ``str`` the text."""

    line: LogLine
    args: tuple[object, ...]

    def __str__(self) -> str:
        return self.line.text % self.args
