"""What the coordinator decides about silence, ends and its own restart."""

from __future__ import annotations

import logging

from kvshm._base.timing import TIMING
from kvshm._node.protocol import (
    EngineGone,
    EngineInfo,
    EngineRecovered,
    EngineSuspected,
    Heartbeat,
    Leave,
    Tick,
)
from kvshm._shm.layout import NUM_LEASE_BITS
from kvshm.coordinator.actions import (
    Action,
    ClockTick,
    EngineMessage,
    Log,
    ProcessDeath,
    ReleaseTable,
    SendBroadcast,
    SendReply,
    SweepBits,
    SweepFiles,
    TableUnused,
)
from kvshm.coordinator.roster import State
from kvshm.coordinator.state import decide

from .coordinators import (
    engine,
    join,
    new_state,
    only,
    published,
    say,
    sender_of,
)

# -- suspicion


def test_silence_is_suspicion_and_a_word_ends_it() -> None:
    state = new_state()
    join(state, engine(5), now=10.0)
    decide(state, ClockTick(), 12.0)
    assert not [m for m in published(decide(state, ClockTick(), 13.0)) if not isinstance(m, Tick)]
    actions = decide(state, ClockTick(), 13.5)
    assert isinstance(published(actions)[0], EngineSuspected)
    assert not only(actions, SweepBits) + only(actions, ReleaseTable)
    assert not [m for m in published(decide(state, ClockTick(), 15.0)) if not isinstance(m, Tick)]
    actions = say(state, engine(5), Heartbeat(epoch=5, sequence=0), now=16.0)
    assert isinstance(published(actions)[0], EngineRecovered)
    assert say(state, engine(5), Heartbeat(epoch=5, sequence=0), now=16.5) == []


def test_a_stopped_coordinator_suspects_no_one() -> None:
    state = new_state()
    join(state, engine(5), now=0.0)
    decide(state, ClockTick(), 0.5)
    assert all(isinstance(m, Tick) for m in published(decide(state, ClockTick(), 100.0)))
    assert all(isinstance(m, Tick) for m in published(decide(state, ClockTick(), 102.0)))


def test_time_in_which_the_coordinator_stood_still_is_no_ones_silence() -> None:
    """Less of it than an engine may be silent: the heartbeats of that time are yet to be read."""
    state = new_state()
    decide(state, ClockTick(), 10.0)
    join(state, engine(5), now=10.0)
    say(state, engine(5), Heartbeat(epoch=5, sequence=0), now=10.4)
    decide(state, ClockTick(), 11.0)
    # It stands still from here to 13.9, and the engine beats at 11.4, 12.4 and 13.4.
    assert all(isinstance(m, Tick) for m in published(decide(state, ClockTick(), 13.9)))
    assert all(isinstance(m, Tick) for m in published(decide(state, ClockTick(), 14.9)))
    suspected = published(decide(state, ClockTick(), 15.9))[0]  # it did not beat after all
    assert isinstance(suspected, EngineSuspected)


def test_a_suspect_that_joins_again_has_recovered() -> None:
    state = new_state()
    join(state, engine(5), now=0.0)
    for now in (1.0, 2.0, 3.5):
        decide(state, ClockTick(), now)
    _, actions = join(state, engine(5, lease_bit=0), now=4.0)
    assert [type(message) for message in published(actions)] == [EngineRecovered]


# -- ends


def test_a_death_is_reported_before_its_leases_are_swept() -> None:
    state = new_state()
    join(state, engine(5))
    join(state, engine(6))
    actions = decide(state, ProcessDeath(5, owner=True), 0.0)
    gone = EngineGone(coordinator_epoch=1, sequence=3, epoch=5, reason="process 5 died")
    assert actions[:2] == [SendBroadcast(b"f" * 32, gone), SweepBits(1 << 0)]
    [line] = only(actions, Log)
    assert (line.event.id, line.fields["engine"]) == ("death", "e5")
    assert actions[-1] == SweepFiles()
    assert len(actions) == 4
    assert set(state.engines) == {6}
    # Its workers may hold leases: only when no one has the table are they swept for good.
    assert join(state, engine(7))[0].lease_bit == 2
    assert decide(state, TableUnused(5), 0.0) == [SweepBits(1 << 0), ReleaseTable(5)]


