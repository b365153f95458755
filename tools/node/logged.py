"""What the entries of an engine's error log mean.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from kvshm._node.incompatible import differing_field
from kvshm._shm.error_log import ErrorCode, LoggedError


def last_refusal(errors: tuple[LoggedError, ...]) -> str:
    """Why the coordinator has refused the engine most recently; empty if it has not."""
    return next((e.text for e in reversed(errors) if e.code is ErrorCode.REFUSED), "")


def missing_lease_bit(errors: Iterable[LoggedError]) -> str:
    """The entry that no lease bit was free for the engine; empty if one was."""
    return next((e.text for e in errors if e.code is ErrorCode.NO_LEASE_BIT), "")


def other_versions(errors: Iterable[LoggedError]) -> list[str]:
    """The entries that say that a kvshm of another version is here."""
    return [error.text for error in errors if "upgrade kvshm" in error.text]


def difference(errors: tuple[LoggedError, ...], name: str) -> tuple[str, str] | None:
    """The first field in which the engine differs from the one with this name, and the whole
    entry, the most recent one; None if it has met none with which it cannot share."""
    for error in reversed(errors):
        if (field := differing_field(error, name)) is not None:
            return field, error.text
    return None
