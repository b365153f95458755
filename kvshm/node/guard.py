"""Calls of the engine by its client, which goes on whatever the engine raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvshm.log import logger

T = TypeVar("T")
_log = logger(__name__)


class Guard:
    """Counts failures, and logs the first of each kind.  Used by one thread."""

    def __init__(self) -> None:
        self.errors = 0
        self._logged: set[str] = set()

    def call(self, method: Callable[..., T], *args: object) -> T | None:
        """Return what ``method`` returns, None if it raises.  Failures of one method are of one
        kind if its arguments are."""
        try:
            return method(*args)
        except Exception:
            kinds = (type(arg).__name__ for arg in args)
            self.failed(" ".join([method.__name__, *kinds]), exc_info=True)
            return None

    def failed(self, what: str, *, exc_info: bool = False) -> None:
        """Count a failure and log it unless one of its kind was.  Its kind is what stands before
        the colon."""
        self.errors += 1
        kind = what.partition(":")[0]
        if kind not in self._logged:
            self._logged.add(kind)
            _log.error("%s failed (logged once; the client goes on)", what, exc_info=exc_info)
