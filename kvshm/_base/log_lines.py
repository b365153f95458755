"""One line of the log: its level and text, and what the operator does about it.

Each component lists its lines in a ``log_lines.py`` of its own, as members of a subclass of
``LogLine``; ``docs/generate.py`` writes the tables of docs/operations.md from them.
"""

from __future__ import annotations

from enum import Enum


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
