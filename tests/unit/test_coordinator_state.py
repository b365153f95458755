"""What the coordinator decides about those who join and what they send."""

from __future__ import annotations

import msgspec
import pytest

from kvshm._node.protocol import (
    MAX_FIELDS_CHARACTERS,
    OTHER_VERSION,
    PROTOCOL_VERSION,
    Command,
    EngineEvents,
    EngineJoined,
    Events,
    ForeignEngine,
    ForeignJoin,
    Heartbeat,
    IncompatibleEngine,
    Join,
    Joined,
    JoinFirst,
    Leave,
    Refused,
    Tick,
)
from kvshm._shm.layout import MAX_BLOCKS
from kvshm.coordinator.actions import (
    BadMessage,
    CheckResult,
    CheckTable,
    ClockTick,
    EngineMessage,
    Log,
    ProcessDeath,
    Refusal,
    ReleaseTable,
    SendBroadcast,
    Sender,
    SendReply,
    TableUnused,
)
from kvshm.coordinator.state import decide
from kvshm.version import __version__

from .coordinators import (
    RECORD,
    UID,
    engine,
    join,
    new_state,
    only,
    published,
    say,
    sender_of,
)

# -- joining


def test_first_join() -> None:
    state = new_state()
    reply, actions = join(state, engine(5))
    info = engine(5, lease_bit=0)
    assert actions[:2] == [
        SendBroadcast(
            b"f" * 32,
            EngineJoined(coordinator_epoch=1, sequence=1, engine=info, engine_sequence=0),
        ),
        SendReply(b"route5", reply),
    ]
    assert reply == Joined(
        protocol=PROTOCOL_VERSION,
        coordinator_epoch=1,
        engine_epoch=5,
        lease_bit=0,
        sequence=1,
        roster=[],
        sequences={},
        suspected=[],
        incompatible=[],
    )
    (line,) = only(actions, Log)
    assert (line.event.id, line.fields["engine"], line.fields["bit"]) == ("join", "e5", 0)


def test_next_join_gets_the_roster_and_where_it_stands() -> None:
    state = new_state()
    join(state, engine(5), now=0.0)
    say(state, engine(5), Events(epoch=5, sequence=3, records=RECORD))
    decide(state, ClockTick(), 0.0)
    decide(state, ClockTick(), 2.0)
    decide(state, ClockTick(), 3.5)
    reply, _ = join(state, engine(6), now=3.5)
    assert reply.roster == [engine(5, lease_bit=0)]
    assert reply.sequences == {5: 3}
    assert reply.suspected == [5]
    assert (reply.sequence, reply.lease_bit) == (4, 1)  # join, events, suspected, own join


def test_topics_are_numbered_apart_and_incompatible_engines_named_most_alike_first() -> None:
    state = new_state()
    fields = {"model": "m", "weights": "1", "dtype": "bf16"}
    join(state, engine(5, fingerprint=b"5" * 32, fields={**fields, "model": "x", "weights": "9"}))
    join(state, engine(6, fingerprint=b"6" * 32, fields={**fields, "weights": "2"}))
    join(state, engine(7, fingerprint=b"7" * 32, fields=fields))
    reply, actions = join(state, engine(8, fields={**fields, "extra": "y"}))
    assert reply.sequence == 1
    assert reply.roster == []
    assert [(s.name, s.differences) for s in reply.incompatible] == [
        ("e7", {"extra": ("y", "")}),
        ("e6", {"weights": ("1", "2"), "extra": ("y", "")}),
        ("e5", {"model": ("m", "x"), "weights": ("1", "9"), "extra": ("y", "")}),
    ]
    reported = {sent.topic: sent.message.engine for sent in only(actions, SendBroadcast)[1:]}
    assert reported == {
        b"5" * 32: IncompatibleEngine(
            "e8", 8, {"model": ("x", "m"), "weights": ("9", "1"), "extra": ("", "y")}
        ),
        b"6" * 32: IncompatibleEngine("e8", 8, {"weights": ("2", "1"), "extra": ("", "y")}),
        b"7" * 32: IncompatibleEngine("e8", 8, {"extra": ("", "y")}),
    }
    lines = [line.fields for line in only(actions, Log) if line.event.id == "cannot-share"]
    assert [(line["other"], line["differs"]) for line in lines] == [
        ("e7", "extra"),
        ("e6", "weights"),
        ("e5", "model"),
    ]


