"""What a check finds, and what a check is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from .facts import Facts


class Result(StrEnum):
    """What came of a check, from best to worst."""

    OK = "ok"
    NOT_APPLICABLE = "n/a"
    """There is nothing here that it could look at; the text says what is missing."""
    WARNING = "warning"
    """Sharing may be worse than it could be, or something is meant to be so."""
    PROBLEM = "problem"
    """Something does not work."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor."""

    check: str
    result: Result
    text: str
    remedy: str = ""
    """What to do; empty if nothing has to be done."""


class Told:
    """What a check says, without its own name."""

    def __init__(self, result: Result, text: str, remedy: str = "") -> None:
        self.result, self.text, self.remedy = result, text, remedy


def ok(text: str) -> Told:
    return Told(Result.OK, text)


def absent(text: str) -> Told:
    return Told(Result.NOT_APPLICABLE, text)


def warning(text: str, remedy: str) -> Told:
    return Told(Result.WARNING, text, remedy)


def problem(text: str, remedy: str) -> Told:
    return Told(Result.PROBLEM, text, remedy)


@dataclass(frozen=True)
class Check:
    """One check.  ``look`` yields what it finds, at least one thing; it may raise OSError."""

    name: str
    about: str
    """What it looks at, for the page of checks."""
    look: Callable[[Facts], Iterator[Told]]

    def findings(self, facts: Facts) -> list[Finding]:
        """Carry it out.  Never raises: what cannot be checked is a problem of its own."""
        try:
            told = list(self.look(facts))
        except Exception as exc:  # any: the other checks still have something to say
            reason = f"it could not be checked: {type(exc).__name__}: {exc}"
            told = [problem(reason, "report it, with kvshm doctor --bundle")]
        return [Finding(self.name, each.result, each.text, each.remedy) for each in told]
