"""What the entries of an engine's error log say.  Pure."""

from __future__ import annotations

from kvshm._node.incompatible import differing_field
from kvshm._shm.error_log import ErrorCode, LoggedError

Errors = tuple[LoggedError, ...]


def last_of(code: ErrorCode, errors: Errors) -> str:
    """The text of the most recent entry with this code; empty if there is none."""
    return next((error.text for error in reversed(errors) if error.code is code), "")


def other_versions(errors: Errors) -> list[str]:
    """The coordinator's refusals whose remedy is another version of kvshm."""
    refusals = [error for error in errors if error.code is ErrorCode.REFUSED]
    return [error.text for error in refusals if "upgrade kvshm" in error.text]


def difference(errors: Errors, name: str) -> tuple[str, str] | None:
    """The first field in which the engine differs from the one with this name, and the whole
    entry, the most recent one; None if it has met none with which it cannot share."""
    for error in reversed(errors):
        if (field := differing_field(error, name)) is not None:
            return field, error.text
    return None
