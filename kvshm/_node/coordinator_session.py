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
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Raw

from kvshm._base.ids import NO_LEASE_BIT
from kvshm._base.resources import require_descriptors
from kvshm._base.rundir import command_endpoint, event_endpoint
from kvshm._base.timing import TIMING, Timing
from kvshm._shm.statistics import BAD_MESSAGES, EVENTS_DROPPED, EVENTS_SENT, Counter
from kvshm.errors import ProtocolError, VersionMismatch

from .event_order import EventOrder, Verdict
from .protocol import (
    MAX_COMMAND_BYTES,
    MAX_RECEIVED_BYTES,
    PROTOCOL_VERSION,
    QUEUE_FRAMES,
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
from .receiving import received
from .updates import CallGuard, Coordinator, Update, UpdateHandler

LINGER_MS = 500
DESCRIPTORS = 24  # enough for a context with two sockets, and for the tables made after that


class _State(Enum):
    WAITING = "waiting"
    JOINING = "joining"
    JOINED = "joined"


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
        self._endpoints = command_endpoint(run_dir, namespace), event_endpoint(run_dir, namespace)
        self._handler = handler
        self._clock = clock
        self._jitter = jitter
        self._timing = timing
        self._order = EventOrder()
        self.guard = CallGuard()
        self._state = _State.WAITING
        self._topic = b""
        self._attempts = self._epoch = self._sequence = 0
        """Joins in a row that failed; epoch of the last Join; number of its last events."""
        self._coordinator_epoch = 0
        """The epoch of the coordinator that has this engine in its roster; 0: none."""
        self._lease_bit: int = NO_LEASE_BIT
        self._events_lost = False
        """Whether events were dropped since the last Join, so that the peers must scan."""
        self._readable: Mapping[object, int] = {}
        self._early: list[AnyBroadcast] = []
        """Broadcasts that arrived between Join and Joined."""
        self._next_try = self._next_beat = self._regular_beat = self._last_heard = clock()
        """``_next_beat`` is ``_regular_beat``, or sooner when a coordinator is back."""
        self._reply_due = self._give_up_missing_at = 0.0
        """``_give_up_missing_at``: when engines that a new coordinator lacks count as gone."""
        self._absence_due: float | None = math.inf
        """When to report that no coordinator has answered; None: one has, or it is reported."""

    @property
    def is_member(self) -> bool:
        return self._coordinator_epoch != 0

    @property
    def has_listeners(self) -> bool:
        """Whether another engine of the topic is known, to receive events.  Any thread."""
        return bool(self._order.last_events)

    def open(self, wake_fds: Collection[int], hand_over: Callable[[], None]) -> None:
        """Create and connect the sockets; a readable descriptor of ``wake_fds`` ends a ``wait``.

        ``hand_over`` sends what other threads have queued so far; it is called before a new epoch
        begins, so that events of the old epoch are not sent with the new epoch.  Raises KvshmError
        or zmq.ZMQError, leaving nothing open.
        """
        self._hand_over = hand_over
        require_descriptors(DESCRIPTORS)
        self._context = zmq.Context(io_threads=1)
        try:
            self._connect(wake_fds)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _connect(self, wake_fds: Collection[int]) -> None:
        self._commands = self._context.socket(zmq.DEALER)
        self._broadcasts = self._context.socket(zmq.SUB)
        shortest, longest = (max(1, round(1000 * time)) for time in self._timing.reconnect_seconds)
        for socket in (self._commands, self._broadcasts):
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.RECONNECT_IVL, shortest)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, longest)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
            socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
        # Without a coordinator sending fails, and nothing is queued.  Not set for the SUB socket:
        # when its connection breaks, libzmq would drop received messages that are not yet read, and
        # abort in the middle of a message.
        self._commands.setsockopt(zmq.IMMEDIATE, 1)
        self._commands.connect(self._endpoints[0])
        self._broadcasts.connect(self._endpoints[1])
        self._poller = zmq.Poller()
        for source in (self._commands, self._broadcasts, *wake_fds):
            self._poller.register(source, zmq.POLLIN)

    def close(self) -> None:
        """Leave, bounded by LINGER, and close everything."""
        self._leave()
        self._commands.close()
        self._broadcasts.close(linger=0)
        self._context.term()

    # -- what the engine sends

    def send_events(self, records: bytes) -> None:
        """Send one message of events, or drop it: then the peers scan this engine's slot table."""
        self._sequence += 1
        events = Events(epoch=self._epoch, sequence=self._sequence, records=records)
        sent = self.is_member and self._send(events)
        self.guard.call(self._handler.count, EVENTS_SENT if sent else EVENTS_DROPPED)
        self._events_lost = self._events_lost or not sent

    def skip_events(self, batches: int, why: Counter) -> None:
        """Count ``batches`` that are not sent: EVENTS_DROPPED, then the peers have to scan the slot
        table, or EVENTS_UNHEARD, without peers.  Uses up a sequence number: an engine that joined
        unnoticed and scanned before these batches sees the gap and scans again."""
        self._sequence += 1
        self.guard.call(self._handler.count, why, batches)
        self._events_lost = self._events_lost or why is EVENTS_DROPPED

    def rejoin(self) -> None:
        """Leave with the old epoch and join with a new description.

        If ``work`` has begun to join with the epoch that ``describe`` returns now, no Leave is
        sent: the coordinator lets no epoch join again after its Leave.
        """
        info = self.guard.call(self._handler.describe)
        present = info is not None and info.epoch == self._epoch
        if not present:
            self._leave()
        if self._state is _State.WAITING or not present:
            self._join_at(self._clock())

    # -- the two halves of the client's loop

    def wait(self) -> Collection[object]:
        """Wait until a message arrives, a thread wakes this one or a timer is due.  Returns the
        readable ones of ``wake_fds`` and the own sockets."""
        before = self._clock()
        tries = {_State.WAITING: self._next_try, _State.JOINING: self._reply_due}
        timeout = max(0.0, min(self._next_beat, tries.get(self._state, math.inf)) - before)
        self._readable = dict(self._poller.poll(math.ceil(timeout * 1000)))
        if int(self._readable.get(self._commands, 0)) & zmq.POLLOUT:
            self._poller.modify(self._commands, zmq.POLLIN)  # there is a coordinator again
            self._next_try = self._next_beat = before
        # Time in which this process was stopped does not count as silence of the coordinator.
        stopped = self._clock() - before - timeout
        if stopped > self._timing.heartbeat_seconds:
            self._last_heard += stopped
        return self._readable

    def work(self) -> None:
        """Handle the messages that have arrived and the timers that are due."""
        self._receive(self._commands, self._on_reply)
        self._receive(self._broadcasts, self._on_broadcast)
        if self._order.missing and self._clock() >= self._give_up_missing_at:
            self._order.give_up_missing()
        self._pass_on()
        # Scans stop once a heartbeat is due, and go on in the next round.
        self.guard.call(self._handler.scan_again, lambda: self._clock() >= self._next_beat)
        now = self._clock()
        if now >= self._next_beat:
            self._send_heartbeat(now)
        if now - self._last_heard > self._timing.silence_seconds:
            self._on_coordinator_lost(now)
        if self._absence_due is not None and now >= self._absence_due:
            self._absence_due = None
            self._pass_on(Coordinator.MISSING)
        if self._state is _State.JOINED and self._events_lost:
            self._join_at(now)
        if self._state is _State.JOINING and now >= self._reply_due:
            self._back_off(now)
        if self._state is _State.WAITING and now >= self._next_try:
            self._join(now)

    def _receive(self, socket: zmq.Socket[bytes], handle: Callable[[bytes], None]) -> None:
        for frame in received(socket) if socket in self._readable else ():
            self._handle(handle, frame)

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
        try:
            self._commands.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._poller.modify(self._commands, zmq.POLLIN | zmq.POLLOUT)
            return False
        return True

    # -- what the engine receives

    def _pass_on(self, *more: Update) -> None:
        """Pass the updates of the broadcasts to the engine, then ``more``."""
        for item in (*self._order.take_updates(), *more):
            self.guard.call(self._handler.apply, item)

    # -- joining

    def _join_at(self, when: float) -> None:
        self._state = _State.WAITING
        self._attempts = 0
        self._next_try = when

    def _back_off(self, now: float) -> None:
        first, longest = self._timing.back_off_seconds
        delay = min(longest, first * 2.0 ** min(self._attempts, 16))
        self._state = _State.WAITING
        self._attempts += 1
        self._next_try = now + delay * (0.5 + 0.5 * self._jitter())

    def _join(self, now: float) -> None:
        info = self.guard.call(self._handler.describe)
        if info is None:
            self._next_try = now + self._timing.describe_seconds
            return
        if info.epoch != self._epoch:
            self._hand_over()
            self._leave()
            self._epoch = info.epoch
        self._subscribe(info.fingerprint)
        self._early.clear()
        self._events_lost = False
        if self._absence_due is not None:
            self._absence_due = min(self._absence_due, now + self._timing.absence_seconds)
        engine = msgspec.structs.replace(info, lease_bit=self._lease_bit)
        if not self._send(Join(protocol=PROTOCOL_VERSION, engine=engine, sequence=self._sequence)):
            self._back_off(now)
            return
        self._state = _State.JOINING
        self._reply_due = now + self._timing.reply_seconds

    def _leave(self) -> None:
        """End the present epoch, even if its Join has not been answered yet."""
        if self._epoch:
            self._send(Leave(epoch=self._epoch))
        self._epoch = self._sequence = self._coordinator_epoch = 0

    def _subscribe(self, topic: bytes) -> None:
        """Subscribe, before the Join: later broadcasts complete the roster of the Joined."""
        if topic == self._topic:
            return
        self._broadcasts.setsockopt(zmq.SUBSCRIBE, topic)
        if self._topic:
            self._broadcasts.setsockopt(zmq.UNSUBSCRIBE, self._topic)
        self._topic = topic

    def _on_coordinator_lost(self, now: float) -> None:
        """Join again if this engine had a place in the roster, which is now lost."""
        if self.is_member:
            self._coordinator_epoch = 0
            self._pass_on(Coordinator.LOST)
            self._join_at(now)

    def _send_heartbeat(self, now: float) -> None:
        """Send a heartbeat: once a second, and at once when a coordinator is back."""
        if now >= self._regular_beat:
            self._regular_beat = now + self._timing.heartbeat_seconds
            self.guard.call(self._handler.beat)
        if self.is_member:
            self._send(Heartbeat(epoch=self._epoch, sequence=self._sequence))
        self._next_beat = self._regular_beat

    # -- what the coordinator sends

    def _on_reply(self, frame: bytes) -> None:
        reply = decode_reply(frame)
        self._last_heard = now = self._clock()
        self._absence_due = None
        if reply.engine_epoch != self._epoch:
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
        if self.is_member and self._coordinator_epoch != reply.coordinator_epoch:
            self._pass_on(Coordinator.LOST)  # it restarted before its silence was noticed
        self._coordinator_epoch = reply.coordinator_epoch
        self._lease_bit = reply.lease_bit
        self._attempts = 0
        self._give_up_missing_at = now + self._timing.missing_seconds
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
        if topic != self._topic:
            return  # a topic from which this engine has just unsubscribed
        self._last_heard = self._clock()
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