def test_ticks_count_the_incompatible_engines_that_are_there() -> None:
    state = new_state()
    join(state, engine(5, fingerprint=b"5" * 32))
    join(state, engine(6))

    def counted(now: float) -> dict[bytes, int]:
        sent = only(decide(state, ClockTick(), now), SendBroadcast)
        return {s.topic: s.message.num_incompatible for s in sent if isinstance(s.message, Tick)}

    assert counted(0.0) == {b"5" * 32: 1, b"f" * 32: 1}
    decide(state, ProcessDeath(5, owner=True), 0.0)
    assert counted(1.0) == {b"f" * 32: 0}


def test_refused_at_once(subtests: pytest.Subtests) -> None:
    for sender, change, reason, remedy in [
        (Sender(b"r", UID + 1, 5), {}, "uid 1001", "one user"),
        (Sender(b"r", -1, -1), {}, "does not name", "libzmq"),
        (None, {"fingerprint": b"short"}, "malformed", "bug"),
        (None, {"fingerprint": bytes(33)}, "malformed", "bug"),
        (None, {"ranks": []}, "malformed", "bug"),
        (None, {"num_blocks": 0}, "malformed", "bug"),
        (None, {"num_blocks": -1}, "malformed", "bug"),
        (None, {"num_blocks": MAX_BLOCKS + 1}, "malformed", "bug"),
        (None, {"fields": {"weights": "x" * MAX_FIELDS_CHARACTERS}}, "malformed", "bug"),
        (None, {"name": "x" * 65}, "malformed", "bug"),
        (None, {"epoch": 0, "pid": 5}, "malformed", "bug"),
    ]:
        with subtests.test(sender=sender, change=change, reason=reason, remedy=remedy):
            state, info = new_state(), msgspec.structs.replace(engine(5), **change)
            message = Join(protocol=PROTOCOL_VERSION, engine=info)
            for times in range(2):
                actions = decide(state, EngineMessage(sender or sender_of(info), message), 0.0)
                (reply,) = [a.message for a in only(actions, SendReply)]
                assert isinstance(reply, Refused)
                assert reason in reply.reason
                assert remedy in reply.remedy
                assert not reply.retry
                assert len(only(actions, Log)) == (times == 0)  # logged once
            assert not state.engines


@pytest.mark.parametrize(
    ("protocol", "remedy"),
    [
        (PROTOCOL_VERSION + 1, "the coordinator's environment to 9.8"),
        (PROTOCOL_VERSION - 1, f"the engine's environment to {__version__}"),
    ],
)
@pytest.mark.parametrize("decodable", [True, False])
def test_other_protocols_are_refused_and_who_must_upgrade_is_named(
    protocol: int, remedy: str, decodable: bool
) -> None:
    state, info = new_state(), engine(5, kvshm_version="9.8")
    if decodable:
        actions = say(state, info, Join(protocol=protocol, engine=info))
    else:
        join = ForeignJoin(protocol, ForeignEngine(5, "e5", "9.8"))
        actions = decide(state, BadMessage(sender_of(info), "undecodable", join), 0.0)
    (reply,) = [a.message for a in only(actions, SendReply)]
    assert isinstance(reply, Refused)
    assert reply.engine_epoch == 5
    for named in (f"protocol {protocol} (kvshm 9.8)", f"{PROTOCOL_VERSION} (kvshm {__version__})"):
        assert named in reply.reason
    assert (remedy in reply.remedy, reply.code) == (True, OTHER_VERSION)
    assert not state.engines


