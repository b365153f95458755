"""Broadcasts that wait to be sent: those of one topic that arise together leave as one frame.

::

    events of A    events of B   engine-gone                events of C
        |--------------|--------------|                          |--> time
        v                             v                          v
    at once: none                 at once, with B's before    at once again
    left within relay_delay_seconds     it: order is kept

Each frame wakes a thread beside the scheduler of each engine.  Thus many busy engines wake an
engine as rarely as one busy engine does.  Events for which an engine waits, and what waits with
them, leave sooner: after awaited_delay_seconds.  ``decide`` gives the numbers; nothing here changes
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvshm._base.timing import TIMING, Timing
from kvshm._node.protocol import (
    MAX_EVENTS_BYTES,
    AnyBroadcast,
    EngineEvents,
    broadcast_frame,
    encode,
)


@dataclass
class _Topic:
    last: float = -math.inf
    """When events were sent last: a tick makes none wait."""
    waiting: list[bytes] = field(default_factory=list)
    size: int = 0
    events: bool = False
    """Whether there are events in ``waiting``."""
    awaited: bool = False
    """Whether an engine waits for some of these."""


class BroadcastQueue:
    """The broadcasts that wait, by topic.  Used by one thread."""

    def __init__(self, send: Callable[[bytes], None], timing: Timing = TIMING) -> None:
        self._send = send
        self._relay_seconds = timing.relay_delay_seconds
        self._awaited_seconds = timing.awaited_delay_seconds
        self._topics: dict[bytes, _Topic] = {}

    def add(self, topic: bytes, message: AnyBroadcast, now: float, awaited: bool = False) -> None:
        """Send a message, after the messages that wait; events may wait themselves, a shorter time
        if an engine waits for them (``awaited``)."""
        encoded = encode(message)
        queued = self._topics.setdefault(topic, _Topic())
        if queued.size + len(encoded) > MAX_EVENTS_BYTES:
            self._flush(topic, queued, now)
        queued.waiting.append(encoded)
        queued.size += len(encoded)
        queued.awaited = queued.awaited or awaited
        if isinstance(message, EngineEvents):
            queued.events = True
        else:
            self._flush(topic, queued, now)

    def send_due(self, now: float) -> None:
        for topic, queued in list(self._topics.items()):
            if now >= self._due(queued):
                if queued.waiting:
                    self._flush(topic, queued, now)
                else:
                    del self._topics[topic]

    def next_due(self) -> float:
        """When ``send_due`` has something to send; infinity if nothing waits."""
        waiting = (queued for queued in self._topics.values() if queued.waiting)
        return min(map(self._due, waiting), default=math.inf)

    def _due(self, queued: _Topic) -> float:
        """When what waits, or arises later, may leave."""
        return queued.last + (self._awaited_seconds if queued.awaited else self._relay_seconds)

    def _flush(self, topic: bytes, queued: _Topic, now: float) -> None:
        if queued.waiting:
            self._send(broadcast_frame(topic, queued.waiting))
            queued.last = now if queued.events else queued.last
            queued.waiting, queued.size = [], 0
            queued.events = queued.awaited = False
