"""An engine's connection to the coordinator: one thread that owns every socket.

The scheduler's thread only puts batches of events into a queue; it never waits for the coordinator
and sees none of its errors.  Messages of the coordinator reach the engine through an
``UpdateHandler``, whose methods all run on the client's thread.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from kvshm import _native
from kvshm._base.core_lines import CoreLine
from kvshm._base.forks import guard_forks
from kvshm._base.log import logger
from kvshm._base.resources import start_thread
from kvshm._base.timing import TIMING, Timing
from kvshm._shm.fds import close_all
from kvshm._shm.layout import RECORD_BYTES
from kvshm._shm.statistics import EVENTS_DROPPED, EVENTS_UNHEARD
from kvshm.errors import KvshmError

from .coordinator_session import CoordinatorSession
from .protocol import MAX_EVENTS_BYTES
from .updates import UpdateHandler

MAX_QUEUED = 4096
"""Batches of events that may wait for the client's thread; further batches are dropped."""
MAX_JOINED_BYTES = MAX_EVENTS_BYTES // RECORD_BYTES * RECORD_BYTES
"""Longest message into which batches that wait together are joined."""
_OWN_RANDOM = random.Random()
"""Not Python's own generator, which the program may have seeded."""

_log = logger(__name__)


class _Awaited(bytes):
    """A batch of events for which another engine waits; empty: the batches before it are."""


class _NotQueued:
    """Batches that were not queued: counted by the sending thread, reported by the client's."""

    def __init__(self) -> None:
        self.count = self._reported = 0

    def since_report(self) -> int:
        """How many since the last call."""
        since = self.count - self._reported
        self._reported += since
        return since