def test_refused_by_the_shells_findings() -> None:
    state, message = new_state(), Join(protocol=PROTOCOL_VERSION, engine=engine(5))
    refusal = Refusal("cannot be fetched", "one run directory", retry=True)
    actions = decide(state, CheckResult(sender_of(engine(5)), message, refusal), 0.0)
    (reply,) = [a.message for a in only(actions, SendReply)]
    assert isinstance(reply, Refused)
    assert (reply.engine_epoch, reply.retry, reply.code) == (5, True, "")
    assert (reply.reason, reply.remedy) == ("cannot be fetched", "one run directory")
    assert not state.engines


def test_what_an_engine_calls_itself_decides_nothing() -> None:
    """Its own pid is a number of its own pid namespace; who speaks is what the socket tells."""
    state, info, sender = new_state(), engine(5, pid=1), Sender(b"r", UID, 4711)
    message = Join(protocol=PROTOCOL_VERSION, engine=info)
    assert decide(state, EngineMessage(sender, message), 0.0) == [CheckTable(sender, message)]
    decide(state, CheckResult(sender, message, None), 0.0)
    [member] = state.engines.values()
    assert (member.pid, member.info.pid) == (4711, 1)
    actions = decide(state, EngineMessage(sender_of(info), Leave(epoch=5)), 0.0)
    assert [line.event.id for line in only(actions, Log)] == ["impostor"]
    actions = decide(state, EngineMessage(sender, Leave(epoch=5)), 0.0)
    assert [line.event.id for line in only(actions, Log)] == ["leave"]


def test_engines_that_cannot_be_distinguished_by_their_pids_get_bits_apart() -> None:
    """In pid namespaces that cannot be seen from here, all of them are pid 0."""
    state = new_state()
    ended, present = (engine(epoch, pid=1) for epoch in (5, 6))
    nobody = Sender(b"r", UID, 0)
    replies = []
    for info in (ended, msgspec.structs.replace(present, lease_bit=0)):
        message = Join(protocol=PROTOCOL_VERSION, engine=info)
        actions = decide(state, CheckResult(nobody, message, None), 0.0)
        replies += [send.message for send in only(actions, SendReply)]
        decide(state, EngineMessage(nobody, Leave(epoch=5)), 0.0)
    assert [reply.lease_bit for reply in replies if isinstance(reply, Joined)] == [0, 1]


def test_an_examination_that_ends_after_its_epoch_lets_go_of_the_table() -> None:
    state = new_state()
    join(state, engine(5))
    say(state, engine(5), Leave(epoch=5))
    decide(state, ProcessDeath(5, owner=True), 0.0)
    assert only(decide(state, TableUnused(5), 0.0), ReleaseTable) == [ReleaseTable(5)]
    late = CheckResult(
        sender_of(engine(5)), Join(protocol=PROTOCOL_VERSION, engine=engine(5)), None
    )
    assert decide(state, late, 0.0) == [ReleaseTable(5)]
    assert not state.engines


def test_an_ended_epoch_never_comes_back() -> None:
    state = new_state()
    join(state, engine(5))
    say(state, engine(5), Leave(epoch=5))
    actions = say(state, engine(5), Join(protocol=PROTOCOL_VERSION, engine=engine(5)))
    (reply,) = [a.message for a in only(actions, SendReply)]
    assert isinstance(reply, Refused)
    assert "ended" in reply.reason


def test_an_epoch_belongs_to_one_engine() -> None:
    state = new_state()
    join(state, engine(5))
    other = engine(5, pid=6)
    actions = say(state, other, Join(protocol=PROTOCOL_VERSION, engine=other))
    assert isinstance(only(actions, SendReply)[0].message, Refused)


def test_joining_again_is_silent_unless_events_were_lost() -> None:
    state = new_state()
    join(state, engine(5))
    join(state, engine(6))
    say(state, engine(5), Events(epoch=5, sequence=1, records=RECORD))
    again = engine(5, lease_bit=0)
    reply, actions = join(state, again, sequence=1)
    assert published(actions) == []
    assert reply.sequence == 3
    reply, actions = join(state, again, sequence=2)
    (news,) = published(actions)
    assert (news.engine.epoch, news.engine_sequence, news.sequence) == (5, 2, 4)
    assert not [line for line in only(actions, Log) if line.event.id == "join"]


