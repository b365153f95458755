"""The shell around ``decide``: sockets, the clock, and the actions to carry out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import zmq

from kvshm._node.protocol import MAX_COMMAND_BYTES, decode_command, encode, foreign_join
from kvshm.errors import KvshmError, ProtocolError

from . import logfmt
from .actions import (
    Action,
    BadMessage,
    CheckResult,
    CheckTable,
    ClockTick,
    EngineMessage,
    Input,
    Log,
    Refusal,
    ReleaseTable,
    SendBroadcast,
    Sender,
    SendReply,
    SweepBits,
    SweepFiles,
)
from .bounds import Bounds
from .broadcasts import BroadcastQueue
from .incoming import MessageReader
from .log_lines import RETRIED, Event
from .roster import State
from .sockets import Sockets
from .state import decide
from .tables import Tables

MAX_RECEIVED = 2000
"""Parts of messages taken before deaths and the clock are looked after."""


class Server:
    """One coordinator, used by one thread."""

    def __init__(
        self,
        state: State,
        tables: Tables,
        sweep_files: Callable[[], None],
        keep_lock: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        bounds: Bounds | None = None,
    ) -> None:
        """``sweep_files`` removes the files of dead processes from the run directory, ``keep_lock``
        makes the lock file again if it was removed.  Without ``bounds`` there are none."""
        self._state = state
        self._tables = tables
        self._sweep_files = sweep_files
        self._keep_lock = keep_lock
        self._clock = clock
        self._inputs: deque[Input] = deque()
        self._watched: set[int] = set()
        self._failed: set[tuple[str, object]] = set()
        """Failures that were logged: the action, and the number of the error."""
        self._sockets = Sockets()
        self._bounds = bounds
        self._reader = MessageReader()
        self._broadcasts = BroadcastQueue(self._send_broadcast, state.timing)

    def open(self, command_endpoint: str, event_endpoint: str, wake_fd: int) -> None:
        """Let engines connect; input on ``wake_fd`` only ends a wait.  Raises RunDirectoryError."""
        self._sockets.open(command_endpoint, event_endpoint)
        self._sockets.poller.register(wake_fd, zmq.POLLIN)

    def close(self) -> None:
        self._tables.close()
        self._sockets.close()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until ``stopping`` returns True.  Raises Exhausted, or another KvshmError when
        engines cannot find the sockets any more."""
        timing, next_clock = self._state.timing, self._clock()
        next_look = next_clock
        while not stopping():
            if self._clock() >= next_clock:
                grace_over = self._state.schedule.grace_over
                pause = timing.heartbeat_seconds if grace_over else timing.return_tick_seconds
                next_clock = self._clock() + pause
                self._sockets.check()
                self._check_lock()
                self._handle(*self._tables.look(), ClockTick())
            if self._clock() >= next_look:
                next_look = self._clock() + timing.bounds_check_seconds
                self._check_bounds()
            due = min(next_clock, next_look, self._broadcasts.next_due())
            self._wait(due - self._clock())
            self._broadcasts.send_due(self._clock())

    def _wait(self, seconds: float) -> None:
        self._watch()
        ready = dict(self._sockets.poller.poll(max(0, int(seconds * 1000) + 1)))
        if self._sockets.have_accepted():
            self._check_bounds()
        if self._sockets.router in ready:
            self._receive()
        # A dead engine's last messages are handled before its death.
        readable = {source for source in ready if source in self._watched}
        if readable:
            self._handle(*self._tables.read(readable))

    def _check_bounds(self) -> None:
        self._sockets.turn()
        if self._bounds is not None:
            self._bounds.check()

    def _watch(self) -> None:
        present = {connection.fileno() for connection in self._tables.connections()}
        for gone in self._watched - present:
            self._sockets.poller.unregister(gone)
        for new in present - self._watched:
            self._sockets.poller.register(new, zmq.POLLIN)
        self._watched = present

    def _receive(self) -> None:
        for _ in range(MAX_RECEIVED):
            try:
                message = self._reader.receive(self._sockets.router)
            except zmq.Again:
                return
            if message is not None:
                self._handle(_read(*message))
            if self._sockets.have_accepted():  # the bounds come first: messages may have no end
                return

    def _handle(self, *inputs: Input) -> None:
        self._inputs.extend(inputs)
        while self._inputs:
            for action in self._decide(self._inputs.popleft()):
                self._perform(action)

    def _decide(self, item: Input) -> list[Action]:
        try:
            return decide(self._state, item, self._clock())
        except Exception as exc:  # a bug must not end the coordinator
            self._log_failure(type(item).__name__, exc)
            return []

    def _perform(self, action: Action) -> None:
        """Carry out an action; an error costs this action only: the next sweep takes bits and
        leftovers of dead engines again."""
        try:
            self._do(action)
        except Exception as exc:  # a bug must not end the coordinator
            self._log_failure(type(action).__name__, exc)
            if isinstance(action, CheckTable):
                refusal = Refusal(f"the coordinator cannot look at it: {exc}", RETRIED, retry=True)
                self._inputs.append(CheckResult(action.sender, action.join, refusal))

    def _check_lock(self) -> None:
        try:
            self._keep_lock()
        except (KvshmError, OSError) as exc:  # the next second may have room, or descriptors
            self._log_failure("keep the lock", exc)

    def _log_failure(self, what: str, exc: Exception) -> None:
        """Log once for each kind of failure; a bug with its traceback."""
        kind = (what, getattr(exc, "errno", None) or type(exc).__name__)
        if kind in self._failed:
            return
        self._failed.add(kind)
        if isinstance(exc, KvshmError | OSError):
            logfmt.write(Event.FAILED, what=what, reason=exc)
        else:
            logfmt.write_bug(what, exc)

    def _do(self, action: Action) -> None:
        match action:
            case SendReply(route, message):
                self._send(route, encode(message))
            case SendBroadcast(topic, message, awaited):
                self._broadcasts.add(topic, message, self._clock(), awaited)
            case CheckTable(sender, join):
                if (answer := self._tables.check(sender, join)) is not None:
                    self._inputs.append(answer)
            case ReleaseTable(epoch):
                self._tables.release(epoch)
            case SweepBits(bits):
                self._tables.sweep_bits(bits)
            case SweepFiles():
                self._sweep_files()
            case Log(event, fields):
                logfmt.write(event, **fields)
            case _:
                raise AssertionError(f"no such action: {action}")

    def _send_broadcast(self, frame: bytes) -> None:
        self._sockets.publisher.send(frame)  # another socket from time to time

    def _send(self, route: bytes, frame: bytes) -> None:
        try:
            self._sockets.router.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # the engine has gone, or does not read
            logfmt.write(Event.UNSENT, route=route.hex(), reason=exc)


def _read(frames: list[zmq.Frame], num_parts: int) -> Input:
    sender = Sender(frames[0].bytes, *_credentials(frames[-1]))
    if num_parts != 2:
        return BadMessage(sender, f"message of {num_parts - 1} frames, wanted 1")
    if (size := len(frames[1])) > MAX_COMMAND_BYTES:
        return BadMessage(sender, f"message of {size} bytes, at most {MAX_COMMAND_BYTES} allowed")
    frame = frames[1].bytes
    try:
        return EngineMessage(sender, decode_command(frame))
    except ProtocolError as exc:
        return BadMessage(sender, str(exc), foreign_join(frame))


def _credentials(frame: zmq.Frame) -> tuple[int, int]:
    """Return uid and pid of the sender, which libzmq appends to the frame's Peer-Address."""
    try:
        _, uid, _, pid = str(frame.get("Peer-Address")).rsplit(":", 3)
        return int(uid), int(pid)
    except (zmq.ZMQError, ValueError):
        return -1, -1
