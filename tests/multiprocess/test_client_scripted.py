"""The client against a scripted coordinator that loses, repeats and forgets."""

from __future__ import annotations

import sys
import threading
import time
from unittest.mock import ANY

import pytest

from kvshm._node import coordinator_client
from kvshm._node.coordinator_client import MAX_JOINED_BYTES
from kvshm._node.protocol import (
    EngineInfo,
    Events,
    Heartbeat,
    Join,
    JoinFirst,
    Leave,
    Refused,
    Tick,
)
from kvshm._node.updates import EventBatches, Update
from kvshm._shm.statistics import EVENTS_DROPPED

from .processes import PATIENCE_SECONDS
from .scripted import HASTY, Script, engine_info

pytestmark = pytest.mark.multiprocess


def test_broadcasts_up_to_the_roster_are_dropped(script: Script) -> None:
    script.expect(Join)
    for sequence in (1, 2, 3):
        script.publish(script.events(sequence, sequence, b"%d" % sequence))
    script.answer(script.joined(sequence=2, e7=2))
    script.engine.wait("engine_events", 7, b"3")
    names = [call[0] for call in script.engine.calls]
    assert names == ["joined", "engine_joined", "engine_events"]


def test_lost_broadcast_makes_it_join_again(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined(sequence=4, e7=1))
    script.engine.wait("engine_joined", engine_info(7))
    script.publish(script.events(6, 3, b"late"))
    join = script.expect(Join)
    assert join.engine.lease_bit == 5
    assert script.client.is_member
    script.answer(script.joined(sequence=6, e7=3, e8=0))
    script.engine.wait("rescan", 7)
    script.engine.wait("engine_joined", engine_info(8))
    assert ("engine_events", 7, b"late") not in script.engine.calls
    assert ("coordinator_lost",) not in script.engine.calls


def test_events_wait_for_the_place_in_the_roster(script: Script) -> None:
    join = script.expect(Join)
    script.answer(script.joined(e7=0))
    script.engine.wait("engine_joined", engine_info(7))
    script.answer(script.joined(e7=0, coordinator=2))
    script.publish(Tick(coordinator_epoch=2, sequence=0, sequences={}))  # another one: no place
    script.engine.wait("coordinator_lost")
    script.client.send_events(b"dropped")
    script.engine.wait("count", EVENTS_DROPPED)
    again = script.expect(Join)
    script.answer(script.joined(e7=0, coordinator=2))
    last = script.expect(Join)  # what was dropped has to be scanned by the others
    assert (join.sequence, again.sequence, last.sequence) == (0, 0, 1)
    script.answer(script.joined(e7=0, coordinator=2))
    script.client.send_events(b"sent")
    assert script.expect(Events) == Events(epoch=100, sequence=2, records=b"sent")
    assert script.expect(Heartbeat).sequence == 2


def test_a_scheduler_that_never_rests_does_not_keep_it_from_listening(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        coordinator_client, "MAX_QUEUED", sys.maxsize
    )  # what is dropped makes it join again
    script.expect(Join)
    script.answer(script.joined(e7=0))
    script.engine.wait("engine_joined", engine_info(7))
    script.client.send_events(b"busy")
    script.expect(Events)
    script.publish(script.events(1, 1, b"news"))
    news, deadline = ("engine_events", 7, b"news"), time.monotonic() + PATIENCE_SECONDS
    while news not in script.engine.calls and time.monotonic() < deadline:
        for _ in range(1000):  # faster than they can be sent one by one
            script.client.send_events(b"busy")
    calls = script.engine.calls
    assert news in calls
    sent = [call for call in calls[: calls.index(news)] if call[0] == "count"]
    assert len(sent) < 100  # messages; hundreds if each batch is one