# -- events


def test_events_are_relayed_with_both_sequences() -> None:
    state = new_state()
    join(state, engine(5))
    actions = say(state, engine(5), Events(epoch=5, sequence=4, records=RECORD))
    assert actions == [
        SendBroadcast(
            b"f" * 32,
            EngineEvents(
                coordinator_epoch=1, sequence=2, epoch=5, engine_sequence=4, records=RECORD
            ),
        )
    ]
    for sequence, awaited in ((5, True), (6, False)):
        said = Events(epoch=5, sequence=sequence, records=RECORD, awaited=awaited)
        (sent,) = only(say(state, engine(5), said), SendBroadcast)
        assert sent.awaited is awaited


def test_events_that_are_repeated_cut_or_anothers_are_dropped() -> None:
    state = new_state()
    join(state, engine(5))
    join(state, engine(6))
    say(state, engine(5), Events(epoch=5, sequence=4, records=RECORD))
    repeated = say(state, engine(5), Events(epoch=5, sequence=4, records=RECORD))
    cut = say(state, engine(5), Events(epoch=5, sequence=5, records=RECORD[:-1]))
    anothers = say(state, engine(6), Events(epoch=5, sequence=5, records=RECORD))
    stolen = say(state, engine(6), Leave(epoch=5))
    assert not published(repeated + cut + anothers + stolen)
    assert set(state.engines) == {5, 6}
    assert [line.event.id for line in only(repeated + cut + anothers + stolen, Log)] == [
        "repeated",
        "garbled",
        "impostor",
    ]


@pytest.mark.parametrize(
    "message",
    [Events(epoch=5, sequence=1, records=RECORD), Heartbeat(epoch=5, sequence=1)],
    ids=["events", "heartbeat"],
)
def test_who_is_not_in_the_roster_is_asked_to_join_first(message: Command) -> None:
    state = new_state()
    reply = JoinFirst(coordinator_epoch=1, engine_epoch=5)
    assert say(state, engine(5), message) == [SendReply(b"route5", reply)]
    assert say(state, engine(5), Leave(epoch=5)) == []


def test_heartbeat_shows_dropped_events_in_the_next_tick() -> None:
    state = new_state()
    join(state, engine(5))
    assert say(state, engine(5), Heartbeat(epoch=5, sequence=7)) == []
    ticks = [m for m in published(decide(state, ClockTick(), 0.0)) if isinstance(m, Tick)]
    assert [(t.sequence, t.sequences) for t in ticks] == [(1, {5: 7})]
    again = [m for m in published(decide(state, ClockTick(), 1.0)) if isinstance(m, Tick)]
    assert again == ticks  # a tick has no number of its own


def test_garbage_is_logged_once_per_sender() -> None:
    state = new_state()
    lines = [decide(state, BadMessage(Sender(b"r", UID, 9), f"{i}"), 0.0) for i in range(3)]
    assert [len(only(actions, Log)) for actions in lines] == [1, 0, 0]
    assert state.reports == {(9, "garbled"): 3}
    for pid in range(5000):
        decide(state, BadMessage(Sender(b"r", UID, pid), "x"), 0.0)
    assert len(state.reports) <= 1000


def test_who_sends_a_malformed_join_is_reported_what_is_wrong_with_it() -> None:
    state, own = new_state(), ForeignJoin(PROTOCOL_VERSION, ForeignEngine(5, "e5"))
    lines = []
    for n in range(3):
        actions = decide(state, BadMessage(sender_of(engine(5)), f"of {n} bytes", own), 0.0)
        [send], lines = only(actions, SendReply), lines + only(actions, Log)
        assert isinstance(send.message, Refused)
        assert (send.message.engine_epoch, send.message.retry) == (5, False)
        assert f"of {n} bytes" in send.message.remedy
    assert [line.event.id for line in lines] == ["refused"], "logged once"
