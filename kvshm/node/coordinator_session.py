"""The client's thread: joining, rejoining, heartbeats, and what arrives meanwhile.

::

              describe() gives an EngineInfo: Join sent          Joined
    WAITING ------------------------------------------> JOINING --------> JOINED
       ^  ^                no reply, or refused            |                |
       |  +------------------------------------------------+                |
       +--------------------------------------------------------------------+
         broadcasts or own events lost; coordinator lost; rejoin()

Losing broadcasts or own events does not cost the place in the roster (``is_member``), so
events flow on while the engine joins again.
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

from kvshm.errors import ProtocolError, VersionMismatch
from kvshm.ids import NO_LEASE_BIT
from kvshm.resources import require_descriptors
from kvshm.rundir import command_endpoint, event_endpoint
from kvshm.shm.counters import BAD_MESSAGES, EVENTS_DROPPED, EVENTS_SENT, Counter
from kvshm.timing import TIMING, Timing

from .event_order import EventOrder, Verdict
from .guard import Guard
from .news import Coordinator, News, NewsHandler
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

LINGER_MS = 500
DESCRIPTORS = 24  # more than a context with two sockets takes, and the tables that are then made


class _State(Enum):
    WAITING = "waiting"
    JOINING = "joining"
    JOINED = "joined"


class CoordinatorSession:
    """Everything the client's thread does.  After construction used by that thread only."""

    def __init__(
        self,
        run_dir: Path,
        namespace: str,
        handler: NewsHandler,
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
        self.guard = Guard()
        self._state = _State.WAITING
        self._topic = b""
        self._attempts = self._epoch = self._sequence = 0
        self._coordinator_epoch = 0
        """Of the coordinator that has this engine in its roster; 0: none."""
        self._lease_bit: int = NO_LEASE_BIT
        self._events_lost = False
        self._readable: Mapping[object, int] = {}
        self._early: list[AnyBroadcast] = []
        """Broadcasts that arrived between Join and Joined."""
        self._next_try = self._next_beat = self._member_due = self._last_heard = clock()
        self._reply_due = self._missing_until = 0.0
        self._unheard_until: float | None = math.inf
        """When to say that no coordinator was ever heard of; None: one was, or it is said."""

    @property
    def is_member(self) -> bool:
        return self._coordinator_epoch != 0

    @property
    def listened(self) -> bool:
        """Whether there is an engine to send events to, as far as is known.  Any thread."""
        return bool(self._order.heard)

    def open(self, wake_fds: Collection[int], hand_over: Callable[[], None]) -> None:
        """Create and connect the sockets; what makes one of ``wake_fds`` readable ends a ``wait``.

        ``hand_over`` passes on what the other threads have queued so far; it is called before a
        new epoch begins, so that nothing of the old one is sent as the new one's.  Raises
        KvshmError or zmq.ZMQError, leaving nothing open.
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
        # Without a coordinator nothing is queued for it: sending fails instead.  Not for the other
        # one: as its connection breaks, libzmq would drop what was received and is not yet read,
        # and abort in the middle of a message.
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

    # -- what the engine wants

    def send_events(self, records: bytes) -> None:
        """Send one message of events, or drop it and make the others scan the slot table."""
        self._sequence += 1
        events = Events(epoch=self._epoch, sequence=self._sequence, records=records)
        sent = self.is_member and self._send(events)
        self.guard.call(self._handler.count, EVENTS_SENT if sent else EVENTS_DROPPED)
        self._events_lost = self._events_lost or not sent

    def skip_events(self, batches: int, why: Counter) -> None:
        """So many batches are not sent: EVENTS_DROPPED, the others have to scan the slot table, or
        EVENTS_UNHEARD, there is nobody.  Whoever has joined unnoticed meanwhile, and scanned before
        them, learns by the number used up here that it has to scan again."""
        self._sequence += 1
        self.guard.call(self._handler.count, why, batches)
        self._events_lost = self._events_lost or why is EVENTS_DROPPED

    def rejoin(self) -> None:
        """Leave with the old epoch and join with a new description.

        Never leaves the epoch that is described now: ``work`` may have found and joined with
        it before this was asked for, and an epoch that was left is over for good.
        """
        info = self.guard.call(self._handler.describe)
        present = info is not None and info.epoch == self._epoch
        if not present:
            self._leave()
        if self._state is _State.WAITING or not present:
            self._join_at(self._clock())

    # -- the loop's two halves

    def wait(self) -> Collection[object]:
        """Wait until something arrives, somebody wakes the thread or a timer is due.  Returns
        what is readable: of ``wake_fds`` and the own sockets."""
        before = self._clock()
        tries = {_State.WAITING: self._next_try, _State.JOINING: self._reply_due}
        timeout = max(0.0, min(self._next_beat, tries.get(self._state, math.inf)) - before)
        self._readable = dict(self._poller.poll(math.ceil(timeout * 1000)))
        if int(self._readable.get(self._commands, 0)) & zmq.POLLOUT:
            self._poller.modify(self._commands, zmq.POLLIN)  # there is a coordinator again
            self._next_try = self._next_beat = before
        # Time in which this process was stopped is not the coordinator's silence.
        stopped = self._clock() - before - timeout
        if stopped > self._timing.heartbeat_seconds:
            self._last_heard += stopped
        return self._readable

    def work(self) -> None:
        """Handle what has arrived and what is due."""
        self._receive(self._commands, self._on_reply)
        self._receive(self._broadcasts, self._on_broadcast)
        if self._order.missing and self._clock() >= self._missing_until:
            self._order.give_up_missing()
        self._tell()
        self.guard.call(self._handler.scan_again, lambda: self._clock() >= self._next_beat)
        now = self._clock()
        if now >= self._next_beat:
            self._beat(now)
        if now - self._last_heard > self._timing.silence_seconds:
            self._lose(now)
        if self._unheard_until is not None and now >= self._unheard_until:
            self._unheard_until = None
            self._tell(Coordinator.MISSING)
        if self._state is _State.JOINED and self._events_lost:
            self._join_at(now)
        if self._state is _State.JOINING and now >= self._reply_due:
            self._back_off(now)
        if self._state is _State.WAITING and now >= self._next_try:
            self._join(now)

    def _receive(self, socket: zmq.Socket[bytes], handle: Callable[[bytes], None]) -> None:
        for frame in received(socket) if socket in self._readable else ():
            self._try(handle, frame)

    def _try(self, handle: Callable[[Any], None], message: object) -> None:
        try:
            if isinstance(message, ProtocolError):
                raise message
            handle(message)
        except (ProtocolError, VersionMismatch) as exc:
            what = "joining" if isinstance(exc, VersionMismatch) else "decoding"
            self.guard.failed(f"{what}: {exc}")
            self.guard.call(self._handler.count, BAD_MESSAGES)

    def _send(self, message: Message) -> bool:
        frame = encode(message)
        if len(frame) > MAX_COMMAND_BYTES:
            self.guard.failed(f"sending: message of {len(frame)} bytes, {MAX_COMMAND_BYTES} fit")
            return False
        try:
            self._commands.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._poller.modify(self._commands, zmq.POLLIN | zmq.POLLOUT)
            return False
        return True

    # -- what the engine is told

    def _tell(self, *news: News) -> None:
        """Pass on what the broadcasts brought, then ``news``."""
        for item in (*self._order.take_news(), *news):
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
        if self._unheard_until is not None:
            self._unheard_until = min(self._unheard_until, now + self._timing.absence_seconds)
        engine = msgspec.structs.replace(info, lease_bit=self._lease_bit)
        if not self._send(Join(protocol=PROTOCOL_VERSION, engine=engine, sequence=self._sequence)):
            self._back_off(now)
            return
        self._state = _State.JOINING
        self._reply_due = now + self._timing.reply_seconds

    def _leave(self) -> None:
        """End the present epoch, also if its Join has not been answered yet."""
        if self._epoch:
            self._send(Leave(epoch=self._epoch))
        self._epoch = self._sequence = self._coordinator_epoch = 0

    def _subscribe(self, topic: bytes) -> None:
        """Subscribe before the Join: what the roster does not hold must not be missed."""
        if topic == self._topic:
            return
        self._broadcasts.setsockopt(zmq.SUBSCRIBE, topic)
        if self._topic:
            self._broadcasts.setsockopt(zmq.UNSUBSCRIBE, self._topic)
        self._topic = topic

    def _lose(self, now: float) -> None:
        """This engine has lost its place in the roster; nothing happens without one."""
        if self.is_member:
            self._coordinator_epoch = 0
            self._tell(Coordinator.LOST)
            self._join_at(now)

    def _beat(self, now: float) -> None:
        """Once a second, and when there is a coordinator again, for it to hear of this engine."""
        if now >= self._member_due:
            self._member_due = now + self._timing.heartbeat_seconds
            self.guard.call(self._handler.beat)
        if self.is_member:
            self._send(Heartbeat(epoch=self._epoch, sequence=self._sequence))
        self._next_beat = self._member_due

    # -- what the coordinator says

    def _on_reply(self, frame: bytes) -> None:
        reply = decode_reply(frame)
        self._last_heard = now = self._clock()
        self._unheard_until = None
        if reply.engine_epoch != self._epoch:
            return
        if isinstance(reply, JoinFirst):
            # While a Join is under way this answers what was sent before it.
            if self._state is not _State.JOINING:
                self._lose(now)
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
            self._tell(Coordinator.LOST)  # it restarted before it was missed
        self._coordinator_epoch = reply.coordinator_epoch
        self._lease_bit = reply.lease_bit
        self._attempts = 0
        self._missing_until = now + self._timing.missing_seconds
        self._order.begin(reply)
        early, self._early = self._early, []
        for broadcast in early:
            if self._state is _State.JOINED:
                self._follow(broadcast)

    def _on_refused(self, reply: Refused, now: float) -> None:
        self._lose(now)
        if reply.retry:
            self._back_off(now)
        else:
            self._join_at(now + self._timing.refused_seconds)
        self._tell(reply)

    def _on_broadcast(self, frame: bytes) -> None:
        topic, messages = open_broadcast(frame)
        if topic != self._topic:
            return  # a topic left a moment ago
        self._last_heard = self._clock()
        joined = self._state is _State.JOINED
        for message in messages[self._order.receive_events(messages) if joined else 0 :]:
            self._try(self._on_message, message)

    def _on_message(self, message: AnyBroadcast | Raw) -> None:
        broadcast = decode_broadcast(message) if isinstance(message, Raw) else message
        if self._state is _State.JOINING:
            self._early.append(broadcast)
        elif self._state is _State.JOINED:
            self._follow(broadcast)

    def _follow(self, broadcast: AnyBroadcast) -> None:
        verdict = self._order.receive(broadcast)
        if self._order.full:
            self._tell()
        if verdict is Verdict.GAP:
            self._join_at(self._clock())
        elif verdict is Verdict.EXPELLED:
            self._lose(self._clock())
