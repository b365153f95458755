"""The roster and everything else the coordinator knows.  Pure.

Nothing of it is needed to serve a prefix: a new coordinator starts with an empty roster, and
learns everything from the engines that join it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvshm.node.protocol import AnyBroadcast, EngineInfo
from kvshm.timing import TIMING, Timing

from .actions import Action, Log, ReleaseTable, SendBroadcast, Sender
from .lease_bits import LeaseBits

MAX_COMPLAINTS = 1000
"""Different complaints that are remembered, and so logged."""
MAX_REASON = 200
"""Characters of a reason by which complaints are told apart."""
MAX_ENDED = 1024
"""Ended epochs that are remembered.  What comes late of one ended before it would have been
on its way for as long as a thousand others took to end."""


@dataclass
class Engine:
    """One row of the roster."""

    info: EngineInfo
    pid: int
    """As the socket tells: who speaks for this epoch."""
    sequence: int
    """Of its last events: relayed, or known to be lost."""
    last_heard: float
    suspected: bool = False


@dataclass
class State:
    """What the coordinator knows.  Only ``decide`` changes it."""

    epoch: int
    namespace: str
    uid: int
    timing: Timing = TIMING
    bits: LeaseBits = field(default_factory=LeaseBits)
    engines: dict[int, Engine] = field(default_factory=dict)
    """The roster, by epoch."""
    topics: dict[bytes, int] = field(default_factory=dict)
    """Fingerprint -> sequence of its last broadcast; kept a while when its last engine has
    gone."""
    idle_topics: set[bytes] = field(default_factory=set)
    """Topics that had no engine when they were last looked at."""
    ended: dict[int, None] = field(default_factory=dict)
    """The last epochs that were in the roster and will never be again, oldest first."""
    unexplained: dict[int, tuple[Engine, float]] = field(default_factory=dict)
    """Epochs that ended with a worker's process: their engine may be about to say that it leaves;
    until when it may."""
    kept: set[int] = field(default_factory=set)
    """Epochs whose tables the shell keeps."""
    settled: bool = False
    """Whether all engines that a coordinator before this one knew have had time to come back."""
    settled_at: float | None = None
    complaints: dict[tuple[int, str], int] = field(default_factory=dict)
    """(pid, what about) -> how often."""
    num_complaints: int = 0
    """Messages dropped or refused, also those that are not remembered."""
    last_clock: float | None = None
    next_leftovers: float = 0.0

    def publish(
        self, topic: bytes, kind: Callable[..., AnyBroadcast], **fields: Any
    ) -> SendBroadcast:
        """Return the next numbered broadcast of a topic."""
        sequence = self.topics.get(topic, 0) + 1
        self.topics[topic] = sequence
        return SendBroadcast(topic, kind(coordinator_epoch=self.epoch, sequence=sequence, **fields))

    def end(self, epoch: int) -> None:
        """Take an epoch off the roster for good."""
        del self.engines[epoch]
        self.ended[epoch] = None
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    def forget_idle_topics(self) -> None:
        """Forget topics that had no engine the last time either: whoever joins one later is
        told with its Joined that numbers begin anew."""
        idle = self.topics.keys() - {engine.info.fingerprint for engine in self.engines.values()}
        for topic in idle & self.idle_topics:
            del self.topics[topic]
        self.idle_topics = idle - self.idle_topics

    def forget(self) -> list[Action]:
        """Keep exactly those tables whose end matters to an engine or a lease bit."""
        needed = self.bits.holders | self.engines.keys()
        actions: list[Action] = [ReleaseTable(epoch) for epoch in sorted(self.kept - needed)]
        self.kept = needed
        return actions

    def complain(self, sender: Sender, event: str, reason: str, **fields: object) -> list[Action]:
        """Count a complaint about a sender; return a log line the first time."""
        self.num_complaints += 1
        reason = reason[:MAX_REASON]
        key = (sender.pid, f"{event} {reason}" if fields else event)
        count = self.complaints.get(key, 0)
        if count or len(self.complaints) < MAX_COMPLAINTS:
            self.complaints[key] = count + 1
        if count or key not in self.complaints:
            return []
        about = {"pid": sender.pid, "uid": sender.uid, "reason": reason, **fields}
        return [Log(logging.WARNING, event, about)]
