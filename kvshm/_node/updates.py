"""The updates that a client passes to its engine, and what the client calls in the engine.

Updates are plain values.  Most are the coordinator's own messages (kvshm/_node/protocol.py):

======================== ======================================================================
Joined                   The engine is in the roster, with this lease bit.  EngineJoined,
                         EventsLost and EngineGone follow for changes in the roster.  Known engines
                         may be absent because they have not joined a restarted coordinator yet.
Refused                  The engine has no place in the roster.  Repeated with each try.
EngineJoined             Use this engine and scan its slot table.  For an epoch known already:
                         ``engine`` replaces what was known, and the table is scanned again.
EngineSuspected          Do not use this engine's blocks for now; keep what is known of it.
EngineRecovered          The suspected engine may be used again.
EngineGone               The epoch has ended: drop all that is known of it.
IncompatibleJoined       An incompatible engine is new on the node.
Tick                     ``num_incompatible`` is the number of incompatible engines.
======================== ======================================================================
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
    """Events of this engine were lost: its slot table has to be scanned again.  Events that arrive
    before the scan are still valid."""

    epoch: int


class Coordinator(Enum):
    """A change of the coordinator's state."""

    MISSING = "missing"
    """No coordinator has answered for some seconds since this engine was ready.  Passed at most
    once, and never after a coordinator has answered."""
    LOST = "lost"
    """The coordinator has gone or forgotten this engine; the client joins again.  Passed once for
    each loss.  What is known of other engines stays."""


Update = Joined | Refused | AnyBroadcast | EventBatches | EventsLost | Coordinator
"""EngineEvents are not passed as such: they come as EventBatches."""


class UpdateHandler(Protocol):
    """The engine, as its client sees it.  All methods run on the client's thread, in the order of
    the updates.  An exception is logged once, counted and otherwise ignored."""

    def describe(self) -> EngineInfo | None:
        """Return the description to join with (the client sets the lease bit), None while the
        engine is not ready; then the client asks again soon."""
        ...

    def apply(self, update: Update) -> None:
        """Apply one update."""
        ...

    def scan_again(self, should_stop: Callable[[], bool]) -> None:
        """Called when all updates so far are applied: scan the tables of engines whose events were
        lost, until ``should_stop``."""
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
        if self._log_limit.allows(CoreLine.UPDATE_FAILED, what.partition(":")[0]):
            _log.line(CoreLine.UPDATE_FAILED, what, exc_info=exc_info)
