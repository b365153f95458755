"""The shell: sockets and the clock.  It tells ``decide`` what happened and does what
``decide`` says."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import zmq

from kvshm.errors import ProtocolError
from kvshm.protocol import (
    HEARTBEAT_SECONDS,
    MAX_RECEIVED_BYTES,
    decode_command,
    encode,
    foreign_join,
)

from . import logfmt
from .actions import (
    Action,
    Clock,
    Event,
    Examine,
    Foreign,
    Forget,
    Garbled,
    Log,
    Peer,
    Publish,
    Received,
    Send,
    SweepBits,
    SweepFiles,
)
from .roster import State
from .state import decide
from .tables import Tables

MAX_RECEIVED = 1000
"""Messages taken before deaths and the clock are looked after."""
QUEUE_LENGTH = 10_000


class Server:
    """One coordinator at work.  Used by one thread."""

    def __init__(
        self,
        state: State,
        tables: Tables,
        sweep_files: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``sweep_files`` removes what the dead left in the run directory."""
        self._state = state
        self._tables = tables
        self._sweep_files = sweep_files
        self._clock = clock
        self._events: deque[Event] = deque()
        self._watched: set[int] = set()
        """Descriptors of the tables' connections that are polled."""
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._publisher = self._context.socket(zmq.PUB)
        self._poller = zmq.Poller()

    def open(self, command_endpoint: str, event_endpoint: str, wake_fd: int) -> None:
        """Bind the sockets; the caller holds the lock.  What arrives on ``wake_fd`` only
        ends a wait.  Raises zmq.ZMQError."""
        for socket in (self._router, self._publisher):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
            socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(command_endpoint)
        self._publisher.bind(event_endpoint)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)

    def close(self) -> None:
        self._tables.close()
        self._router.close()
        self._publisher.close()
        self._context.term()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until ``stopping`` says so."""
        next_clock = self._clock()
        while not stopping():
            if self._clock() >= next_clock:
                next_clock = self._clock() + HEARTBEAT_SECONDS
                self._handle(*self._tables.look(), Clock())
            self._wait(next_clock - self._clock())

    def _wait(self, seconds: float) -> None:
        self._watch()
        ready = dict(self._poller.poll(max(0, int(seconds * 1000) + 1)))
        if self._router in ready:
            self._receive()
        # What the dead had sent before is handled first, then their deaths.
        readable = {source for source in ready if source in self._watched}
        if readable:
            self._handle(*self._tables.news(readable))

    def _watch(self) -> None:
        """Poll exactly the connections that there are."""
        present = {connection.fileno() for connection in self._tables.connections()}
        for gone in self._watched - present:
            self._poller.unregister(gone)
        for new in present - self._watched:
            self._poller.register(new, zmq.POLLIN)
        self._watched = present

    def _receive(self) -> None:
        for _ in range(MAX_RECEIVED):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle(_read(frames))

    def _handle(self, *events: Event) -> None:
        """Let ``decide`` decide; actions may bring about further events."""
        self._events.extend(events)
        while self._events:
            for action in decide(self._state, self._events.popleft(), self._clock()):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Send(route, message):
                self._send(route, encode(message))
            case Publish(topic, message):
                self._publisher.send_multipart([topic, encode(message)])
            case Examine(peer, join):
                if (answer := self._tables.examine(peer, join)) is not None:
                    self._events.append(answer)
            case Forget(epoch):
                self._tables.forget(epoch)
            case SweepBits(bits):
                self._tables.sweep_bits(bits)
            case SweepFiles():
                self._sweep_files()
            case Log():
                logfmt.write(action)
            case _:
                raise AssertionError(f"no such action: {action}")

    def _send(self, route: bytes, frame: bytes) -> None:
        try:
            self._router.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # the engine has gone, or does not read
            logfmt.write(Log(logging.DEBUG, "unsent", {"route": route.hex(), "reason": exc}))


def _read(frames: list[zmq.Frame]) -> Event:
    """Return a message and its sender."""
    peer = Peer(frames[0].bytes, *_credentials(frames[-1]))
    if len(frames) != 2:
        return Garbled(peer, f"message of {len(frames) - 1} frames, wanted 1")
    frame = frames[1].bytes
    try:
        return Received(peer, decode_command(frame))
    except ProtocolError as exc:
        foreign = foreign_join(frame)
        return Garbled(peer, str(exc)) if foreign is None else Foreign(peer, foreign)


def _credentials(frame: zmq.Frame) -> tuple[int, int]:
    """Return uid and pid of the sender.  On ipc libzmq appends ``:uid:gid:pid``, as the
    kernel recorded them at connect, to the frame's Peer-Address."""
    try:
        _, uid, _, pid = str(frame.get("Peer-Address")).rsplit(":", 3)
        return int(uid), int(pid)
    except (zmq.ZMQError, ValueError):
        return -1, -1
