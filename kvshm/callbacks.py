"""What the client tells the engine, and how it survives an engine that raises.

All methods run on the client's thread, one at a time; the order in which they are called is
the order of what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .log import logger
from .protocol import EngineInfo, Joined, Refused, Stranger

T = TypeVar("T")
_log = logger(__name__)


class Listener(Protocol):
    """Who is told about the other engines of the topic."""

    def engine_joined(self, info: EngineInfo) -> None:
        """Use this engine and scan its slot table.  For an epoch known already: ``info``
        replaces what was known, and the table is scanned again."""
        ...

    def engine_suspected(self, epoch: int) -> None:
        """Do not use this engine's blocks for the time being; keep all that is known."""
        ...

    def engine_recovered(self, epoch: int) -> None:
        """The suspected engine may be used again."""
        ...

    def engine_gone(self, epoch: int, reason: str) -> None:
        """The epoch has ended: drop all that is known of it."""
        ...

    def engine_events(self, batches: Sequence[tuple[int, bytes]]) -> None:
        """Apply packed block records, each with the epoch of their engine, in their order."""
        ...

    def rescan(self, epoch: int) -> None:
        """Events of this engine were lost: its slot table has to be scanned again.  Events that
        are told before it is are as good as ever."""
        ...

    def scan_again(self, enough: Callable[[], bool]) -> None:
        """What has arrived is told: scan what has to be, until it is ``enough`` for now."""
        ...

    def stranger_joined(self, stranger: Stranger) -> None:
        """An engine that this one cannot share with is new on the node."""
        ...

    def strangers_counted(self, count: int) -> None:
        """How many such engines there are has changed since it was told last, here or with
        ``joined``."""
        ...


class Member(Listener, Protocol):
    """The engine, as its client sees it.  A method that raises is logged once, counted
    and otherwise ignored."""

    def describe(self) -> EngineInfo | None:
        """Return what to join with (lease bit aside), None while the engine is not ready;
        then it is asked again soon."""
        ...

    def joined(self, reply: Joined) -> None:
        """The engine is in the roster, with this lease bit.

        ``engine_joined`` for every engine new to this epoch, ``rescan`` and ``engine_gone``
        for known ones follow, so nothing has to be done about the roster in ``reply``.  It
        may lack known engines that have yet to join a restarted coordinator.
        """
        ...

    def refused(self, message: Refused) -> None:
        """The engine has no place in the roster.  Called again only for another reason."""
        ...

    def coordinator_missing(self) -> None:
        """Since this engine is ready no coordinator has answered, for some seconds.  Called
        at most once, and never after one has."""
        ...

    def coordinator_lost(self) -> None:
        """The coordinator has gone or forgotten this engine; joining again begins now.
        Called once for each loss.  What is known of the others stays."""
        ...

    def beat(self) -> None:
        """Called about once a second, whether there is a coordinator or not."""
        ...

    def count(self, counter: int, amount: int = 1) -> None:
        """Add to one of the engine's counters (kvshm/counters.py)."""
        ...


class Guarded:
    """A member whose exceptions are counted, and logged once for each method."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.errors = 0
        self._logged: set[str] = set()

    def call(self, method: Callable[..., T], *args: Any) -> T | None:
        try:
            return method(*args)
        except Exception:
            self.failed(f"callback {method.__name__}", exc_info=True)
            return None

    def failed(self, what: str, *, exc_info: bool = False) -> None:
        """Count a failure and log it unless one of its kind was."""
        self.errors += 1
        kind = what.partition(":")[0]
        if kind not in self._logged:
            self._logged.add(kind)
            _log.error("%s failed (logged once; the client goes on)", what, exc_info=exc_info)

    def engine_joined(self, info: EngineInfo) -> None:
        self.call(self.member.engine_joined, info)

    def engine_suspected(self, epoch: int) -> None:
        self.call(self.member.engine_suspected, epoch)

    def engine_recovered(self, epoch: int) -> None:
        self.call(self.member.engine_recovered, epoch)

    def engine_gone(self, epoch: int, reason: str) -> None:
        self.call(self.member.engine_gone, epoch, reason)

    def engine_events(self, batches: Sequence[tuple[int, bytes]]) -> None:
        self.call(self.member.engine_events, batches)

    def rescan(self, epoch: int) -> None:
        self.call(self.member.rescan, epoch)

    def scan_again(self, enough: Callable[[], bool]) -> None:
        self.call(self.member.scan_again, enough)

    def stranger_joined(self, stranger: Stranger) -> None:
        self.call(self.member.stranger_joined, stranger)

    def strangers_counted(self, count: int) -> None:
        self.call(self.member.strangers_counted, count)
