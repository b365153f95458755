"""An engine's two sockets to the coordinator: commands with their replies, and broadcasts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import zmq

from kvshm._base.resources import require_descriptors
from kvshm._base.rundir import command_endpoint, event_endpoint
from kvshm.errors import ProtocolError

from .protocol import MAX_RECEIVED_BYTES, QUEUE_FRAMES

LINGER_MS = 500
DESCRIPTORS = 24  # enough for a context with two sockets, and for the tables made after that
READABLE = int(zmq.POLLIN)  # to compare the enum takes longer than to read the option
MAX_RECEIVED = 1000
"""Frames taken from one socket before timers are checked."""


class CoordinatorSockets:
    """After construction for one thread only."""

    def __init__(
        self, run_dir: Path, namespace: str, reconnect_seconds: tuple[float, float]
    ) -> None:
        self._endpoints = command_endpoint(run_dir, namespace), event_endpoint(run_dir, namespace)
        self._reconnect_seconds = reconnect_seconds
        self._readable: Mapping[object, int] = {}
        self.topic = b""

    def open(self, wake_fds: Collection[int]) -> None:
        """Create and connect the sockets; a readable descriptor of ``wake_fds`` ends a ``wait``.
        Raises KvshmError or zmq.ZMQError, leaving nothing open."""
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
        shortest, longest = (max(1, round(1000 * time)) for time in self._reconnect_seconds)
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
        """Close everything; blocks for LINGER_MS at most."""
        self._commands.close()
        self._broadcasts.close(linger=0)
        self._context.term()

    def send(self, frame: bytes) -> bool:
        """Send a command.  False without a coordinator: a later ``wait`` notices the next one."""
        try:
            self._commands.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._poller.modify(self._commands, zmq.POLLIN | zmq.POLLOUT)
            return False
        return True

    def subscribe(self, topic: bytes) -> None:
        if topic == self.topic:
            return
        self._broadcasts.setsockopt(zmq.SUBSCRIBE, topic)
        if self.topic:
            self._broadcasts.setsockopt(zmq.UNSUBSCRIBE, self.topic)
        self.topic = topic

    def wait(self, seconds: float) -> bool:
        """Wait until something can be read, ``seconds`` at most.  Returns whether there is a
        coordinator again, after a ``send`` that failed."""
        self._readable = dict(self._poller.poll(math.ceil(seconds * 1000)))
        if not int(self._readable.get(self._commands, 0)) & zmq.POLLOUT:
            return False
        self._poller.modify(self._commands, zmq.POLLIN)
        return True

    @property
    def readable(self) -> Collection[object]:
        """The descriptors of ``wake_fds``, and sockets, that ended the last ``wait``."""
        return self._readable

    def replies(self) -> Iterator[bytes | ProtocolError]:
        return _received(self._commands) if self._commands in self._readable else iter(())

    def broadcasts(self) -> Iterator[bytes | ProtocolError]:
        return _received(self._broadcasts) if self._broadcasts in self._readable else iter(())


def _received(socket: zmq.Socket[bytes]) -> Iterator[bytes | ProtocolError]:
    """Yield the messages of a readable socket; an error for a message of several frames.  Each
    ``recv`` releases the GIL, which a busy thread returns only after its switch interval.
    Therefore ``recv`` is called only when a message is there."""
    for _ in range(MAX_RECEIVED):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) == 1:
            yield frames[0]
        else:
            yield ProtocolError(f"message of {len(frames)} frames, wanted 1")
        if not int(socket.get(zmq.EVENTS)) & READABLE:
            return