def test_a_dead_rank_ends_the_epoch_and_the_bit_waits_for_the_rest() -> None:
    state = new_state()
    join(state, engine(5, ranks=(51, 52)))
    actions = decide(state, ProcessDeath(5, owner=False), 0.0)
    assert only(actions, SweepBits) == [SweepBits(1)]
    assert not only(actions, ReleaseTable)
    assert state.bits.of_process(5) == {5}
    assert not state.bits.free & 1
    again = decide(state, ProcessDeath(5, owner=True), 0.0)
    assert not only(again, SweepBits)
    assert not published(again)
    assert state.bits.of_process(5) == {5}
    assert not state.bits.free & 1
    actions = decide(state, TableUnused(5), 0.0)
    assert only(actions, SweepBits) == [SweepBits(1)]  # again, now that it is certain
    assert state.bits.of_process(5) == set()
    assert state.bits.free & 1


def test_one_process_with_two_engines() -> None:
    state = new_state()
    join(state, engine(5, pid=9))
    join(state, engine(6, pid=9))
    gone = [decide(state, ProcessDeath(epoch, owner=True), 0.0) for epoch in (5, 6)]
    assert [[m.epoch for m in published(actions)] for actions in gone] == [[5], [6]]
    swept = [decide(state, TableUnused(epoch), 0.0) for epoch in (5, 6)]
    assert swept == [[SweepBits(1), ReleaseTable(5)], [SweepBits(2), ReleaseTable(6)]]


def test_leave_keeps_the_bit_for_the_same_process() -> None:
    state = new_state()
    join(state, engine(5))
    actions = say(state, engine(5), Leave(epoch=5))
    # Its leases are not swept: process 5 may still copy, and will give them back.
    assert [type(action) for action in actions] == [SendBroadcast, Log]
    reply, _ = join(state, engine(6))
    assert reply.lease_bit == 1  # not handed on: process 5 may still release with it
    reply, actions = join(state, engine(7, pid=5, lease_bit=0))
    assert reply.lease_bit == 0
    # The old table goes, and the bit stays with the new one.
    assert decide(state, TableUnused(5), 0.0) == [ReleaseTable(5)]
    assert state.bits.of_process(5) == {7}
    assert not state.bits.free & 1
    assert not only(decide(state, ProcessDeath(7, owner=False), 0.0), ReleaseTable)
    assert decide(state, TableUnused(7), 0.0) == [SweepBits(1), ReleaseTable(7)]


def test_engines_beyond_the_bits_go_without_one() -> None:
    state = new_state()
    bits = [join(state, engine(epoch))[0].lease_bit for epoch in range(1, 30)]
    assert bits == [*range(28), -1]
    decide(state, ProcessDeath(3, owner=True), 0.0)
    assert join(state, engine(40))[0].lease_bit == -1, "somebody may still have its table"
    decide(state, TableUnused(3), 0.0)
    assert join(state, engine(41))[0].lease_bit == 2


def test_the_table_of_an_engine_without_a_bit_goes_with_its_end() -> None:
    state = new_state()
    for epoch in range(1, 30):
        join(state, engine(epoch))
    actions = decide(state, ProcessDeath(29, owner=True), 0.0)
    assert not only(actions, SweepBits)
    assert only(actions, ReleaseTable) == [ReleaseTable(29)]
    assert only(say(state, engine(1), Leave(epoch=1)), ReleaseTable) == []
    assert decide(state, TableUnused(29), 0.0) == []


def test_a_bit_never_used_comes_before_one_that_was() -> None:
    state = new_state()
    join(state, engine(5))
    decide(state, ProcessDeath(5, owner=True), 0.0)
    decide(state, TableUnused(5), 0.0)
    assert join(state, engine(6))[0].lease_bit == 1


# -- restarts

LAST = NUM_LEASE_BITS - 1
ALL = (1 << NUM_LEASE_BITS) - 1


def test_who_comes_back_keeps_its_bit_and_newcomers_begin_at_the_other_end() -> None:
    state = new_state(grace_over=False)
    reply, actions = join(state, engine(7))
    assert reply.lease_bit == LAST
    assert only(actions, SweepBits) == [SweepBits(1 << LAST)], "somebody dead may have had it"
    assert actions.index(SweepBits(1 << LAST)) < actions.index(only(actions, SendReply)[0])
    reply, actions = join(state, engine(6, lease_bit=1))
    assert reply.lease_bit == 1
    assert not only(actions, SweepBits), "its own leases"
    reply, actions = join(state, engine(6, lease_bit=1))
    assert not only(actions, SweepBits)


def test_who_presents_a_bit_that_is_taken_gets_another_that_is_swept() -> None:
    state = new_state(grace_over=False)
    join(state, engine(6, lease_bit=1))
    reply, actions = join(state, engine(7, lease_bit=1))
    assert reply.lease_bit == LAST
    assert only(actions, SweepBits) == [SweepBits(1 << LAST)]


