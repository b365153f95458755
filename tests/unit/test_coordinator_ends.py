"""What the coordinator decides about silence, ends and its own restart."""

from __future__ import annotations

import logging

from kvshm.coordinator.actions import (
    Action,
    Clock,
    Died,
    EndLife,
    Log,
    Owner,
    Publish,
    Received,
    SweepBits,
    SweepLeftovers,
    SweepProcess,
    UnlinkEpoch,
    Unwatch,
    Watch,
    WriteLease,
)
from kvshm.coordinator.lease_bits import NOBODY
from kvshm.coordinator.roster import State
from kvshm.coordinator.state import decide
from kvshm.protocol import (
    EngineGone,
    EngineInfo,
    EngineRecovered,
    EngineSuspected,
    Heartbeat,
    Leave,
    Tick,
)
from kvshm.segment import Identity

from .coordinators import (
    BOOT,
    engine,
    join,
    new_state,
    only,
    peer_of,
    process,
    published,
    say,
)

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


def test_time_in_which_the_coordinator_stood_still_is_nobodys_silence() -> None:
    """Less of it than an engine may be silent: the heartbeats of that time are yet to be read."""
    state = new_state()
    decide(state, Clock(), 10.0)
    join(state, engine(5), now=10.0)
    say(state, engine(5), Heartbeat(epoch=5, sequence=0), now=10.4)
    decide(state, Clock(), 11.0)
    # It stands still from here to 13.9, and the engine beats at 11.4, 12.4 and 13.4.
    assert all(isinstance(m, Tick) for m in published(decide(state, Clock(), 13.9)))
    assert all(isinstance(m, Tick) for m in published(decide(state, Clock(), 14.9)))
    suspected = published(decide(state, Clock(), 15.9))[0]  # it did not beat after all
    assert isinstance(suspected, EngineSuspected)


def test_a_suspect_that_joins_again_has_recovered() -> None:
    state = new_state()
    join(state, engine(5), now=0.0)
    for now in (1.0, 2.0, 3.5):
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
    # Its leases are not swept: process 5 may still copy, and will give them back.
    assert [type(action) for action in actions] == [EndLife, Publish, UnlinkEpoch, Log]
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


def test_log_levels_say_what_needs_attention() -> None:
    state = new_state()
    _, actions = join(state, engine(5))
    assert [line.level for line in only(actions, Log)] == [logging.INFO]
    decide(state, Clock(), 2.0)
    (line,) = only(decide(state, Clock(), 3.5), Log)
    assert (line.level, line.event) == (logging.WARNING, "suspected")


# -- a worker's end: a death, or the beginning of a stop


def logged(actions: list[Action]) -> list[tuple[str, object]]:
    return [(line.event, line.fields["reason"]) for line in only(actions, Log)]


def with_workers() -> tuple[State, EngineInfo, list[Action]]:
    """An engine of its own process and two workers, one of which has ended at 1.0."""
    state, info = new_state(), engine(5, ranks=(6, 7))
    join(state, info)
    return state, info, decide(state, Died(process(6)), 1.0)


def test_a_workers_end_withdraws_at_once_and_is_not_yet_called_a_death() -> None:
    state, info, actions = with_workers()
    assert actions[0] == EndLife(info.table)
    assert [type(message) for message in published(actions)] == [EngineGone]
    assert logged(actions) == []
    assert logged(decide(state, Died(process(7)), 1.1)) == []
    assert logged(say(state, info, Leave(epoch=5), 1.5)) == [("leave", "left")]
    assert logged(decide(state, Died(process(5)), 3.0)) == []
    assert logged(decide(state, Clock(), 100.0)) == []


def test_a_workers_end_is_a_death_if_its_engine_does_not_leave() -> None:
    state, info, _ = with_workers()
    assert logged(decide(state, Clock(), 1.9)) == []
    assert logged(decide(state, Clock(), 2.0)) == [("death", "a worker's process died")]
    assert logged(say(state, info, Leave(epoch=5), 2.1)) == []
    assert logged(decide(state, Clock(), 3.0)) == []


def test_a_workers_end_is_a_death_if_its_engine_dies() -> None:
    state, info, _ = with_workers()
    impostor = peer_of(engine(6))
    assert logged(decide(state, Received(impostor, Leave(epoch=info.epoch)), 1.5)) == []
    assert logged(decide(state, Died(process(5)), 1.6)) == [("death", "process 5 died")]
    assert logged(decide(state, Clock(), 100.0)) == []
