"""The shell: sockets, pidfds and the clock.  It tells ``decide`` what happened and does what
``decide`` says."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable

import zmq

from kvshm.errors import ProtocolError
from kvshm.protocol import (
    HEARTBEAT_SECONDS,
    MAX_RECEIVED_BYTES,
    QUEUE_FRAMES,
    decode_command,
    encode,
    foreign_join,
)
from kvshm.segment import identity_of, is_dead

from . import logfmt
from .actions import (
    Action,
    Clock,
    Died,
    EndLife,
    Event,
    Examine,
    Examined,
    Foreign,
    Garbled,
    Log,
    Peer,
    Process,
    Publish,
    Received,
    Send,
    SweepBits,
    SweepLeftovers,
    SweepProcess,
    UnlinkEpoch,
    Unwatch,
    Watch,
    WriteLease,
)
from .broadcasts import Broadcasts
from .lease_table import LeaseTable
from .reaper import Reaper
from .roster import State
from .state import decide

MAX_RECEIVED = 1000
"""Messages taken before deaths and the clock are looked after."""


class Server:
    """One coordinator at work.  Used by one thread."""

    def __init__(
        self,
        state: State,
        leases: LeaseTable,
        reaper: Reaper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._leases = leases
        self._reaper = reaper
        self._clock = clock
        self._events: deque[Event] = deque()
        self._pidfds: dict[Process, int] = {}
        self._unwatchable: set[Process] = set()
        """Processes that have no pidfd: looked at with each tick of the clock."""
        self._unwatchable_logged = False
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._publisher = self._context.socket(zmq.PUB)
        self._broadcasts = Broadcasts(self._publisher.send)
        self._poller = zmq.Poller()

    def open(self, command_endpoint: str, event_endpoint: str, wake_fd: int) -> None:
        """Bind the sockets; the caller holds the lock.  What arrives on ``wake_fd`` only
        ends a wait.  Raises zmq.ZMQError."""
        for socket in (self._router, self._publisher):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
            socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.bind(command_endpoint)
        self._publisher.bind(event_endpoint)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(wake_fd, zmq.POLLIN)

    def close(self) -> None:
        for process in [*self._pidfds, *self._unwatchable]:
            self._unwatch(process)
        self._router.close()
        self._publisher.close()
        self._context.term()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until ``stopping`` says so."""
        for action in self._state.watch():
            self._perform(action)
        next_clock = self._clock()
        while not stopping():
            if self._clock() >= next_clock:
                next_clock = self._clock() + HEARTBEAT_SECONDS
                self._look_at_unwatchable()
                self._handle(Clock())
            self._wait(min(next_clock, self._broadcasts.next_due()) - self._clock())
            self._broadcasts.send_due(self._clock())

    def _wait(self, seconds: float) -> None:
        ready = dict(self._poller.poll(max(0, int(seconds * 1000) + 1)))
        if self._router in ready:
            self._receive()
        # What the dead had sent before is handled first, then their deaths.
        for process, pidfd in list(self._pidfds.items()):
            if pidfd in ready:
                self._unwatch(process)
                self._handle(Died(process))

    def _receive(self) -> None:
        for _ in range(MAX_RECEIVED):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._handle(_read(frames))

    def _handle(self, event: Event) -> None:
        """Let ``decide`` decide; actions may bring about further events."""
        self._events.append(event)
        while self._events:
            for action in decide(self._state, self._events.popleft(), self._clock()):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Send(route, message):
                self._send(route, encode(message))
            case Publish(topic, message):
                self._broadcasts.add(topic, message, self._clock())
            case Examine(peer, join):
                refusal = self._reaper.examine(join.engine)
                self._events.append(Examined(peer, join, refusal))
            case Watch(process):
                self._watch(process)
            case Unwatch(process):
                self._unwatch(process)
            case WriteLease(bit, owner):
                self._leases.write(bit, owner)
            case Log():
                logfmt.write(action)
            case _:
                self._sweep(action)

    def _sweep(self, action: Action) -> None:
        match action:
            case EndLife(table):
                self._reaper.end_life(table)
            case SweepBits(bits):
                self._reaper.sweep_bits(bits)
            case UnlinkEpoch(table, epoch):
                self._reaper.unlink_epoch(table, epoch)
            case SweepProcess(process):
                self._reaper.sweep_process(process)
            case SweepLeftovers(keep):
                self._reaper.sweep_leftovers(keep)
            case _:
                raise AssertionError(f"no such action: {action}")

    def _send(self, route: bytes, frame: bytes) -> None:
        try:
            self._router.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.ZMQError as exc:  # the engine has gone, or does not read
            logfmt.write(Log(logging.DEBUG, "unsent", {"route": route.hex(), "reason": exc}))

    def _watch(self, process: Process) -> None:
        """Open a pidfd, and make sure that it is that process's and not a successor's.

        Only that there is no such process is its death: with descriptors short, or pidfds
        forbidden, it is looked at now and then instead.
        """
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._events.append(Died(process))
            return
        except OSError as exc:
            self._watch_without(process, exc)
            return
        self._pidfds[process] = pidfd
        if _has_ended(process):
            self._unwatch(process)
            self._events.append(Died(process))
        else:
            self._poller.register(pidfd, zmq.POLLIN)

    def _watch_without(self, process: Process, why: OSError) -> None:
        self._unwatchable.add(process)
        if not self._unwatchable_logged:
            self._unwatchable_logged = True
            remedy = "permit pidfd_open, and more open files (ulimit -n)"
            about: dict[str, object] = {"pid": process.pid, "reason": why, "remedy": remedy}
            logfmt.write(Log(logging.WARNING, "looks-for-deaths-each-second", about))

    def _look_at_unwatchable(self) -> None:
        for process in list(self._unwatchable):
            if _has_ended(process):
                self._unwatchable.discard(process)
                self._handle(Died(process))

    def _unwatch(self, process: Process) -> None:
        self._unwatchable.discard(process)
        pidfd = self._pidfds.pop(process, None)
        if pidfd is None:
            return
        if pidfd in self._poller:
            self._poller.unregister(pidfd)
        os.close(pidfd)


def _has_ended(process: Process) -> bool:
    """Whether the process is known to have ended; what cannot be read is no death."""
    try:
        return is_dead(identity_of()._replace(pid=process.pid, start_time=process.start_time))
    except OSError:
        return False


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
