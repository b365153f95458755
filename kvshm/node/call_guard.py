"""Calls from the client's thread into the engine: the thread goes on if the engine raises."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from kvshm.log import RateLimit, logger

T = TypeVar("T")
_log = logger(__name__)


class CallGuard:
    """Logs the first failure of each kind.  Used by one thread."""

    def __init__(self) -> None:
        self._log_limit = RateLimit(time.monotonic, math.inf)

    def call(self, method: Callable[..., T], *args: object) -> T | None:
        """Return the result of ``method``, None if it raises.  A kind of failure is the method's
        name with the types of its arguments."""
        try:
            return method(*args)
        except Exception:  # any: a bug of the engine must not end the client's thread
            kinds = (type(arg).__name__ for arg in args)
            self.log_failure(" ".join([method.__name__, *kinds]), exc_info=True)
            return None

    def log_failure(self, what: str, *, exc_info: bool = False) -> None:
        """Log a failure if it is the first of its kind, which is the text before the colon."""
        if self._log_limit.allows(what):
            _log.error("%s failed (logged once; the client goes on)", what, exc_info=exc_info)
