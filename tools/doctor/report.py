"""What ``kvshm doctor`` has found, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

from kvshm.version import __version__

from ..output import Json
from .checks import Check, Finding, Result

Findings = Sequence[tuple[Check, Finding]]
BAD = (Result.WARNING, Result.PROBLEM)


def as_json(findings: Findings) -> Json:
    """One object for each check; the remedy only where one is needed."""
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