def test_batches_that_wait_together_are_one_message(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go_on = threading.Event(), threading.Event()

    def apply(update: Update) -> None:
        if isinstance(update, EventBatches):
            held.set()
            go_on.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(script.engine, "apply", apply)
    script.expect(Join)
    script.answer(script.joined(e7=0))
    script.publish(script.events(1, 1, b"keeps the client's thread"))
    assert held.wait(PATIENCE_SECONDS)
    for records in (b"1", b"2", bytes(MAX_JOINED_BYTES), b"3"):
        script.client.send_events(records)
    script.client.rejoin()
    script.client.send_events(b"4")
    go_on.set()
    sent = [script.expect(Events) for _ in range(4)]
    assert [e.records for e in sent] == [b"12", bytes(MAX_JOINED_BYTES), b"3", b"4"]
    assert [e.sequence for e in sent] == [1, 2, 3, 4]


def test_a_batch_that_cannot_be_sent_for_a_bug_does_not_keep_the_old_epoch(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_events(records: bytes) -> None:
        raise RuntimeError("a bug")

    script.expect(Join)
    script.answer(script.joined())
    script.engine.wait("joined", script.joined())
    monkeypatch.setattr(script.client._session, "send_events", send_events)
    script.engine.epoch = 101
    script.client._outbox.append(b"of epoch 100")  # so that both are there when it looks
    script.client.rejoin()
    for _ in range(20):  # at the next heartbeat, not when the coordinator counts as lost
        if not isinstance(command := script.receive(), Heartbeat):
            break
    assert command == Leave(epoch=100)
    assert script.expect(Join).engine.epoch == 101


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
    assert script.engine.calls.count(("coordinator_lost",)) == 1
    assert ("engine_gone", 7, "no longer in the roster") not in script.engine.calls


def test_new_epoch_leaves_with_the_old_one_first(script: Script) -> None:
    script.expect(Join)  # not answered: the coordinator may have taken it in all the same
    script.engine.epoch = 101
    script.client.rejoin()
    assert script.expect(Leave).epoch == 100
    join = script.expect(Join)
    assert (join.engine.epoch, join.sequence) == (101, 0)


def test_each_refusal_is_reported_and_a_new_epoch_tries_at_once(script: Script) -> None:
    refused = Refused(engine_epoch=100, reason="r", remedy="do", retry=True)
    for _ in range(2):
        script.expect(Join)
        script.answer(refused)
    script.expect(Join)
    assert script.engine.calls == [("refused", refused)] * 2
    script.answer(Refused(engine_epoch=100, reason="other", remedy="do", retry=False))
    script.engine.epoch = 102
    script.client.rejoin()
    script.expect(Leave)
    assert script.expect(Join).engine.epoch == 102


def test_a_first_refusal_for_good_is_not_tried_again_soon(hasty_script: Script) -> None:
    script = hasty_script
    script.expect(Join)
    script.answer(Refused(engine_epoch=100, reason="r", remedy="do", retry=False))
    script.engine.wait("refused", ANY)
    quiet_until = time.monotonic() + 2 * HASTY.reply_seconds
    while (left := quiet_until - time.monotonic()) > 0:
        assert not script.is_reported(left), "asks again before ``refused_seconds`` are over"


def test_a_rejoin_that_comes_after_the_join_does_not_leave_the_new_epoch(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined())
    script.engine.epoch = 101  # found by a join for another reason, before rejoin is called
    script.publish(script.events(5, 1, b"a gap"))
    assert script.expect(Leave).epoch == 100
    assert script.expect(Join).engine.epoch == 101
    joined = script.joined(e7=0)
    script.answer(joined)
    script.engine.wait("engine_joined", engine_info(7))
    script.client.rejoin()
    script.client.send_events(b"after")
    assert script.expect(Events).epoch == 101


def test_events_of_the_old_epoch_are_never_sent_as_the_new_ones(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.expect(Join)
    script.answer(script.joined(e7=0))
    script.engine.wait("engine_joined", engine_info(7))

    def describe() -> EngineInfo:
        if script.engine.epoch == 100:  # the epoch ends while the client's thread is at work
            script.client.send_events(b"old")
            script.client.rejoin()
            script.engine.epoch = 101
        return engine_info(101, "own")

    monkeypatch.setattr(script.engine, "describe", describe)
    script.publish(script.events(5, 1, b"a gap"))
    events = script.expect(Events)
    assert (events.epoch, events.records) == (100, b"old")
    assert script.expect(Leave).epoch == 100
    join = script.expect(Join)
    assert (join.engine.epoch, join.sequence) == (101, 0)


def test_an_ended_epoch_is_left_though_no_new_one_has_begun(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined())
    script.engine.epoch = None
    script.client.rejoin()
    assert script.expect(Leave).epoch == 100
    script.engine.epoch = 101
    assert script.expect(Join).engine.epoch == 101


def test_close_leaves(script: Script) -> None:
    script.expect(Join)
    script.answer(script.joined(e7=0))
    script.engine.wait("engine_joined", engine_info(7))
    script.client.send_events(b"last")
    script.client.close()
    assert script.expect(Events).records == b"last"
    assert script.expect(Leave).epoch == 100
    script.client.send_events(b"after")
    script.client.rejoin()
    script.client.close()
