"""The work of the client's thread: joining, rejoining, heartbeats, and arriving messages.

::

              describe() gives an EngineInfo: Join sent          Joined
    WAITING ------------------------------------------> JOINING --------> JOINED
       ^  ^                no reply, or refused            |                |
       |  +------------------------------------------------+                |
       +--------------------------------------------------------------------+
         broadcasts missed; own events dropped; coordinator lost; rejoin()

An engine that missed broadcasts or dropped events of its own keeps its place in the roster
(``is_member``) and sends events while it joins again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from kvshm._base.ids import NO_LEASE_BIT
from kvshm._base.timing import TIMING, Timing
from kvshm._shm.statistics import BAD_MESSAGES, EVENTS_DROPPED, EVENTS_SENT, Counter
from kvshm.errors import ProtocolError, VersionMismatch

from .coordinator_sockets import CoordinatorSockets
from .event_order import EventOrder, Verdict
from .protocol import (
    MAX_COMMAND_BYTES,
    PROTOCOL_VERSION,
    AnyBroadcast,
    Events,
    Heartbeat,
    Join,
    Joined,
    JoinFirst,
    Leave,
    Message,
    Refused,
    check_version,
    decode_broadcast,
    decode_reply,
    encode,
    open_broadcast,
)
from .updates import CallGuard, Coordinator, EventBatches, Update, UpdateHandler


class _State(Enum):
    WAITING = "waiting"
    JOINING = "joining"
    JOINED = "joined"


@dataclass(slots=True)
class _Place:
    """What the coordinator knows of this engine."""

    epoch: int = 0
    """Of the last Join."""
    sequence: int = 0
    """Number of the epoch's last events."""
    coordinator_epoch: int = 0
    """The epoch of the coordinator that has this engine in its roster; 0: none."""
    lease_bit: int = NO_LEASE_BIT


class _Due:
    """When what is due, by the session's clock."""

    def __init__(self, now: float) -> None:
        self.next_try = now
        self.regular_beat = now
        self.next_beat = now
        """``regular_beat``, or sooner when a coordinator is back."""
        self.last_heard = now
        self.reply = 0.0
        self.give_up_missing = 0.0
        """When engines that a new coordinator does not name count as gone."""
        self.absence: float | None = math.inf
        """When to report that no coordinator has answered; None: one has, or it is reported."""