class CoordinatorClient:
    """Keeps this engine in the roster, from construction until ``close``.  Any thread may call.
    Only ``leave`` and ``close`` block, with a bound; only the constructor raises.  In a forked
    child the methods do nothing."""

    def __init__(
        self,
        run_dir: Path,
        namespace: str,
        handler: UpdateHandler,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = _OWN_RANDOM.random,
        timing: Timing = TIMING,
    ) -> None:
        """Raises KvshmError, leaving nothing open, if no descriptors or threads are left."""
        self._timing = timing
        self._clock = clock
        self._outbox: deque[bytes | None] = deque()
        """Batches of events; None stands for ``rejoin``."""
        timers = _open_timers()
        self._wake_now, self._wake_later = timers
        """Two timers, because setting a timer cancels its earlier setting: a batch would delay the
        ``leave`` or ``rejoin`` of another thread."""
        self._close_timers = weakref.finalize(self, close_all, timers)
        self._close_timers.atexit = False
        self._send_soon = False
        """Whether another engine waits for the next events."""
        self._sent_at = -math.inf
        """When the client's thread last found events in the outbox, by ``clock``."""
        self._will_wake = False
        """Whether the client's thread will wake up and read the outbox."""
        self._closing = threading.Event()
        self._usable = True
        self._overflows = _NotQueued()
        self._unheard = _NotQueued()
        """Because no peer is known."""
        self._session: CoordinatorSession | None = CoordinatorSession(
            run_dir, namespace, handler, clock, jitter, timing
        )
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(self._session,), name="kvshm-client", daemon=True
        )
        guard_forks(self)
        try:
            start_thread(self._thread)
        except KvshmError:
            self._close_timers()
            raise

    def send_events(self, records: bytes) -> None:
        """Queue one step's packed records, after the slots have changed: if the batch is dropped,
        and if there are no peers yet, these scan the slot table instead."""
        session = self._session
        if session is not None and not session.has_listeners:
            self._unheard.count += 1
            return
        if len(self._outbox) >= MAX_QUEUED:
            self._overflows.count += 1
            return
        if self._send_soon:
            self._send_soon = False
            self._put(_Awaited(records), at_once=True)
        else:
            self._put(records, at_once=self._has_rested())

    def send_soon(self) -> None:
        """Send the events that are queued, and the next batch, without waiting for more of them,
        and have the coordinator wait less: another engine waits for these.  The thread that calls
        ``send_events``."""
        self._send_soon = True
        if self._outbox:
            self._put(_Awaited(), at_once=True)

    def _has_rested(self) -> bool:
        """Whether the client's thread is not about to wake up, and has neither sent nor received
        events for as long as events wait: then it is woken at once, which is no more often than if
        they waited."""
        session = self._session
        if self._will_wake or session is None:
            return False
        last = max(self._sent_at, session.heard_at)
        return self._clock() - last >= self._timing.send_delay_seconds

    def rejoin(self) -> None:
        """The engine's cache has begun a new epoch: leave with the old epoch and join with the
        description that ``describe`` returns now.  Events queued before belong to the old epoch."""
        self._put(None, at_once=True)

    def leave(self, timeout: float = 0.0) -> None:
        """Leave the node and end the thread; waits at most ``timeout`` seconds.  Idempotent."""
        self._closing.set()
        self._wake(at_once=True)
        thread = self._thread
        if timeout and thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """As ``leave``, and say so in the log if the thread has not ended."""
        self.leave(timeout)
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if thread.is_alive():
            _log.line(CoreLine.CLIENT_NOT_ENDED, timeout)

    @property
    def is_member(self) -> bool:
        """Whether the coordinator has this engine in its roster, as far as known."""
        return self._session is not None and self._session.is_member

    def _put(self, item: bytes | None, at_once: bool) -> None:
        if self._usable and not self._closing.is_set():
            self._outbox.append(item)
            if at_once or not self._will_wake:
                self._wake(at_once)

    def _wake(self, at_once: bool) -> None:
        if not self._usable:
            return
        self._will_wake = True
        later_us = round(self._timing.send_delay_seconds * 1e6)
        _native.wake(*(self._wake_now, 0) if at_once else (self._wake_later, later_us))

    def forget_in_child(self) -> None:
        """Drop the sockets and the thread, which belong to the parent (kvshm/_base/forks.py)."""
        self._usable = False
        self._thread = self._session = None
        self._outbox.clear()

    # -- on the client's thread

    def _run(self, session: CoordinatorSession) -> None:
        if not self._open(session):
            return
        while not self._closing.is_set():
            try:
                readable = session.wait()
                self._hand_over(session, readable)
                session.work()
            except Exception:  # a bug must not end the thread or use up a core
                session.guard.log_failure("client's thread", exc_info=True)
                self._closing.wait(self._timing.bug_pause_seconds)
        self._hand_over(session)
        session.close()

    def _open(self, session: CoordinatorSession) -> bool:
        """Open the sockets; whether that succeeded.  Without sockets (no descriptors are left) the
        engine serves on, unshared, and nothing is queued."""
        try:
            timers = self._wake_now, self._wake_later
            session.open(timers, lambda: self._hand_over(session))
        except Exception as exc:  # whatever it is, the engine serves without kvshm
            self._usable = False
            _log.line(CoreLine.NO_CLIENT_SOCKETS, exc)
        return self._usable

    def _hand_over(self, session: CoordinatorSession, readable: Collection[object] = ()) -> None:
        """Send what other threads have queued so far, in few messages: each one releases the GIL,
        which a busy thread returns late.  Clears the timers among ``readable``."""
        for timer in (self._wake_now, self._wake_later):
            if timer in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(timer, 8)
        self._will_wake = False  # before the queue is read
        # First, so that the messages sent below show the gap.
        if unheard := self._unheard.since_report():
            session.skip_events(unheard, EVENTS_UNHEARD)
        waiting = len(self._outbox)
        if waiting:
            self._sent_at = self._clock()
        while waiting:
            batches = _next_message(self._outbox, waiting)
            waiting -= len(batches) or 1
            if batches:
                records = b"".join(batches)
                awaited = any(type(batch) is _Awaited for batch in batches)
                for start in range(0, len(records), MAX_JOINED_BYTES):
                    session.send_events(records[start : start + MAX_JOINED_BYTES], awaited)
            else:
                self._outbox.popleft()
                session.rejoin()
        if lost := self._overflows.since_report():
            session.skip_events(lost, EVENTS_DROPPED)


def _open_timers() -> list[int]:
    """Return two timer descriptors, which wake the client's thread.  Raises KvshmError."""
    timers: list[int] = []
    try:
        for _ in range(2):
            timers.append(_native.timer())
    except OSError as exc:
        close_all(timers)
        raise KvshmError(
            f"no timer can be opened: {exc.strerror}; raise the limit of open files (ulimit -n)"
        ) from exc
    return timers


def _next_message(queued: deque[bytes | None], limit: int) -> list[bytes]:
    """Take the first batches off the queue: as many as one message holds, at least one and at most
    ``limit``; none if a ``rejoin`` is first."""
    batches: list[bytes] = []
    size = 0
    while len(batches) < limit and (batch := queued[0]) is not None:
        size += len(batch)
        if batches and size > MAX_JOINED_BYTES:
            break
        batches.append(batch)
        queued.popleft()
    return batches
