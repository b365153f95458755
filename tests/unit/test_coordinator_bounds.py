"""What the coordinator remembers is bounded, however many engines come and go."""

from __future__ import annotations

from kvshm._base.timing import TIMING
from kvshm._node.protocol import PROTOCOL_VERSION, ForeignEngine, ForeignJoin, Join, Leave, Refused
from kvshm.coordinator.actions import (
    BadMessage,
    CheckResult,
    CheckTable,
    ClockTick,
    ProcessDeath,
    ReleaseTable,
    SendReply,
    TableUnused,
)
from kvshm.coordinator.joining import MAX_OF_PROCESS, MAX_TABLES_OF_PROCESS
from kvshm.coordinator.roster import MAX_ENDED
from kvshm.coordinator.state import decide

from .coordinators import engine, join, new_state, only, say, sender_of


def test_only_the_last_ended_epochs_are_remembered_and_refused() -> None:
    state = new_state()
    for epoch in range(1, MAX_ENDED + 11):
        join(state, engine(epoch))
        say(state, engine(epoch), Leave(epoch=epoch))
    assert len(state.ended) == MAX_ENDED
    last = engine(MAX_ENDED + 10)
    message = Join(protocol=PROTOCOL_VERSION, engine=last, sequence=0)
    [send] = only(say(state, last, message), SendReply)
    assert isinstance(send.message, Refused)


def test_topics_without_engines_are_forgotten_after_a_while() -> None:
    state = new_state()
    staying, going = engine(1, fingerprint=b"s" * 32), engine(2, fingerprint=b"g" * 32)
    join(state, staying)
    join(state, going)
    numbers = dict(state.topics)
    say(state, going, Leave(epoch=2))
    decide(state, ClockTick(), TIMING.cleanup_seconds)
    assert state.topics.keys() == numbers.keys(), "looked at once: it may have an engine again"
    decide(state, ClockTick(), 2 * TIMING.cleanup_seconds)
    assert state.topics.keys() == {staying.fingerprint}
    decide(state, ClockTick(), 3 * TIMING.cleanup_seconds)
    assert state.idle_topics == set()
    assert join(state, engine(3, fingerprint=going.fingerprint))[0].sequence == 1


def test_a_topic_that_has_an_engine_again_keeps_its_numbers() -> None:
    state = new_state()
    join(state, engine(1))
    say(state, engine(1), Leave(epoch=1))
    decide(state, ClockTick(), TIMING.cleanup_seconds)
    again, _ = join(state, engine(2))
    decide(state, ClockTick(), 2 * TIMING.cleanup_seconds)
    decide(state, ClockTick(), 3 * TIMING.cleanup_seconds)
    assert state.topics == {engine(2).fingerprint: again.sequence}


def test_a_process_does_not_take_more_places_by_joining_in_many_at_once() -> None:
    state, infos = new_state(), [engine(epoch, pid=1) for epoch in range(1, MAX_OF_PROCESS + 3)]
    joins = [Join(protocol=PROTOCOL_VERSION, engine=info) for info in infos]
    for info, message in zip(infos, joins, strict=True):
        assert only(say(state, info, message), CheckTable), "as long as none of them is there"
    actions = [
        decide(state, CheckResult(sender_of(engine(1)), message, None), 0.0) for message in joins
    ]
    assert len(state.engines) == MAX_OF_PROCESS
    for epoch, late in enumerate(actions[MAX_OF_PROCESS:], MAX_OF_PROCESS + 1):
        [send], [forget] = only(late, SendReply), only(late, ReleaseTable)
        assert isinstance(send.message, Refused)
        assert forget == ReleaseTable(epoch), "its table is let go of"


def test_a_process_that_keeps_the_tables_of_ended_epochs_is_to_wait() -> None:
    state = new_state()
    for epoch in range(1, MAX_TABLES_OF_PROCESS + 1):
        join(state, engine(epoch, pid=1))
        say(state, engine(epoch, pid=1), Leave(epoch=epoch))
    one_more = engine(100, pid=1)
    [send] = only(say(state, one_more, Join(protocol=PROTOCOL_VERSION, engine=one_more)), SendReply)
    assert isinstance(send.message, Refused)
    assert "still has 16 slot tables" in send.message.reason
    assert send.message.retry
    assert len(state.kept) == MAX_TABLES_OF_PROCESS
    join(state, engine(200, pid=2))
    for event in (ProcessDeath(1, owner=True, retired=True), TableUnused(1)):
        decide(state, event, 0.0)
    join(state, one_more)


def test_what_a_complaint_keeps_of_its_senders_words_is_bounded() -> None:
    state = new_state()
    for n in range(1000):
        join = ForeignJoin(99, ForeignEngine(n + 1, "e", "9" * 10_000))
        decide(state, BadMessage(sender_of(engine(5)), "undecodable", join), 0.0)
    assert max(len(about) for _, about in state.reports) < 300
    assert list(state.reports.values()) == [1000]


def test_one_process_does_not_take_all_places() -> None:
    """It begins one epoch after the other and ends none."""
    state = new_state()
    for epoch in range(1, MAX_OF_PROCESS + 1):
        join(state, engine(epoch, pid=1))
    one_more = engine(MAX_OF_PROCESS + 1, pid=1)
    [send, *_] = say(state, one_more, Join(protocol=PROTOCOL_VERSION, engine=one_more))
    assert isinstance(send, SendReply)
    assert isinstance(send.message, Refused)
    assert "8 engines" in send.message.reason
    join(state, engine(100, pid=2))
    say(state, engine(1, pid=1), Leave(epoch=1))
    join(state, one_more)
