"""What an engine hears from its client, and what the client needs of an engine.

News are plain values.  Most are the coordinator's own messages (kvshm/node/protocol.py):

======================== ======================================================================
Joined                   The engine is in the roster, with this lease bit.  EngineJoined,
                         EventsLost and EngineGone follow for what is new in the roster.  It may
                         lack known engines that have yet to join a restarted coordinator.
Refused                  The engine has no place in the roster.  Repeated with each try.
EngineJoined             Use this engine and scan its slot table.  For an epoch known already:
                         ``engine`` replaces what was known, and the table is scanned again.
EngineSuspected          Do not use this engine's blocks for the time being; keep what is known.
EngineRecovered          The suspected engine may be used again.
EngineGone               The epoch has ended: drop all that is known of it.
StrangerJoined           An engine that this one cannot share with is new on the node.
Tick                     ``strangers`` says how many such engines there are.
======================== ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import msgspec

from .protocol import AnyBroadcast, EngineInfo, Joined, Refused


class EventBatches(msgspec.Struct, frozen=True):
    """Apply packed block records, each with the epoch of their engine, in their order."""

    batches: list[tuple[int, bytes]]


class EventsLost(msgspec.Struct, frozen=True):
    """Events of this engine were lost: its slot table has to be scanned again.  Events that are
    told before it is are as good as ever."""

    epoch: int


class Coordinator(Enum):
    """What has become of the coordinator."""

    MISSING = "missing"
    """Since this engine is ready none has answered, for some seconds.  Told at most once, and
    never after one has answered."""
    LOST = "lost"
    """It has gone or forgotten this engine; joining again begins now.  Told once for each loss.
    What is known of the others stays."""


News = Joined | Refused | AnyBroadcast | EventBatches | EventsLost | Coordinator
"""Broadcasts but for EngineEvents, which come as EventBatches."""


class NewsHandler(Protocol):
    """The engine, as its client sees it.  All methods run on the client's thread, one at a time,
    in the order of what happened.  One that raises is logged once, counted and otherwise
    ignored."""

    def describe(self) -> EngineInfo | None:
        """Return what to join with (lease bit aside), None while the engine is not ready;
        then it is asked again soon."""
        ...

    def apply(self, news: News) -> None:
        """Take note of one piece of news."""
        ...

    def scan_again(self, enough: Callable[[], bool]) -> None:
        """All that has arrived is applied: scan tables of which events were lost, until it is
        ``enough`` for now."""
        ...

    def beat(self) -> None:
        """Called about once a second, whether there is a coordinator or not."""
        ...

    def count(self, counter: int, amount: int = 1) -> None:
        """Add to one of the engine's counters (kvshm/shm/counters.py)."""
        ...
