"""The sockets that listen to one engine: its events, its replays, and its connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.constants import Event as SocketEvent
from zmq.utils.monitor import recv_monitor_message

from kvshm.errors import ConfigError

from .follower import Action, Ask, Complain, Follower, Trouble
from .wire import END_OF_REPLAY, MAX_NUMBER

MAX_MESSAGE_BYTES = 256 << 20
QUEUED_BATCHES = 100_000
"""As many as vLLM's side queues by default."""
BATCHES_PER_TURN = 200
"""Then it is another engine's turn."""
REOPEN_SECONDS = 0.1
UNREACHABLE_SECONDS = 30.0
_WATCHED = SocketEvent.HANDSHAKE_SUCCEEDED | SocketEvent.DISCONNECTED


class Endpoints(NamedTuple):
    """Of one engine, or of one of its data-parallel ranks."""

    events: str
    replay: str | None = None


class Source:
    """One thread.  Nothing blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoints: Endpoints) -> None:
        """Raises ConfigError if ZeroMQ does not take one of the endpoints."""
        self.endpoints = endpoints
        self.name = endpoints.events
        self.follower = Follower(endpoints.replay is not None)
        self._context = context
        self._events: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._opens_at = 0.0
        self._heard_of_at: float | None = None
        if endpoints.replay is not None:
            self._connected(zmq.DEALER, endpoints.replay).close()
        self._open()

    def _open(self) -> None:
        self._events = self._connected(zmq.SUB, self.endpoints.events)

    def _connected(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        made.setsockopt(zmq.IPV6, int("[" in endpoint))
        if kind == zmq.SUB:
            made.setsockopt(zmq.SUBSCRIBE, b"")
            self._monitor = made.get_monitor_socket(_WATCHED)
        try:
            made.connect(endpoint)
        except zmq.ZMQError as exc:
            made.close()
            raise ConfigError(f"{endpoint!r} cannot be connected to: {exc}") from exc
        return made

    def close(self) -> None:
        self._close_replay()
        if self._events is not None and self._monitor is not None:
            self._events.disable_monitor()
            self._monitor.close()
            self._events.close()
            self._events = self._monitor = None

    def waits_for(self) -> Iterator[zmq.Socket[bytes]]:
        """Yield the sockets in which there may be something for ``hear``."""
        if self._monitor is not None:
            yield self._monitor
        if self._replay is not None:
            yield self._replay
        elif self._events is not None and self.follower.connected:
            yield self._events

    def hear(self, now: float) -> Iterator[Action]:
        """Yield what to do about all that has arrived.  Does what concerns the sockets itself."""
        yield from self._do(self._watch(now))
        yield from self._do(self._hear_replay(now))
        yield from self._do(self._hear_live(now))
        yield from self._do(iter(self.follower.tick(now)))
        if self.follower.connected or self._heard_of_at is None:
            self._heard_of_at = now
        elif now - self._heard_of_at >= UNREACHABLE_SECONDS:
            self._heard_of_at = now
            yield Complain(Trouble.UNREACHABLE)

    def _do(self, actions: Iterator[Action]) -> Iterator[Action]:
        for action in actions:
            if isinstance(action, Ask):
                self._ask(action.start)
            else:
                yield action

    # -- the connection

    def _watch(self, now: float) -> Iterator[Action]:
        """To be called before batches are read: ZeroMQ notes a connection before it delivers what
        came over it."""
        if self._events is None and now >= self._opens_at:
            self._open()
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == SocketEvent.HANDSHAKE_SUCCEEDED:
                yield from self.follower.has_connected(now)
            elif self.follower.connected:
                self.follower.has_disconnected(now)
                self.close()  # batches of the engine that was may still be queued in the socket
                self._opens_at = now + REOPEN_SECONDS

    # -- batches

    def _hear_live(self, now: float) -> Iterator[Action]:
        for _ in range(BATCHES_PER_TURN):
            if self._events is None or not (self.follower.connected and self.follower.takes_live):
                return
            try:
                frames = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and (number := _number(frames[1])) is not None:
                yield from self.follower.live(number, frames[2], now)
            else:
                yield Complain(Trouble.BAD)

    def _hear_replay(self, now: float) -> Iterator[Action]:
        for _ in range(BATCHES_PER_TURN):
            if self._replay is None:
                return
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 4 and frames[2] == END_OF_REPLAY:
                self._close_replay()
                yield from self.follower.replay_ended(now)
            elif len(frames) == 4 and (number := _number(frames[2])) is not None:
                yield from self.follower.replayed(number, frames[3], now)
            else:
                yield Complain(Trouble.BAD)

    def _ask(self, start: int) -> None:
        """On a new socket: what is left of an earlier replay does not count."""
        self._close_replay()
        assert self.endpoints.replay is not None
        self._replay = self._connected(zmq.DEALER, self.endpoints.replay)
        with suppress(zmq.Again):
            self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None


def _number(frame: bytes) -> int | None:
    number = int.from_bytes(frame, "big")
    return number if len(frame) == 8 and number <= MAX_NUMBER else None
