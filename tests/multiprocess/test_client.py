"""The client against a real coordinator in a process of its own, and against a scripted one
that loses, repeats and forgets."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvshm.client import CoordinatorClient
from kvshm.protocol import (
    PROTOCOL_VERSION,
    AnyBroadcast,
    Command,
    EngineEvents,
    EngineGone,
    EngineInfo,
    EngineJoined,
    Events,
    Heartbeat,
    Join,
    Joined,
    JoinFirst,
    Leave,
    Message,
    Refused,
    Tick,
    decode_command,
    encode,
)
from kvshm.rundir import command_endpoint, event_endpoint

from .engines import FakeEngine
from .processes import PATIENCE_SECONDS, Node, fresh_node

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        yield node


# -- with the real coordinator


def test_two_engines_see_each_other_and_their_events(node: Node) -> None:
    node.coordinator()
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    a.heard("engine_joined", name="b")
    b.heard("engine_joined", name="a")
    a.do("publish", blocks=[1, 2])
    assert b.heard("engine_events")["blocks"] == [1, 2]
    b.do("publish", blocks=[3])
    assert a.heard("engine_events")["blocks"] == [3]
    assert not a.all_heard("rescan") + b.all_heard("rescan")


def test_late_joiner_finds_what_was_published_before(node: Node) -> None:
    node.coordinator()
    early = FakeEngine(node, "early")
    early.joined()
    early.do("publish", blocks=[7, 8])
    late = FakeEngine(node, "late")
    assert late.joined()["roster"] == ["early"]
    assert late.heard("engine_joined", name="early")["blocks"] == [7, 8]
    early.do("publish", blocks=[9])
    assert late.heard("engine_events")["blocks"] == [7, 8, 9]


def test_engines_may_come_before_the_coordinator(node: Node) -> None:
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    a.do("publish", blocks=[1])
    node.coordinator()
    assert b.heard("engine_joined", name="a")["blocks"] == [1]
    a.heard("engine_joined", name="b")


def test_killed_and_restarted_coordinator_costs_nothing(node: Node) -> None:
    first = node.coordinator()
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    bits = [engine.joined()["bit"] for engine in (a, b)]
    b.heard("engine_joined", name="a")
    a.do("publish", blocks=[1])
    b.heard("engine_events", blocks=[1])
    first.kill()
    a.do("publish", blocks=[2])  # sent to nobody
    marks = [a.mark(), b.mark()]
    node.coordinator()
    again = [e.joined(mark)["bit"] for e, mark in zip((a, b), marks, strict=True)]
    assert again == bits
    for engine, mark in zip((a, b), marks, strict=True):
        engine.heard("coordinator_lost", mark)
        assert len(engine.all_heard("coordinator_lost")) == 1
    found = b.process.wait_out(lambda line: '"blocks": [1, 2]' in line, marks[1])
    assert "engine_joined" in found or "rescan" in found
    a.do("publish", blocks=[3])
    b.heard("engine_events", marks[1], blocks=[1, 2, 3])
    assert not a.all_heard("engine_gone") + b.all_heard("engine_gone")


def test_silent_coordinator_is_lost_once_and_found_again(node: Node) -> None:
    coordinator = node.coordinator()
    a = FakeEngine(node, "a")
    a.joined()
    coordinator.signal(signal.SIGSTOP)
    a.heard("coordinator_lost")
    mark = a.mark()
    coordinator.signal(signal.SIGCONT)
    a.joined(mark)
    assert len(a.all_heard("coordinator_lost")) == 1


def test_new_epoch_keeps_the_bit_and_is_told(node: Node) -> None:
    node.coordinator()
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    old = a.joined()
    b.heard("engine_joined", name="a")
    mark_a, mark_b = a.mark(), b.mark()
    a.do("new-epoch")
    a.do("publish", blocks=[4])
    new = a.joined(mark_a)
    assert new["bit"] == old["bit"]
    assert b.heard("engine_gone", mark_b, epoch=old["epoch"])["reason"] == "left"
    b.heard("engine_joined", mark_b, epoch=new["epoch"])
    b.process.wait_out(lambda line: '"blocks": [4]' in line, mark_b)
    assert a.heard("engine_joined", mark_a)["name"] == "b"  # a new epoch knows nobody yet


def test_callback_that_raises_does_not_end_the_client(node: Node) -> None:
    node.coordinator()
    a = FakeEngine(node, "a")
    a.joined()
    a.do("fail", callback="engine_joined")
    b = FakeEngine(node, "b")
    b.heard("engine_joined", name="a")
    a.process.wait_err("callback engine_joined failed")
    assert a.do("errors")["count"] == 1
    a.do("publish", blocks=[1])
    b.heard("engine_events", blocks=[1])


def test_forked_child_leaves_the_client_alone(node: Node) -> None:
    node.coordinator()
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    b.heard("engine_joined", name="a")
    assert a.do("fork")["status"] == 0
    a.do("publish", blocks=[1])
    assert b.heard("engine_events")["blocks"] == [1]
    assert not b.all_heard("engine_gone")


# -- with a scripted coordinator


def engine_info(epoch: int, name: str = "x") -> EngineInfo:
    return EngineInfo(
        epoch=epoch,
        name=name,
        pid=1,
        start_time=1,
        fingerprint=b"f" * 32,
        fields={},
        table="",
        num_blocks=1,
        ranks=[],
    )


class Recorder:
    """A member that remembers its calls."""

    def __init__(self) -> None:
        self.epoch = 100
        self._calls: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()

    def describe(self) -> EngineInfo:
        return engine_info(self.epoch, "own")

    def __getattr__(self, name: str) -> Any:
        def record(*arguments: Any) -> None:
            with self._changed:
                self._calls.append((name, *arguments))
                self._changed.notify_all()

        record.__name__ = name
        return record

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        """What was called so far, beats and the reply of ``joined`` aside."""
        with self._changed:
            calls = [call for call in self._calls if call[0] != "beat"]
        return [call[:1] if call[0] == "joined" else call for call in calls]

    def wait(self, *call: Any) -> None:
        """Wait until it has been called like this."""
        with self._changed:
            reached = self._changed.wait_for(lambda: call in self._calls, PATIENCE_SECONDS)
        assert reached, f"{call} never came, only {self.calls}"


class Script:
    """Both sockets of a coordinator, and a client under test."""

    def __init__(self, run_dir: Path) -> None:
        self.member = Recorder()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._publisher = self._context.socket(zmq.XPUB)
        self._router.bind(command_endpoint(run_dir, "n"))
        self._publisher.bind(event_endpoint(run_dir, "n"))
        for socket in (self._router, self._publisher):
            socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
        self._route = b""
        self.client = CoordinatorClient(run_dir, "n", self.member, jitter=lambda: 1.0)
        assert self._publisher.recv() == b"\1" + b"f" * 32  # subscribed

    def close(self) -> None:
        self.client.close()
        self._context.destroy(linger=0)

    def receive(self) -> Command:
        self._route, frame = self._router.recv_multipart()
        return decode_command(frame)

    def expect(self, kind: type[Message]) -> Any:
        """Return the next command of a kind; heartbeats in between do not matter."""
        command = self.receive()
        while isinstance(command, Heartbeat) and kind is not Heartbeat:
            command = self.receive()
        assert isinstance(command, kind), command
        return command

    def answer(self, message: Message) -> None:
        self._router.send_multipart([self._route, encode(message)])

    def publish(self, message: AnyBroadcast) -> None:
        self._publisher.send_multipart([b"f" * 32, encode(message)])

    def joined(self, sequence: int = 0, coordinator: int = 1, **engines: int) -> Joined:
        """A reply; ``engines`` gives the sequence of each engine e<epoch>."""
        epochs = {int(name[1:]): heard for name, heard in engines.items()}
        return Joined(
            protocol=PROTOCOL_VERSION,
            coordinator_epoch=coordinator,
            engine_epoch=self.member.epoch,
            lease_bit=5,
            sequence=sequence,
            roster=[engine_info(epoch) for epoch in epochs],
            sequences=epochs,
            suspected=[],
            strangers=[],
        )

    def events(self, sequence: int, engine_sequence: int, records: bytes) -> EngineEvents:
        return EngineEvents(
            coordinator_epoch=1,
            sequence=sequence,
            epoch=7,
            engine_sequence=engine_sequence,
            records=records,
        )


@pytest.fixture
def script() -> Iterator[Script]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        script = Script(Path(directory))
        yield script
        script.close()


def test_broadcasts_up_to_the_roster_are_dropped(script: Script) -> None:
    script.expect(Join)
    for sequence in (1, 2, 3):
        script.publish(script.events(sequence, sequence, b"%d" % sequence))
    script.answer(script.joined(sequence=2, e7=2))
    script.member.wait("engine_events", 7, b"3")
    names = [call[0] for call in script.member.calls]
    assert names == ["joined", "engine_joined", "engine_events"]


def test_lost_broadcast_makes_it_join_again(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined(sequence=4, e7=1))
    script.member.wait("engine_joined", engine_info(7))
    script.publish(script.events(6, 3, b"late"))
    join = script.expect(Join)
    assert join.engine.lease_bit == 5
    assert script.client.is_member
    script.answer(script.joined(sequence=6, e7=3, e8=0))
    script.member.wait("rescan", 7)
    script.member.wait("engine_joined", engine_info(8))
    assert ("engine_events", 7, b"late") not in script.member.calls
    assert ("coordinator_lost",) not in script.member.calls


def test_lost_tail_shows_in_a_tick(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined(sequence=4, e7=1))
    script.member.wait("engine_joined", engine_info(7))
    script.publish(Tick(coordinator_epoch=1, sequence=5, sequences={7: 2}))
    script.expect(Join)


def test_events_an_engine_had_to_drop_make_one_rescan(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined(sequence=0, e7=1))
    script.publish(Tick(coordinator_epoch=1, sequence=0, sequences={7: 2}))
    script.member.wait("rescan", 7)
    script.publish(script.events(1, 4, b"4"))
    script.publish(script.events(2, 4, b"again"))
    script.publish(script.events(3, 5, b"5"))
    script.member.wait("engine_events", 7, b"5")
    assert script.member.calls[2:] == [
        ("rescan", 7),
        ("rescan", 7),
        ("engine_events", 7, b"4"),
        ("engine_events", 7, b"5"),
    ]


def test_events_wait_for_the_place_in_the_roster(script: Script) -> None:
    join = script.expect(Join)
    script.client.send_events(b"dropped")
    script.answer(script.joined())
    again = script.expect(Join)  # what was dropped has to be scanned by the others
    assert (join.sequence, again.sequence) == (0, 1)
    script.answer(script.joined())
    script.client.send_events(b"sent")
    assert script.expect(Events) == Events(epoch=100, sequence=2, records=b"sent")
    assert script.expect(Heartbeat).sequence == 2


def test_forgetful_coordinator_is_joined_again_once(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined(sequence=9, e7=1))
    script.expect(Heartbeat)
    for _ in range(3):  # one for each message that was on its way
        script.answer(JoinFirst(coordinator_epoch=2, engine_epoch=100))
    join = script.expect(Join)
    assert join.engine.lease_bit == 5
    script.answer(script.joined(coordinator=2))
    script.expect(Heartbeat)
    assert script.member.calls.count(("coordinator_lost",)) == 1
    assert ("engine_gone", 7, "no longer in the roster") not in script.member.calls


def test_gone_engine_and_its_late_events(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined(sequence=0, e7=0))
    script.publish(EngineGone(coordinator_epoch=1, sequence=1, epoch=7, reason="r"))
    script.publish(script.events(2, 1, b"ghost"))
    news = EngineJoined(coordinator_epoch=1, sequence=3, engine=engine_info(9), engine_sequence=0)
    script.publish(news)
    script.member.wait("engine_joined", engine_info(9))
    assert ("engine_gone", 7, "r") in script.member.calls
    assert ("engine_events", 7, b"ghost") not in script.member.calls


def test_new_epoch_leaves_with_the_old_one_first(script: Script) -> None:
    script.expect(Join)  # not answered: the coordinator may have taken it in all the same
    script.member.epoch = 101
    script.client.rejoin()
    assert script.expect(Leave).epoch == 100
    join = script.expect(Join)
    assert (join.engine.epoch, join.sequence) == (101, 0)


def test_refusal_is_told_once_and_a_new_epoch_tries_at_once(script: Script) -> None:
    refused = Refused(engine_epoch=100, reason="r", remedy="do", retry=True)
    for _ in range(2):
        script.expect(Join)
        script.answer(refused)
    script.expect(Join)
    assert script.member.calls == [("refused", refused)]
    script.answer(Refused(engine_epoch=100, reason="other", remedy="do", retry=False))
    script.member.epoch = 102
    script.client.rejoin()
    script.expect(Leave)
    assert script.expect(Join).engine.epoch == 102


def test_undecodable_messages_are_counted(script: Script) -> None:
    script.expect(Join)
    script._router.send_multipart([script._route, b"\xc1"])
    script._publisher.send_multipart([b"f" * 32, b"\xc1"])
    script._publisher.send_multipart([b"f" * 32, b"two", b"frames"])
    script.answer(script.joined(e7=0))
    script.publish(script.events(1, 1, b"1"))
    script.member.wait("engine_events", 7, b"1")
    assert script.client.errors == 3


def test_close_leaves(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined())
    script.expect(Heartbeat)
    script.client.send_events(b"last")
    script.client.close()
    assert script.expect(Events).records == b"last"
    assert script.expect(Leave).epoch == 100
    script.client.send_events(b"after")
    script.client.rejoin()
    script.client.close()
