"""What the coordinator knows; a new one learns it from the engines that join.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvshm._base.timing import TIMING, Timing
from kvshm._node.protocol import AnyBroadcast, EngineInfo

from .actions import Action, Log, ReleaseTable, SendBroadcast, Sender
from .lease_bits import LeaseBits
from .log_lines import Event

MAX_REPORTS = 1000
MAX_REASON = 200
"""Characters of a reason by which reports differ."""
MAX_ENDED = 1024
"""Ended epochs that are remembered: messages that are under way are of later ones."""


@dataclass
class Engine:
    info: EngineInfo
    pid: int
    sequence: int
    """Of the engine's last events: relayed, or known to be lost."""
    last_heard: float
    suspected: bool = False


@dataclass
class Schedule:
    last_clock: float | None = None
    grace_until: float | None = None
    grace_over: bool = False
    """Whether the engines of an earlier coordinator have had time to join this one."""
    next_leftovers: float = 0.0
    next_cleanup: float = 0.0


@dataclass
class State:
    """What the coordinator knows.  Only ``decide`` changes it."""

    epoch: int
    namespace: str
    uid: int
    timing: Timing = TIMING
    bits: LeaseBits = field(default_factory=LeaseBits)
    engines: dict[int, Engine] = field(default_factory=dict)
    topics: dict[bytes, int] = field(default_factory=dict)
    """Fingerprint -> sequence of its last broadcast."""
    idle_topics: set[bytes] = field(default_factory=set)
    ended: dict[int, None] = field(default_factory=dict)
    """The last epochs that left the roster for good, oldest first."""
    ended_by_worker: dict[int, tuple[Engine, float]] = field(default_factory=dict)
    """Epochs that ended with a worker's process, and until when a Leave shows a clean end."""
    kept: set[int] = field(default_factory=set)
    """Epochs whose tables the shell keeps."""
    schedule: Schedule = field(default_factory=Schedule)
    reports: dict[tuple[int, str], int] = field(default_factory=dict)
    """(pid, event and reason) -> how often."""
    num_reports: int = 0
    """Messages dropped or refused, including those that are not remembered."""

    def broadcast(
        self, topic: bytes, kind: Callable[..., AnyBroadcast], **fields: Any
    ) -> SendBroadcast:
        """Return the next numbered broadcast of a topic."""
        sequence = self.topics.get(topic, 0) + 1
        self.topics[topic] = sequence
        return SendBroadcast(topic, kind(coordinator_epoch=self.epoch, sequence=sequence, **fields))

    def end(self, epoch: int) -> None:
        del self.engines[epoch]
        self.ended[epoch] = None
        if len(self.ended) > MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    def forget_idle_topics(self) -> None:
        """Forget topics that had no engine the last time either.  The numbers of such a topic
        start again; an engine that joins later reads that in the Joined."""
        idle = self.topics.keys() - {engine.info.fingerprint for engine in self.engines.values()}
        for topic in idle & self.idle_topics:
            del self.topics[topic]
        self.idle_topics = idle - self.idle_topics

    def release_tables(self) -> list[Action]:
        """Release all tables but those whose end matters to an engine or a lease bit."""
        needed = self.bits.holders | self.engines.keys()
        actions: list[Action] = [ReleaseTable(epoch) for epoch in sorted(self.kept - needed)]
        self.kept = needed
        return actions

    def report(self, sender: Sender, event: Event, reason: str, **fields: object) -> list[Action]:
        """Count a dropped or refused message; return a line for the sender's first of a kind."""
        self.num_reports += 1
        reason = reason[:MAX_REASON]
        key = (sender.pid, f"{event.id} {reason}" if fields else event.id)
        count = self.reports.get(key, 0)
        if count or len(self.reports) < MAX_REPORTS:
            self.reports[key] = count + 1
        if count or key not in self.reports:
            return []
        about = {"pid": sender.pid, "uid": sender.uid, "reason": reason, **fields}
        return [Log(event, about)]