class CoordinatorSession:
    """The client's sockets and state machine.  After construction for the client's thread only."""

    def __init__(
        self,
        run_dir: Path,
        namespace: str,
        handler: UpdateHandler,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        timing: Timing = TIMING,
    ) -> None:
        self._sockets = CoordinatorSockets(run_dir, namespace, timing.reconnect_seconds)
        self._handler = handler
        self._clock = clock
        self._jitter = jitter
        self._timing = timing
        self._order = EventOrder()
        self.guard = CallGuard()
        self._state = _State.WAITING
        self._attempts = 0
        """Joins in a row that failed."""
        self._place = _Place()
        self._due = _Due(clock())
        self._events_lost = False
        """Whether events were dropped since the last Join, so that the peers must scan."""
        self.heard_at = -math.inf
        """When events of another engine last came, by ``clock``.  Any thread may read it."""
        self._early: list[AnyBroadcast] = []
        """Broadcasts that arrived between Join and Joined."""

    @property
    def is_member(self) -> bool:
        return self._place.coordinator_epoch != 0

    @property
    def has_listeners(self) -> bool:
        """Whether another engine of the topic is known, to receive events.  Any thread."""
        return bool(self._order.last_events)

    def open(self, wake_fds: Collection[int], hand_over: Callable[[], None]) -> None:
        """Create and connect the sockets; a readable descriptor of ``wake_fds`` ends a ``wait``.
        ``hand_over`` sends what other threads have queued so far; it is called before a new epoch
        begins, so that events of the old epoch are not sent with the new epoch.  Raises KvshmError
        or zmq.ZMQError, leaving nothing open."""
        self._hand_over = hand_over
        self._sockets.open(wake_fds)

    def close(self) -> None:
        """Leave, bounded by LINGER, and close everything."""
        self._leave()
        self._sockets.close()

    # -- what the engine sends

    def send_events(self, records: bytes, awaited: bool = False) -> None:
        """Send one message of events, or drop it: then the peers scan this engine's slot table.
        ``awaited``: another engine waits for them."""
        self._place.sequence += 1
        numbers = {"epoch": self._place.epoch, "sequence": self._place.sequence}
        events = Events(**numbers, records=records, awaited=awaited)
        sent = self.is_member and self._send(events)
        self.guard.call(self._handler.count, EVENTS_SENT if sent else EVENTS_DROPPED)
        self._events_lost = self._events_lost or not sent

    def skip_events(self, batches: int, why: Counter) -> None:
        """Count ``batches`` that are not sent: EVENTS_DROPPED, then the peers have to scan the slot
        table, or EVENTS_UNHEARD, without peers.  Uses up a sequence number: an engine that joined
        unnoticed and scanned before these batches sees the gap and scans again."""
        self._place.sequence += 1
        self.guard.call(self._handler.count, why, batches)
        self._events_lost = self._events_lost or why is EVENTS_DROPPED

    def rejoin(self) -> None:
        """Leave with the old epoch and join with a new description.  If ``work`` has begun to join
        with the epoch that ``describe`` returns now, no Leave is sent: the coordinator lets no
        epoch join again after its Leave."""
        info = self.guard.call(self._handler.describe)
        present = info is not None and info.epoch == self._place.epoch
        if not present:
            self._leave()
        if self._state is _State.WAITING or not present:
            self._join_at(self._clock())

    # -- the two halves of the client's loop

    def wait(self) -> Collection[object]:
        """Wait until a message arrives, a thread wakes this one or a timer is due.  Returns the
        readable ones of ``wake_fds`` and the own sockets."""
        before = self._clock()
        tries = {_State.WAITING: self._due.next_try, _State.JOINING: self._due.reply}
        timeout = max(0.0, min(self._due.next_beat, tries.get(self._state, math.inf)) - before)
        if self._sockets.wait(timeout):  # there is a coordinator again
            self._due.next_try = before
            self._due.next_beat = before
        # Time in which this process was stopped does not count as silence of the coordinator.
        stopped = self._clock() - before - timeout
        if stopped > self._timing.heartbeat_seconds:
            self._due.last_heard += stopped
        return self._sockets.readable

    def work(self) -> None:
        """Handle the messages that have arrived and the timers that are due."""
        for frame in self._sockets.replies():
            self._handle(self._on_reply, frame)
        for frame in self._sockets.broadcasts():
            self._handle(self._on_broadcast, frame)
        if self._order.missing and self._clock() >= self._due.give_up_missing:
            self._order.give_up_missing()
        self._pass_on()
        # Scans stop once a heartbeat is due, and go on in the next round.
        self.guard.call(self._handler.scan_again, lambda: self._clock() >= self._due.next_beat)
        now = self._clock()
        if now >= self._due.next_beat:
            self._send_heartbeat(now)
        if now - self._due.last_heard > self._timing.silence_seconds:
            self._on_coordinator_lost(now)
        if self._due.absence is not None and now >= self._due.absence:
            self._due.absence = None
            self._pass_on(Coordinator.MISSING)
        if self._state is _State.JOINED and self._events_lost:
            self._join_at(now)
        if self._state is _State.JOINING and now >= self._due.reply:
            self._back_off(now)
        if self._state is _State.WAITING and now >= self._due.next_try:
            self._join(now)

    def _handle(self, handle: Callable[[Any], None], message: object) -> None:
        try:
            if isinstance(message, ProtocolError):
                raise message
            handle(message)
        except (ProtocolError, VersionMismatch) as exc:
            what = "joining" if isinstance(exc, VersionMismatch) else "decoding"
            self.guard.log_failure(f"{what}: {exc}")
            self.guard.call(self._handler.count, BAD_MESSAGES)

    def _send(self, message: Message) -> bool:
        frame = encode(message)
        if (size := len(frame)) > MAX_COMMAND_BYTES:
            self.guard.log_failure(f"sending: message of {size} bytes, {MAX_COMMAND_BYTES} fit")
            return False
        return self._sockets.send(frame)

    # -- what the engine receives

    def _pass_on(self, *more: Update) -> None:
        """Pass the updates of the broadcasts to the engine, then ``more``."""
        for item in (*self._order.take_updates(), *more):
            if isinstance(item, EventBatches):
                self.heard_at = self._clock()
            self.guard.call(self._handler.apply, item)

    # -- joining

    def _join_at(self, when: float) -> None:
        self._state = _State.WAITING
        self._attempts = 0
        self._due.next_try = when

    def _back_off(self, now: float) -> None:
        first, longest = self._timing.back_off_seconds
        delay = min(longest, first * 2.0 ** min(self._attempts, 16))
        self._state = _State.WAITING
        self._attempts += 1
        self._due.next_try = now + delay * (0.5 + 0.5 * self._jitter())

    def _join(self, now: float) -> None:
        info = self.guard.call(self._handler.describe)
        if info is None:
            self._due.next_try = now + self._timing.describe_seconds
            return
        if info.epoch != self._place.epoch:
            self._hand_over()
            self._leave()
            self._place.epoch = info.epoch
        # Before the Join: later broadcasts complete the roster of the Joined.
        self._sockets.subscribe(info.fingerprint)
        self._early.clear()
        self._events_lost = False
        if self._due.absence is not None:
            self._due.absence = min(self._due.absence, now + self._timing.absence_seconds)
        engine = msgspec.structs.replace(info, lease_bit=self._place.lease_bit)
        if not self._send(
            Join(protocol=PROTOCOL_VERSION, engine=engine, sequence=self._place.sequence)
        ):
            self._back_off(now)
            return
        self._state = _State.JOINING
        self._due.reply = now + self._timing.reply_seconds

    def _leave(self) -> None:
        """End the present epoch, even if its Join has not been answered yet."""
        if self._place.epoch:
            self._send(Leave(epoch=self._place.epoch))
        self._place = _Place(lease_bit=self._place.lease_bit)

    def _on_coordinator_lost(self, now: float) -> None:
        """Join again if this engine had a place in the roster, which is now lost."""
        if self.is_member:
            self._place.coordinator_epoch = 0
            self._pass_on(Coordinator.LOST)
            self._join_at(now)

    def _send_heartbeat(self, now: float) -> None:
        """Send a heartbeat: once a second, and at once when a coordinator is back."""
        if now >= self._due.regular_beat:
            self._due.regular_beat = now + self._timing.heartbeat_seconds
            self.guard.call(self._handler.beat)
        if self.is_member:
            self._send(Heartbeat(epoch=self._place.epoch, sequence=self._place.sequence))
        self._due.next_beat = self._due.regular_beat

    # -- what the coordinator sends

    def _on_reply(self, frame: bytes) -> None:
        reply = decode_reply(frame)
        self._due.last_heard = now = self._clock()
        self._due.absence = None
        if reply.engine_epoch != self._place.epoch:
            return
        if isinstance(reply, JoinFirst):
            # While a Join is under way, this answers an earlier message.
            if self._state is not _State.JOINING:
                self._on_coordinator_lost(now)
        elif self._state is not _State.JOINING:
            return
        elif isinstance(reply, Refused):
            self._on_refused(reply, now)
        else:
            check_version(reply.protocol)
            self._on_joined(reply, now)

    def _on_joined(self, reply: Joined, now: float) -> None:
        self._state = _State.JOINED
        if self.is_member and self._place.coordinator_epoch != reply.coordinator_epoch:
            self._pass_on(Coordinator.LOST)  # it restarted before its silence was noticed
        self._place.coordinator_epoch = reply.coordinator_epoch
        self._place.lease_bit = reply.lease_bit
        self._attempts = 0
        self._due.give_up_missing = now + self._timing.missing_seconds
        self._order.begin(reply)
        early, self._early = self._early, []
        for broadcast in early:
            if self._state is _State.JOINED:
                self._follow(broadcast)

    def _on_refused(self, reply: Refused, now: float) -> None:
        self._on_coordinator_lost(now)
        if reply.retry:
            self._back_off(now)
        else:
            self._join_at(now + self._timing.refused_seconds)
        self._pass_on(reply)

    def _on_broadcast(self, frame: bytes) -> None:
        topic, messages = open_broadcast(frame)
        if topic != self._sockets.topic:
            return  # a topic from which this engine has just unsubscribed
        self._due.last_heard = self._clock()
        joined = self._state is _State.JOINED
        taken = self._order.receive_events(messages) if joined else 0
        for message in messages[taken:]:
            self._handle(self._on_message, message)

    def _on_message(self, message: AnyBroadcast | Raw) -> None:
        broadcast = decode_broadcast(message) if isinstance(message, Raw) else message
        if self._state is _State.JOINING:
            self._early.append(broadcast)
        elif self._state is _State.JOINED:
            self._follow(broadcast)

    def _follow(self, broadcast: AnyBroadcast) -> None:
        verdict = self._order.receive(broadcast)
        if self._order.full:
            self._pass_on()
        if verdict is Verdict.GAP:
            self._join_at(self._clock())
        elif verdict is Verdict.EXPELLED:
            self._on_coordinator_lost(self._clock())
