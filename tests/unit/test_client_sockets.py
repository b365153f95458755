"""A client that gets no sockets, and when the thread of one that has them is woken."""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kvshm import _native
from kvshm._base.rundir import event_endpoint
from kvshm._base.timing import TIMING, Timing
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.coordinator_session import CoordinatorSession
from kvshm._node.event_order import MAX_KEPT_BYTES
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    EngineEvents,
    EngineSuspected,
    Joined,
    broadcast_frame,
    encode,
)
from kvshm._node.updates import EventBatches, Update

from .exporters import Clock
from .few_descriptors import descriptors
from .test_missing_coordinator import INFO

LATER = round(TIMING.send_delay_seconds * 1e6)


PATIENCE_MS = 100_000


class Silent:
    """An engine of which nothing is asked: it never comes to that."""


@pytest.mark.parametrize("left", [2, 4, 6, 12])
def test_without_descriptors_the_engine_serves_on_unshared(
    left: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with descriptors(left):  # two are for the client's own timers
        client = CoordinatorClient(tmp_path, "ns", Silent())  # type: ignore[arg-type]  # asked nothing
        thread = client._thread
        assert thread is not None
        thread.join(60)
    assert not thread.is_alive()
    for _ in range(100):
        client.rejoin()
        client.send_events(bytes(48))
    assert not client._outbox
    assert not client.is_member
    assert "ulimit -n" in caplog.text, "and libzmq has not ended this process"
    assert "unshared" in caplog.text
    client.close()


def timers_of(client: CoordinatorClient) -> set[int]:
    """What the thread finds readable when it is woken."""
    return {client._wake_now, client._wake_later}


class Listened:
    """A session of which other engines hear."""

    has_listeners = True

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.awaited: list[bool] = []
        self.heard_at = -math.inf
        self.rejoins = 0

    def send_events(self, records: bytes, awaited: bool) -> None:
        self.sent.append(records)
        self.awaited.append(awaited)

    def rejoin(self) -> None:
        self.rejoins += 1


def test_events_wait_for_a_moment_and_are_sent_together_and_a_rejoin_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    monkeypatch.setattr("kvshm._native.wake", lambda fd, microseconds: woken.append(microseconds))
    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    client = CoordinatorClient(tmp_path, "ns", Silent(), clock=Clock())  # type: ignore[arg-type]  # asked nothing
    session = Listened()
    client._session = session  # type: ignore[assignment]  # what of it is used
    session.heard_at = client._clock()
    for record in (b"a", b"b", b"c"):
        client.send_events(record)
    assert woken == [LATER]
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    assert session.sent == [b"abc"]
    client.send_events(b"d")
    client.rejoin()
    client.send_events(b"e")
    assert woken == [LATER, LATER, 0]
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    assert (session.sent, session.rejoins) == ([b"abc", b"d", b"e"], 1)
    client.send_events(b"f")
    assert woken == [LATER, LATER, 0, LATER]
    client.close()


def test_events_for_which_another_engine_waits_do_not_wait_for_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    monkeypatch.setattr("kvshm._native.wake", lambda fd, microseconds: woken.append(microseconds))
    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    client = CoordinatorClient(tmp_path, "ns", Silent())  # type: ignore[arg-type]  # asked nothing
    session = Listened()
    client._session = session  # type: ignore[assignment]  # what of it is used
    session.heard_at = client._clock()
    client.send_soon()  # nothing is there yet
    client.send_events(b"a")
    client.send_events(b"b")  # the thread is about to wake up, and takes this along
    assert woken == [0]
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    assert (session.sent, session.awaited) == ([b"ab"], [True])
    client.send_events(b"c")
    client.send_soon()  # now something waits
    assert woken == [0, LATER, 0]
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    client.send_events(b"d")  # for this the other engine waits, too
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    client.send_events(b"e")
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    assert session.sent == [b"ab", b"c", b"d", b"e"]
    assert session.awaited == [True, True, True, False]
    client.close()


def test_events_go_at_once_where_the_thread_has_rested_and_so_it_wakes_no_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    monkeypatch.setattr("kvshm._native.wake", lambda fd, microseconds: woken.append(microseconds))
    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    clock = Clock()
    client = CoordinatorClient(tmp_path, "ns", Silent(), clock=clock)  # type: ignore[arg-type]  # asked nothing
    session = Listened()
    client._session = session  # type: ignore[assignment]  # what of it is used
    client.send_events(b"a")
    client.send_events(b"b")  # before the thread has run
    assert woken == [0]
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    assert (session.sent, session.awaited) == ([b"ab"], [False])
    clock.now += 0.9 * TIMING.send_delay_seconds
    client.send_events(b"so soon")
    assert woken.pop() == LATER
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    clock.now += 0.9 * TIMING.send_delay_seconds
    client._hand_over(session)  # type: ignore[arg-type]  # a tick, or the heartbeat is due
    session.heard_at = clock.now  # others' events came
    clock.now += 0.9 * TIMING.send_delay_seconds
    client.send_events(b"c")
    clock.now += 0.2 * TIMING.send_delay_seconds
    client.send_events(b"d")  # it is about to wake up
    assert woken == [0, LATER]
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    clock.now += 1.1 * TIMING.send_delay_seconds
    client._hand_over(session)  # type: ignore[arg-type]  # a tick: nothing of anybody
    client.send_events(b"e")
    assert woken == [0, LATER, 0]
    client.close()


@pytest.mark.parametrize("urgent", [CoordinatorClient.leave, CoordinatorClient.rejoin])
def test_a_batch_does_not_put_off_an_engine_that_leaves_or_rejoins(
    urgent: Callable[[CoordinatorClient], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake = _native.wake

    def stopped(fd: int, microseconds: int) -> None:
        monkeypatch.setattr(_native, "wake", wake)
        urgent(client)
        wake(fd, microseconds)

    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    client = CoordinatorClient(tmp_path, "ns", Silent(), timing=Timing(send_delay_seconds=3600.0))  # type: ignore[arg-type]  # asked nothing
    session = Opened()
    client._session = session  # type: ignore[assignment]  # what of it is used
    assert client._open(session)  # type: ignore[arg-type]  # the same
    monkeypatch.setattr(_native, "wake", stopped)
    client.send_events(b"a")
    assert session.poll.poll(10_000)
    client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
    assert session.sent == [b"a"]
    assert session.poll.poll(0) == []  # else the thread would spin
    client.close()


def test_what_has_woken_the_thread_wakes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer that stays readable has the thread spin."""
    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    client = CoordinatorClient(tmp_path, "ns", Silent())  # type: ignore[arg-type]  # asked nothing
    session = Opened()
    client._session = session  # type: ignore[assignment]  # what of it is used
    assert client._open(session)  # type: ignore[arg-type]  # the same
    for put in (client.rejoin, lambda: client.send_events(b"a")):
        put()
        assert session.poll.poll(60_000)
        client._hand_over(session, timers_of(client))  # type: ignore[arg-type]  # the same
        assert session.poll.poll(0) == []
    client.close()


def test_who_leaves_wakes_the_thread_which_hands_over_what_is_queued_and_then_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[int] = []
    run = CoordinatorClient._run
    monkeypatch.setattr("kvshm._native.wake", lambda fd, microseconds: woken.append(microseconds))
    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    client = CoordinatorClient(tmp_path, "ns", Silent())  # type: ignore[arg-type]  # asked nothing
    session = Leaving()
    client._session = session  # type: ignore[assignment]  # what of it is used
    client.send_events(b"last")
    client.leave()
    assert woken == [0, 0]
    run(client, session)  # type: ignore[arg-type]  # the same
    assert session.sent == [b"last", b"closed"]


class Opened(Listened):
    def open(self, wake_fds: Collection[int], hand_over: object) -> None:
        self.poll = select.poll()
        for fd in wake_fds:
            self.poll.register(fd, select.POLLIN)


class Leaving(Listened):
    def open(self, *given: object) -> None: ...

    def close(self) -> None:
        self.sent.append(b"closed")


JOINED = Joined(
    protocol=PROTOCOL_VERSION, coordinator_epoch=1, engine_epoch=1, lease_bit=0, sequence=0,
    roster=[INFO], sequences={INFO.epoch: 0}, suspected=[], incompatible=[],
)  # fmt: skip


def test_events_are_passed_on_before_more_wait_than_are_kept(tmp_path: Path) -> None:
    """Else whoever hears of very many keeps them all until it has read the last."""
    heard: list[Update] = []
    handler = SimpleNamespace(apply=heard.append)
    session = CoordinatorSession(tmp_path, "ns", handler, Clock(), lambda: 1.0)  # type: ignore[arg-type]  # what of it is called
    session._on_joined(JOINED, 0.0)
    session._pass_on()
    assert session.heard_at < 0, "no events yet"
    heard.clear()
    for number, size in enumerate((1, MAX_KEPT_BYTES, 1), start=1):
        numbers = {"coordinator_epoch": 1, "sequence": number, "engine_sequence": number}
        session._follow(EngineEvents(**numbers, epoch=INFO.epoch, records=bytes(size)))
    assert [news.batches for news in heard if isinstance(news, EventBatches)] == [
        [(INFO.epoch, bytes(1)), (INFO.epoch, bytes(MAX_KEPT_BYTES))]
    ]
    assert session.heard_at == session._clock(), "so the own events may wait for the next ones"


def test_what_has_arrived_outlives_the_connection(tmp_path: Path) -> None:
    """With the option IMMEDIATE libzmq would drop it, and abort in the middle of a message."""
    session = CoordinatorSession(tmp_path, "ns", Silent(), Clock(), lambda: 1.0)  # type: ignore[arg-type]  # asked nothing
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(event_endpoint(tmp_path, "ns"))
        session.open((), lambda: None)
        received = session._sockets._broadcasts
        received.setsockopt(zmq.SUBSCRIBE, INFO.fingerprint)
        assert publisher.poll(PATIENCE_MS)
        publisher.recv()
        monitor = received.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for _ in range(100):
            publisher.send(broadcast_frame(INFO.fingerprint, []))
    assert monitor.poll(PATIENCE_MS)
    monitor.recv_multipart()
    received.disable_monitor()
    arrived = 0
    while received.poll(0):
        received.recv(zmq.NOBLOCK)
        arrived += 1
    assert arrived == 100
    session._sockets._context.destroy(linger=0)


def test_a_broadcast_of_an_earlier_topic_tells_the_engine_nothing(tmp_path: Path) -> None:
    """It may still be queued when the engine has subscribed to another one, which counts anew."""
    heard: list[Update] = []
    handler = SimpleNamespace(apply=heard.append)
    clock = Clock()
    session = CoordinatorSession(tmp_path, "ns", handler, clock, lambda: 1.0)  # type: ignore[arg-type]  # it has the methods that are called
    session._sockets.topic = INFO.fingerprint
    session._on_joined(JOINED, 0.0)
    session._pass_on()
    heard.clear()
    joined_at = session._due.last_heard
    clock.now += 1.0
    reported = encode(EngineSuspected(coordinator_epoch=1, sequence=1, epoch=INFO.epoch))
    session._on_broadcast(broadcast_frame(bytes(32), [reported]))
    session._pass_on()
    assert (heard, session._due.last_heard) == ([], joined_at)
    session._on_broadcast(broadcast_frame(INFO.fingerprint, [reported]))
    session._pass_on()
    assert len(heard) == 1


def test_a_coordinator_is_not_lost_while_the_machine_was_suspended(tmp_path: Path) -> None:
    """It was suspended as well, and goes on with this engine in its roster."""
    clock = Clock()

    def suspended(milliseconds: int) -> list[tuple[object, int]]:
        clock.now += milliseconds / 1000 + TIMING.silence_seconds
        return []

    nothing = SimpleNamespace(
        **dict.fromkeys(("apply", "beat", "describe", "scan_again"), lambda *_: None)
    )
    session = CoordinatorSession(tmp_path, "ns", nothing, clock, lambda: 1.0)  # type: ignore[arg-type]  # it has the methods that are called
    session.open((), lambda: None)
    session._state = type(session._state).JOINING
    session._on_joined(JOINED, clock())
    session._sockets._poller.poll = suspended  # type: ignore[assignment,method-assign]  # is called as poll is
    for _ in range(3):
        session.wait()
        session.work()
        assert session.is_member
    session._due.last_heard -= TIMING.silence_seconds
    session.work()
    assert not session.is_member, "it was silent for so long"
    session.close()