def test_bits_of_no_one_are_swept_once_after_a_grace_period() -> None:
    state = new_state(grace_over=False)
    decide(state, ClockTick(), 100.0)
    join(state, engine(5, lease_bit=0), now=100.0)
    join(state, engine(6), now=100.0)
    assert not only(decide(state, ClockTick(), 100.0 + TIMING.grace_seconds - 0.1), SweepBits)
    actions = decide(state, ClockTick(), 100.0 + TIMING.grace_seconds)
    assert only(actions, SweepBits) == [SweepBits(ALL & ~1 & ~(1 << LAST))]
    assert not only(decide(state, ClockTick(), 200.0), SweepBits)
    reply, actions = join(state, engine(7), now=200.0)
    assert reply.lease_bit == 1
    assert not only(actions, SweepBits)


def test_leftovers_are_looked_for_at_once_and_now_and_then() -> None:
    state = new_state()
    assert only(decide(state, ClockTick(), 0.0), SweepFiles) == [SweepFiles()]
    join(state, engine(5))
    assert not only(decide(state, ClockTick(), 4.0), SweepFiles)
    assert only(decide(state, ClockTick(), 6.0), SweepFiles) == [SweepFiles()]


def test_log_levels_say_what_needs_attention() -> None:
    state = new_state()
    _, actions = join(state, engine(5))
    assert [line.event.level for line in only(actions, Log)] == [logging.INFO]
    decide(state, ClockTick(), 2.0)
    (line,) = only(decide(state, ClockTick(), 3.5), Log)
    assert (line.event.level, line.event.id) == (logging.WARNING, "suspected")


# -- a worker's end: a death, or the beginning of a stop


def logged(actions: list[Action]) -> list[tuple[str, object]]:
    return [(line.event.id, line.fields["reason"]) for line in only(actions, Log)]


def with_workers() -> tuple[State, EngineInfo, list[Action]]:
    state, info = new_state(), engine(5, ranks=(6, 7))
    join(state, info)
    return state, info, decide(state, ProcessDeath(5, owner=False), 1.0)


def test_a_workers_end_withdraws_at_once_and_is_not_yet_called_a_death() -> None:
    state, info, actions = with_workers()
    assert [type(message) for message in published(actions)] == [EngineGone]
    assert logged(actions) == []
    assert logged(say(state, info, Leave(epoch=5), 1.5)) == [("leave", "left")]
    assert logged(decide(state, ProcessDeath(5, owner=True), 3.0)) == []
    assert logged(decide(state, ClockTick(), 100.0)) == []


def test_a_workers_end_is_a_death_if_its_engine_does_not_leave() -> None:
    state, info, _ = with_workers()
    assert logged(decide(state, ClockTick(), 1.9)) == []
    assert logged(decide(state, ClockTick(), 2.0)) == [("death", "a worker's process died")]
    assert logged(say(state, info, Leave(epoch=5), 2.1)) == []
    assert logged(decide(state, ClockTick(), 3.0)) == []


def test_a_workers_end_is_a_death_if_its_engine_dies() -> None:
    state, info, _ = with_workers()
    impostor = sender_of(engine(6))
    assert logged(decide(state, EngineMessage(impostor, Leave(epoch=info.epoch)), 1.5)) == []
    assert logged(decide(state, ProcessDeath(5, owner=True), 1.6)) == [("death", "process 5 died")]
    assert logged(decide(state, ClockTick(), 100.0)) == []


def test_a_table_that_is_given_up_in_order_is_a_leave_whose_message_comes_later() -> None:
    state, info = new_state(), engine(5)
    join(state, info)
    actions = decide(state, ProcessDeath(5, owner=True, retired=True), 1.0)
    assert [message.reason for message in published(actions)] == ["left"]
    assert not only(actions, SweepBits), "its process may still copy, and gives its leases back"
    assert logged(actions) == [("leave", "left")]
    assert logged(say(state, info, Leave(epoch=5), 1.1)) == []
    assert logged(decide(state, ClockTick(), 100.0)) == []


def test_a_workers_end_is_explained_by_a_table_given_up_in_order() -> None:
    state, _, _ = with_workers()
    assert logged(decide(state, ProcessDeath(5, owner=True, retired=True), 1.5)) == [
        ("leave", "left")
    ]
    assert logged(decide(state, ClockTick(), 100.0)) == []
