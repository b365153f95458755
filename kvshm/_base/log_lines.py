"""One line of the log: its level, its text, and what the operator does about it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class LogLine(Enum):
    """The base of every component's list of log lines.  A member is ``(level, text, remedy)``, the
    remedy in the words of docs/operations.md ("none" where the line only informs)."""

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
