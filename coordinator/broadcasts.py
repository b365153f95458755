"""Broadcasts on their way out: those of a topic that come about together leave as one frame.

::

    events of A    events of B   engine-gone                events of C
        |--------------|--------------|                          |--> time
        v                             v                          v
    at once: none                 at once, with B's before    at once again
    left within relay_delay_seconds     it: order is kept

What engines hear costs each of them a wake-up of a thread beside its scheduler, so of many engines
each is woken as often as by one.  Numbers are given by ``decide``; nothing here changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvshm.node.protocol import (
    MAX_EVENTS_BYTES,
    AnyBroadcast,
    EngineEvents,
    broadcast_frame,
    encode,
)
from kvshm.timing import TIMING, Timing


@dataclass
class _Topic:
    last: float = -math.inf
    """When something left."""
    waiting: list[bytes] = field(default_factory=list)
    size: int = 0


class Broadcasts:
    """What waits to be broadcast, by topic.  Used by one thread."""

    def __init__(self, send: Callable[[bytes], None], timing: Timing = TIMING) -> None:
        self._send = send
        self._relay_seconds = timing.relay_delay_seconds
        self._topics: dict[bytes, _Topic] = {}

    def add(self, topic: bytes, message: AnyBroadcast, now: float) -> None:
        """Send a message, with those before it; events may wait."""
        encoded = encode(message)
        waits = self._topics.setdefault(topic, _Topic())
        if waits.size + len(encoded) > MAX_EVENTS_BYTES:
            self._leave(topic, waits, now)
        waits.waiting.append(encoded)
        waits.size += len(encoded)
        if not isinstance(message, EngineEvents):
            self._leave(topic, waits, now)

    def send_due(self, now: float) -> None:
        """Send what has waited long enough."""
        for topic, waits in list(self._topics.items()):
            if now >= waits.last + self._relay_seconds:
                if waits.waiting:
                    self._leave(topic, waits, now)
                else:
                    del self._topics[topic]

    def next_due(self) -> float:
        """When ``send_due`` has something to send; infinity if nothing waits."""
        waiting = [waits.last for waits in self._topics.values() if waits.waiting]
        return min(waiting, default=math.inf) + self._relay_seconds

    def _leave(self, topic: bytes, waits: _Topic, now: float) -> None:
        if waits.waiting:
            self._send(broadcast_frame(topic, waits.waiting))
            waits.waiting, waits.size, waits.last = [], 0, now
