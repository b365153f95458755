"""What a check is, and how all of them are run: each in bounded time, and none silently skipped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvshm.version import __version__

from ..output import Json
from .evidence import Evidence

PATIENCE_SECONDS = 10.0
"""How long one check may take: a file system may hang."""


class Result(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"


class Finding(NamedTuple):
    result: Result
    text: str
    """One line that says what was seen."""


@dataclass(frozen=True)
class Check:
    """One check.  ``look`` may raise: that is a problem, too."""

    name: str
    looks_at: str
    remedy: str
    """What to do if the result is a warning or a problem."""
    look: Callable[[Evidence], Finding]


Findings = Sequence[tuple[Check, Finding]]
BAD = (Result.WARNING, Result.PROBLEM)


def ok(text: str) -> Finding:
    return Finding(Result.OK, text)


def warning(text: str) -> Finding:
    return Finding(Result.WARNING, text)


def problem(text: str) -> Finding:
    return Finding(Result.PROBLEM, text)


def not_applicable(text: str) -> Finding:
    return Finding(Result.NOT_APPLICABLE, text)


def judged(found: Iterable[str], good: str, bad: Callable[[str], Finding] = problem) -> Finding:
    """``bad`` with everything that was found, or ok if that is nothing."""
    return bad(text) if (text := "; ".join(found)) else ok(good)


def run_checks(
    checks: Sequence[Check], evidence: Evidence, patience: float = PATIENCE_SECONDS
) -> list[tuple[Check, Finding]]:
    """Run every check, one after the other.  Never raises."""
    return [(check, _run(check, evidence, patience)) for check in checks]


def _run(check: Check, evidence: Evidence, patience: float) -> Finding:
    """On a thread of its own, which is given up if the check hangs."""
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.look(evidence))
        except Exception as exc:  # any: the other checks are still worth their answers
            text = f"{type(exc).__name__}: {exc}".splitlines()[0]
            found.append(problem(f"could not be checked: {text}"))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(patience)
    hangs = f"could not be checked: no answer within {patience:g} s"
    return found[0] if found else problem(hangs)


def as_json(findings: Findings) -> Json:
    return {
        "version": __version__,
        "problems": sum(found.result is Result.PROBLEM for _, found in findings),
        "warnings": sum(found.result is Result.WARNING for _, found in findings),
        "checks": [
            {
                "check": check.name,
                "result": found.result,
                "found": found.text,
                "remedy": check.remedy if found.result in BAD else None,
            }
            for check, found in findings
        ],
    }
