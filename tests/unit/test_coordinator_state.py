"""What the coordinator decides, without a socket, a process or a clock."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshm.coordinator.actions import (
    Action,
    Clock,
    Died,
    EndLife,
    Examine,
    Examined,
    Garbled,
    Log,
    Owner,
    Peer,
    Process,
    Publish,
    Received,
    Refusal,
    Send,
    SweepBits,
    SweepLeftovers,
    SweepProcess,
    UnlinkEpoch,
    Unwatch,
    Watch,
    WriteLease,
)
from kvshm.coordinator.lease_bits import NOBODY, LeaseBits
from kvshm.coordinator.roster import State
from kvshm.coordinator.state import GRACE_SECONDS, decide
from kvshm.interfaces import MemoryDescriptor
from kvshm.protocol import (
    PROTOCOL_VERSION,
    Command,
    EngineEvents,
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    Events,
    Heartbeat,
    Join,
    Joined,
    JoinFirst,
    Leave,
    RankInfo,
    Refused,
    Tick,
)
from kvshm.records import NUM_LEASE_BITS, RECORD_BYTES
from kvshm.segment import Identity, segment_name

UID = 1000
BOOT = b"b" * 16
RECORD = bytes(RECORD_BYTES)

A = TypeVar("A")


def new_state(
    rows: list[Owner] | None = None, dead: frozenset[int] = frozenset(), now: float = 0.0
) -> State:
    rows = rows or [NOBODY] * NUM_LEASE_BITS
    return State(
        epoch=1,
        namespace="n",
        uid=UID,
        boot_id=BOOT,
        bits=LeaseBits(rows, dead, now + GRACE_SECONDS),
    )


def engine(epoch: int, *, pid: int = 0, ranks: tuple[int, ...] = (), **fields: Any) -> EngineInfo:
    """An engine of one process (pid = epoch unless given), or with ranks of their own."""
    pid = pid or epoch
    memory = MemoryDescriptor("none", epoch, 0, [], {})
    described: dict[str, Any] = {
        "epoch": epoch,
        "name": f"e{epoch}",
        "pid": pid,
        "start_time": pid * 10,
        "fingerprint": b"f" * 32,
        "fields": {},
        "table": segment_name("n", "slots", f"e{epoch}", epoch),
        "num_blocks": 8,
        "ranks": [RankInfo(rank, rank * 10, memory) for rank in ranks or (pid,)],
    }
    return EngineInfo(**{**described, **fields})


def peer_of(info: EngineInfo) -> Peer:
    return Peer(b"route%d" % info.pid, UID, info.pid)


def process(pid: int) -> Process:
    return Process(pid, pid * 10)


def say(state: State, info: EngineInfo, message: Command, now: float = 0.0) -> list[Action]:
    return decide(state, Received(peer_of(info), message), now)


def join(
    state: State, info: EngineInfo, now: float = 0.0, sequence: int = 0
) -> tuple[Joined, list[Action]]:
    """Join, with whatever the shell looks at found in order."""
    message = Join(protocol=PROTOCOL_VERSION, engine=info, sequence=sequence)
    assert say(state, info, message, now) == [Examine(peer_of(info), message)]
    actions = decide(state, Examined(peer_of(info), message, None), now)
    (reply,) = [a.message for a in actions if isinstance(a, Send)]
    assert isinstance(reply, Joined)
    return reply, actions


def only(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def published(actions: list[Action]) -> list[Any]:
    return [action.message for action in only(actions, Publish)]


# -- joining


def test_first_join() -> None:
    state = new_state()
    reply, actions = join(state, engine(5))
    info = engine(5, lease_bit=0)
    assert actions[:4] == [
        Watch(process(5)),
        WriteLease(0, Owner(5, Identity(BOOT, 5, 50))),
        Publish(
            b"f" * 32,
            EngineJoined(coordinator_epoch=1, sequence=1, engine=info, engine_sequence=0),
        ),
        Send(b"route5", reply),
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
        strangers=[],
    )
    (line,) = only(actions, Log)
    assert (line.event, line.fields["engine"], line.fields["bit"]) == ("join", "e5", 0)


def test_next_join_gets_the_roster_and_where_it_stands() -> None:
    state = new_state()
    join(state, engine(5), now=0.0)
    say(state, engine(5), Events(epoch=5, sequence=3, records=RECORD))
    decide(state, Clock(), 0.0)
    decide(state, Clock(), 2.0)
    decide(state, Clock(), 3.5)
    reply, _ = join(state, engine(6), now=3.5)
    assert reply.roster == [engine(5, lease_bit=0)]
    assert reply.sequences == {5: 3}
    assert reply.suspected == [5]
    assert (reply.sequence, reply.lease_bit) == (4, 1)  # join, events, suspected, own join


def test_topics_are_numbered_apart_and_strangers_named_most_alike_first() -> None:
    state = new_state()
    fields = {"model": "m", "weights": "1", "dtype": "bf16"}
    join(state, engine(5, fingerprint=b"5" * 32, fields={**fields, "model": "x", "weights": "9"}))
    join(state, engine(6, fingerprint=b"6" * 32, fields={**fields, "weights": "2"}))
    join(state, engine(7, fingerprint=b"7" * 32, fields=fields))
    reply, actions = join(state, engine(8, fields={**fields, "extra": "y"}))
    assert reply.sequence == 1
    assert reply.roster == []
    assert [(s.name, s.differences) for s in reply.strangers] == [
        ("e7", {"extra": ("y", "")}),
        ("e6", {"weights": ("1", "2"), "extra": ("y", "")}),
        ("e5", {"model": ("m", "x"), "weights": ("1", "9"), "extra": ("y", "")}),
    ]
    lines = [line.fields for line in only(actions, Log) if line.event == "cannot-share"]
    assert [(line["other"], line["differs"]) for line in lines] == [
        ("e7", "extra"),
        ("e6", "weights"),
        ("e5", "model"),
    ]


@pytest.mark.parametrize(
    ("peer", "change", "reason", "remedy"),
    [
        (Peer(b"r", UID + 1, 5), {}, "uid 1001", "one user"),
        (Peer(b"r", UID, 0), {}, "pid namespace", "--pid=host"),
        (Peer(b"r", UID, 6), {}, "calls itself pid 5, here it is pid 6", "--pid=host"),
        (Peer(b"r", -1, -1), {}, "does not tell", "libzmq"),
        (None, {"table": "kvshm.m.slots.e5.0000000000000005"}, "namespace 'n'", "KVSHM_NAMESPACE"),
        (None, {"table": "kvshm.n.index.e5.0000000000000005"}, "no slot table", "KVSHM_NAMESPACE"),
        (None, {"table": "kvshm.n.slots.e5.0000000000000006"}, "this epoch", "KVSHM_NAMESPACE"),
        (None, {"table": "../../etc/passwd"}, "no slot table", "KVSHM_NAMESPACE"),
        (None, {"fingerprint": b"short"}, "malformed", "bug"),
        (None, {"ranks": []}, "malformed", "bug"),
    ],
)
def test_refused_at_once(
    peer: Peer | None, change: dict[str, Any], reason: str, remedy: str
) -> None:
    state, info = new_state(), msgspec.structs.replace(engine(5), **change)
    message = Join(protocol=PROTOCOL_VERSION, engine=info)
    for times in range(2):
        actions = decide(state, Received(peer or peer_of(info), message), 0.0)
        (reply,) = [a.message for a in only(actions, Send)]
        assert isinstance(reply, Refused)
        assert reason in reply.reason
        assert remedy in reply.remedy
        assert not reply.retry
        assert len(only(actions, Log)) == (times == 0)  # logged once
    assert not state.engines


def test_refused_for_its_protocol() -> None:
    state = new_state()
    actions = say(state, engine(5), Join(protocol=99, engine=engine(5)))
    (reply,) = [a.message for a in only(actions, Send)]
    assert isinstance(reply, Refused)
    assert "protocol 99" in reply.reason


def test_refused_by_the_shells_findings() -> None:
    state, message = new_state(), Join(protocol=PROTOCOL_VERSION, engine=engine(5))
    refusal = Refusal("not in /dev/shm", "--ipc=host", retry=True)
    actions = decide(state, Examined(peer_of(engine(5)), message, refusal), 0.0)
    (reply,) = [a.message for a in only(actions, Send)]
    expected = Refused(engine_epoch=5, reason="not in /dev/shm", remedy="--ipc=host", retry=True)
    assert reply == expected
    assert not state.engines


def test_an_ended_epoch_never_comes_back() -> None:
    state = new_state()
    join(state, engine(5))
    say(state, engine(5), Leave(epoch=5))
    actions = say(state, engine(5), Join(protocol=PROTOCOL_VERSION, engine=engine(5)))
    (reply,) = [a.message for a in only(actions, Send)]
    assert isinstance(reply, Refused)
    assert "ended" in reply.reason


def test_an_epoch_belongs_to_one_engine() -> None:
    state = new_state()
    join(state, engine(5))
    other = engine(5, pid=6)
    actions = say(state, other, Join(protocol=PROTOCOL_VERSION, engine=other))
    assert isinstance(only(actions, Send)[0].message, Refused)


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
    assert not [line for line in only(actions, Log) if line.event == "join"]


# -- events


def test_events_are_relayed_with_both_sequences() -> None:
    state = new_state()
    join(state, engine(5))
    actions = say(state, engine(5), Events(epoch=5, sequence=4, records=RECORD))
    assert actions == [
        Publish(
            b"f" * 32,
            EngineEvents(
                coordinator_epoch=1, sequence=2, epoch=5, engine_sequence=4, records=RECORD
            ),
        )
    ]


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
    assert [line.event for line in only(repeated + cut + anothers + stolen, Log)] == [
        "repeated",
        "garbled",
        "impostor",
    ]


@pytest.mark.parametrize(
    "message",
    [Events(epoch=5, sequence=1, records=RECORD), Heartbeat(epoch=5, sequence=1)],
    ids=["events", "heartbeat"],
)
def test_who_is_not_in_the_roster_is_told_to_join_first(message: Command) -> None:
    state = new_state()
    reply = JoinFirst(coordinator_epoch=1, engine_epoch=5)
    assert say(state, engine(5), message) == [Send(b"route5", reply)]
    assert say(state, engine(5), Leave(epoch=5)) == []


def test_heartbeat_shows_dropped_events_in_the_next_tick() -> None:
    state = new_state()
    join(state, engine(5))
    assert say(state, engine(5), Heartbeat(epoch=5, sequence=7)) == []
    ticks = [m for m in published(decide(state, Clock(), 0.0)) if isinstance(m, Tick)]
    assert [(t.sequence, t.sequences) for t in ticks] == [(1, {5: 7})]
    again = [m for m in published(decide(state, Clock(), 1.0)) if isinstance(m, Tick)]
    assert again == ticks  # a tick has no number of its own


def test_garbage_is_logged_once_per_sender() -> None:
    state = new_state()
    lines = [decide(state, Garbled(Peer(b"r", UID, 9), f"{i}"), 0.0) for i in range(3)]
    assert [len(only(actions, Log)) for actions in lines] == [1, 0, 0]
    assert state.complaints == {(9, "garbled"): 3}
    for pid in range(5000):
        decide(state, Garbled(Peer(b"r", UID, pid), "x"), 0.0)
    assert len(state.complaints) <= 1000


# -- suspicion


def test_silence_is_suspicion_and_a_word_ends_it() -> None:
    state = new_state()
    join(state, engine(5), now=10.0)
    decide(state, Clock(), 12.0)
    assert not [m for m in published(decide(state, Clock(), 13.0)) if not isinstance(m, Tick)]
    actions = decide(state, Clock(), 13.5)
    assert isinstance(published(actions)[0], EngineSuspected)
    assert not only(actions, EndLife) + only(actions, SweepBits) + only(actions, UnlinkEpoch)
    assert not [m for m in published(decide(state, Clock(), 15.0)) if not isinstance(m, Tick)]
    actions = say(state, engine(5), Heartbeat(epoch=5, sequence=0), now=16.0)
    assert isinstance(published(actions)[0], EngineRecovered)
    assert say(state, engine(5), Heartbeat(epoch=5, sequence=0), now=16.5) == []


def test_a_stopped_coordinator_suspects_nobody() -> None:
    state = new_state()
    join(state, engine(5), now=0.0)
    decide(state, Clock(), 0.5)
    assert all(isinstance(m, Tick) for m in published(decide(state, Clock(), 100.0)))
    assert all(isinstance(m, Tick) for m in published(decide(state, Clock(), 102.0)))


def test_a_suspect_that_joins_again_has_recovered() -> None:
    state = new_state()
    join(state, engine(5), now=0.0)
    for now in (1.0, 3.5):
        decide(state, Clock(), now)
    _, actions = join(state, engine(5, lease_bit=0), now=4.0)
    assert [type(message) for message in published(actions)] == [EngineRecovered]


# -- ends


def test_death_withdraws_tells_clears_and_removes_in_this_order() -> None:
    state = new_state()
    join(state, engine(5))
    join(state, engine(6))
    actions = decide(state, Died(process(5)), 0.0)
    table = engine(5).table
    gone = EngineGone(coordinator_epoch=1, sequence=3, epoch=5, reason="process 5 died")
    assert actions[:-1] == [
        EndLife(table),
        Publish(b"f" * 32, gone),
        SweepBits(1 << 0),
        UnlinkEpoch(table, 5),
        SweepProcess(process(5)),
        WriteLease(0, Owner(0, Identity(BOOT, 5, 50))),
    ]
    assert isinstance(actions[-1], Log)
    assert set(state.engines) == {6}


def test_a_dead_rank_ends_the_epoch_and_the_bit_waits_for_the_rest() -> None:
    state = new_state()
    _, actions = join(state, engine(5, ranks=(51, 52)))
    assert only(actions, Watch) == [Watch(process(p)) for p in (5, 51, 52)]
    actions = decide(state, Died(process(51)), 0.0)
    assert only(actions, SweepBits) == [SweepBits(1)]
    assert not only(actions, WriteLease)
    assert not only(actions, Unwatch)
    decide(state, Died(process(52)), 0.0)
    actions = decide(state, Died(process(5)), 0.0)
    assert only(actions, SweepBits) == [SweepBits(1)]  # again, now that it is certain
    assert only(actions, WriteLease) == [WriteLease(0, Owner(0, Identity(BOOT, 5, 50)))]
    assert not published(actions)


def test_one_process_with_two_engines() -> None:
    state = new_state()
    join(state, engine(5, pid=9))
    join(state, engine(6, pid=9))
    actions = decide(state, Died(process(9)), 0.0)
    assert [message.epoch for message in published(actions)] == [5, 6]
    assert only(actions, SweepBits) == [SweepBits(0b11)]
    assert not state.watched


def test_leave_keeps_the_bit_for_the_same_process() -> None:
    state = new_state()
    join(state, engine(5))
    actions = say(state, engine(5), Leave(epoch=5))
    kinds = [EndLife, Publish, SweepBits, UnlinkEpoch, Log]
    assert [type(action) for action in actions] == kinds
    reply, _ = join(state, engine(6))
    assert reply.lease_bit == 1  # not handed on: process 5 may still release with it
    reply, actions = join(state, engine(7, pid=5, lease_bit=0))
    assert reply.lease_bit == 0
    assert WriteLease(0, Owner(7, Identity(BOOT, 5, 50))) in actions


def test_engines_beyond_the_bits_go_without_one() -> None:
    state = new_state()
    bits = [join(state, engine(epoch))[0].lease_bit for epoch in range(1, 30)]
    assert bits == [*range(28), -1]
    assert not only(join(state, engine(40))[1], WriteLease)
    decide(state, Died(process(3)), 0.0)
    assert join(state, engine(41))[0].lease_bit == 2


def test_a_bit_never_used_comes_before_one_that_was() -> None:
    state = new_state()
    join(state, engine(5))
    decide(state, Died(process(5)), 0.0)
    assert join(state, engine(6))[0].lease_bit == 1


# -- restarts


def owner(epoch: int) -> Owner:
    return Owner(epoch, Identity(BOOT, epoch, epoch * 10))


def test_restart_keeps_bits_for_the_living_and_watches_them() -> None:
    state = new_state([owner(5), owner(6), *[NOBODY] * 26])
    assert state.watch() == [Watch(process(5)), Watch(process(6))]
    assert join(state, engine(7))[0].lease_bit == 2
    assert join(state, engine(6, lease_bit=1))[0].lease_bit == 1
    actions = decide(state, Died(process(5)), 0.0)  # it had not joined again
    assert actions == [
        SweepBits(1),
        SweepProcess(process(5)),
        WriteLease(0, Owner(0, owner(5).identity)),
    ]


def test_bits_of_the_dead_are_swept_after_a_grace_period_only() -> None:
    state = new_state([owner(5), *[NOBODY] * 27], dead=frozenset({0}), now=100.0)
    assert state.watch() == []
    thief = engine(6, lease_bit=0)
    assert join(state, thief, now=100.0)[0].lease_bit == 1
    assert not only(decide(state, Clock(), 102.9), SweepBits)
    actions = decide(state, Clock(), 103.0)
    assert only(actions, SweepBits) == [SweepBits(1)]
    assert only(actions, WriteLease) == [WriteLease(0, Owner(0, owner(5).identity))]
    assert not only(decide(state, Clock(), 104.0), SweepBits)
    assert join(state, engine(7, lease_bit=0), now=104.0)[0].lease_bit == 0


def test_leftovers_are_looked_for_at_once_and_now_and_then() -> None:
    state = new_state()
    assert only(decide(state, Clock(), 0.0), SweepLeftovers) == [SweepLeftovers(frozenset())]
    join(state, engine(5))
    assert not only(decide(state, Clock(), 29.0), SweepLeftovers)
    assert only(decide(state, Clock(), 31.0), SweepLeftovers) == [SweepLeftovers(frozenset({5}))]


# -- whatever happens


class Anything(RuleBasedStateMachine):
    """Engines come, go, die and join again in any order, in few processes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = new_state()
        self.alive = set(range(1, 8))
        self.next_epoch = 100
        self.infos: dict[int, EngineInfo] = {}
        self.dirty = [0] * NUM_LEASE_BITS
        """Bit -> process whose leases may be set in some slot; 0: none."""
        self.watched: set[Process] = set()
        self.sequences: dict[bytes, int] = {}

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Watch(process):
                    assert process not in self.watched
                    self.watched.add(process)
                case Unwatch(process):
                    self.watched.remove(process)
                case SweepBits(bits):
                    for bit in range(NUM_LEASE_BITS):
                        if bits >> bit & 1 and self.dirty[bit] not in self.alive:
                            self.dirty[bit] = 0
                case Publish(topic, message) if not isinstance(message, Tick):
                    assert message.sequence == self.sequences.get(topic, 0) + 1
                    self.sequences[topic] = message.sequence

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), two_topics=st.booleans(), fresh=st.booleans())
    def engine_joins(self, data: st.DataObject, two_topics: bool, fresh: bool) -> None:
        pid = data.draw(st.sampled_from(sorted(self.alive)))
        known = [i for i in self.infos.values() if i.pid == pid and i.epoch in self.state.engines]
        if fresh or not known:
            self.next_epoch += 1
            topic = (b"t" if two_topics else b"f") * 32
            bit = data.draw(st.integers(-1, NUM_LEASE_BITS))
            info = engine(self.next_epoch, pid=pid, fingerprint=topic, lease_bit=bit)
        else:
            info = known[0]
        reply, actions = join(self.state, info)
        bit = reply.lease_bit
        if bit >= 0:
            assert self.dirty[bit] in (0, pid), "a bit was handed on before it was swept"
            self.dirty[bit] = pid
        self.infos[info.epoch] = msgspec.structs.replace(info, lease_bit=bit)
        self.obey(actions)

    @precondition(lambda self: self.state.engines)
    @rule(data=st.data())
    def engine_leaves(self, data: st.DataObject) -> None:
        info = self.infos[data.draw(st.sampled_from(sorted(self.state.engines)))]
        self.obey(say(self.state, info, Leave(epoch=info.epoch)))

    @precondition(lambda self: self.watched)
    @rule(data=st.data())
    def process_dies(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(sorted(self.watched)))
        self.alive.discard(process.pid)
        self.watched.discard(process)
        self.obey(decide(self.state, Died(process), 0.0))
        assert process.pid not in self.dirty, "leases of the dead are left"

    @rule()
    def time_passes(self) -> None:
        self.obey(decide(self.state, Clock(), 0.0))

    @invariant()
    def bits_are_apart(self) -> None:
        granted = [engine.info.lease_bit for engine in self.state.engines.values()]
        bits = [bit for bit in granted if bit >= 0]
        assert len(bits) == len(set(bits))

    @invariant()
    def everybody_in_the_roster_is_watched(self) -> None:
        needed = {p for engine in self.state.engines.values() for p in engine.processes}
        assert needed <= self.watched == self.state.watched
        assert all(process.pid in self.alive for process in needed)


Anything.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase


def test_log_levels_say_what_needs_attention() -> None:
    state = new_state()
    _, actions = join(state, engine(5))
    assert [line.level for line in only(actions, Log)] == [logging.INFO]
    decide(state, Clock(), 1.0)
    (line,) = only(decide(state, Clock(), 3.5), Log)
    assert (line.level, line.event) == (logging.WARNING, "suspected")
