"""A client that gets no sockets, and when the thread of one that has them is woken."""

from __future__ import annotations

import logging
import os
import resource
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvshm.client import LATER_US, CoordinatorClient


class Silent:
    """A member of which nothing is asked: it never comes to that."""


@contextmanager
def descriptors(left: int) -> Iterator[None]:
    """As many as that can be opened, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_the_engine_serves_on_unshared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with descriptors(left=1):  # for the client's own wake-up
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
    assert "unshared" in caplog.text
    client.close()


class Listened:
    """A session of which other engines hear."""

    listened = True

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.rejoins = 0

    def send_events(self, records: bytes) -> None:
        self.sent.append(records)

    def rejoin(self) -> None:
        self.rejoins += 1


def test_events_wait_for_a_moment_and_are_sent_together_and_a_rejoin_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step would else have the client's thread compete with what delivers its tokens."""
    woken: list[int] = []
    monkeypatch.setattr("kvshm._native.wake", lambda fd, microseconds: woken.append(microseconds))
    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    client = CoordinatorClient(tmp_path, "ns", Silent())  # type: ignore[arg-type]  # asked nothing
    session = Listened()
    client._session = session  # type: ignore[assignment]  # what of it is used
    for record in (b"a", b"b", b"c"):
        client.send_events(record)
    assert woken == [LATER_US]
    client._hand_over(session)  # type: ignore[arg-type]  # the same
    assert session.sent == [b"abc"]
    client.send_events(b"d")
    client.rejoin()
    client.send_events(b"e")
    assert woken == [LATER_US, LATER_US, 0]
    client._hand_over(session)  # type: ignore[arg-type]  # the same
    assert (session.sent, session.rejoins) == ([b"abc", b"d", b"e"], 1)
    client._wake(0)  # as leave does
    client._wake(LATER_US)  # of a batch that another thread was about to put: no later for that
    assert woken[3:] == [0, 0]
    client._hand_over(session)  # type: ignore[arg-type]  # the same
    client.send_events(b"f")
    assert woken[-1] == LATER_US
    client.close()


def test_what_has_woken_the_thread_wakes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer that stays readable has the thread spin."""
    monkeypatch.setattr(CoordinatorClient, "_run", lambda self, session: None)
    client = CoordinatorClient(tmp_path, "ns", Silent())  # type: ignore[arg-type]  # asked nothing
    client._wake(0)
    poll = select.poll()
    poll.register(client._wake_fd, select.POLLIN)
    assert poll.poll(60_000)
    client._hand_over(Listened())  # type: ignore[arg-type]  # what of it is used
    assert poll.poll(0) == []
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
    assert woken == [LATER_US, 0]
    run(client, session)  # type: ignore[arg-type]  # the same
    assert session.sent == [b"last", b"closed"]


class Leaving(Listened):
    """A session that notes when it is closed."""

    def open(self, *given: object) -> None: ...

    def close(self) -> None:
        self.sent.append(b"closed")
