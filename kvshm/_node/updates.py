"""The updates that a client passes to its engine, and what the client calls in the engine.

Most are the coordinator's own messages (kvshm/_node/protocol.py).  Known engines may be absent when
Joined comes, because they have not joined a restarted coordinator yet; EngineJoined for an epoch
that is known replaces what was known, and has the slot table scanned again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Protocol, TypeVar

import msgspec

from kvshm._base.core_lines import CoreLine
from kvshm._base.log import LogLimit, logger

from .protocol import AnyBroadcast, EngineInfo, Joined, Refused

T = TypeVar("T")
_log = logger(__name__)


class EventBatches(msgspec.Struct, frozen=True):
    """Apply packed block records in this order, each batch with the epoch of its engine."""

    batches: list[tuple[int, bytes]]


class EventsLost(msgspec.Struct, frozen=True):
    """Events of this engine were lost: its slot table has to be scanned again."""

    epoch: int


class Coordinator(Enum):
    """A change of the coordinator's state."""

    MISSING = "missing"
    """No coordinator has answered since this engine was ready.  Passed at most once."""
    LOST = "lost"
    """The coordinator has gone or forgotten this engine; the client joins again."""


Update = Joined | Refused | AnyBroadcast | EventBatches | EventsLost | Coordinator
"""EngineEvents are not passed as such: they come as EventBatches."""


class UpdateHandler(Protocol):
    """The engine, as its client sees it.  All methods run on the client's thread, in the order of
    the updates.  An exception is logged once, counted and otherwise ignored."""

    def describe(self) -> EngineInfo | None:
        """Return the description to join with, None while the engine is not ready."""
        ...

    def apply(self, update: Update) -> None: ...

    def scan_again(self, should_stop: Callable[[], bool]) -> None:
        """All updates are applied: scan the tables of engines whose events were lost."""
        ...

    def beat(self) -> None:
        """Called about once a second, whether there is a coordinator or not."""
        ...

    def count(self, counter: int, amount: int = 1) -> None:
        """Add to one of the engine's counters (kvshm/_shm/statistics.py)."""
        ...


class CallGuard:
    """Makes the client's calls of the engine: if the engine raises, the client goes on and logs the
    first failure of each kind.  Used by one thread."""

    def __init__(self) -> None:
        self._log_limit = LogLimit(math.inf)

    def call(self, method: Callable[..., T], *args: object) -> T | None:
        """Return the result of ``method``, None if it raises."""
        try:
            return method(*args)
        except Exception:  # any: a bug of the engine must not end the client's thread
            kinds = (type(arg).__name__ for arg in args)
            self.log_failure(" ".join([method.__name__, *kinds]), exc_info=True)
            return None

    def log_failure(self, what: str, *, exc_info: bool = False) -> None:
        if self._log_limit.allows(CoreLine.UPDATE_FAILED, what.partition(":")[0]):
            _log.line(CoreLine.UPDATE_FAILED, what, exc_info=exc_info)
