"""Which versions of transformers kvshm's tests have run with; knows none of its internals."""

from __future__ import annotations

import re

TESTED = ((5, 19), (5, 24))
"""The oldest and the newest minor with which all tests of tests/transformers have passed."""


def too_old(version: str) -> str | None:
    """Return why this version of transformers cannot be used, or None."""
    if _minor(version) >= TESTED[0]:
        return None
    return f"transformers {version} is too old, kvshm needs {_dotted(TESTED[0])} or newer"


def untested(version: str) -> bool:
    """Whether kvshm's tests have not run with this version; older ones are refused."""
    return _minor(version) > TESTED[1]


def tested() -> str:
    """Return the tested versions, for a message."""
    return f"{_dotted(TESTED[0])} to {_dotted(TESTED[1])}"


def _minor(version: str) -> tuple[int, ...]:
    """(0,), older than all, if the version has no numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0,)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
