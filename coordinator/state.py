"""What the coordinator does about each input.  Pure.

``decide`` is the only function that changes a ``State``.  It does no I/O, reads no clock and
never raises for what an engine sent: it returns actions, and the shell around it (server.py,
which has the sockets) carries them out in their order.
"""

from __future__ import annotations

import math

from kvshm._base.ids import NO_LEASE_BIT
from kvshm._node.protocol import (
    MAX_EVENTS_BYTES,
    EngineEvents,
    EngineGone,
    EngineInfo,
    EngineRecovered,
    EngineSuspected,
    Events,
    Heartbeat,
    Join,
    JoinFirst,
    Leave,
    Tick,
)
from kvshm._shm.layout import RECORD_BYTES

from .actions import (
    Action,
    BadMessage,
    CheckResult,
    ClockTick,
    EngineMessage,
    Input,
    Log,
    ProcessDeath,
    SendBroadcast,
    Sender,
    SendReply,
    SweepBits,
    SweepFiles,
    TableUnused,
)
from .joining import admit, on_bad_join, on_join, refuse, refuse_place
from .log_lines import Event
from .roster import Engine, State


def decide(state: State, item: Input, now: float) -> list[Action]:
    """Return the actions that ``item`` requires, and update ``state``."""
    match item:
        case EngineMessage():
            if isinstance(item.message, Join):
                return on_join(state, item.sender, item.message)
            return _on_message(state, item.sender, item.message, now)
        case CheckResult():
            return _on_check_result(state, item, now)
        case BadMessage():
            if item.join is not None:
                return on_bad_join(state, item.sender, item.join, item.error)
            return state.report(item.sender, Event.GARBLED, item.error)
        case ProcessDeath():
            return _on_death(state, item, now)
        case TableUnused():
            return _sweep(state.bits.table_unused(item.epoch)) + state.release_tables()
        case ClockTick():
            return _on_clock(state, now)


def _on_check_result(state: State, result: CheckResult, now: float) -> list[Action]:
    """Admit or refuse the engine whose table was checked.  During the check its epoch may have
    ended, or its process may have got as many places in the roster as one process can have."""
    epoch = result.join.engine.epoch
    if result.refusal is not None:
        return refuse(state, result.sender, result.join.engine, result.refusal)
    state.kept.add(epoch)  # the shell keeps the checked table
    if epoch in state.ended:
        return state.release_tables()
    refusal = refuse_place(state, result.sender, result.join.engine)
    if refusal is not None:
        return [*refuse(state, result.sender, result.join.engine, refusal), *state.release_tables()]
    return admit(state, result.sender, result.join, now)


# -- messages of engines in the roster


def _on_message(
    state: State, sender: Sender, message: Leave | Events | Heartbeat, now: float
) -> list[Action]:
    engine = state.engines.get(message.epoch)
    if engine is None:
        # Events of an epoch that is not in the roster are dropped.  A Leave needs no answer.
        if isinstance(message, Leave):
            return _on_leave_after_end(state, sender, message.epoch)
        reply = JoinFirst(coordinator_epoch=state.epoch, engine_epoch=message.epoch)
        return [SendReply(sender.route, reply)]
    if (sender.uid, sender.pid) != (state.uid, engine.pid):
        return state.report(sender, Event.IMPOSTOR, f"speaks for pid {engine.pid}")
    actions = _record_message(state, engine, now)
    match message:
        case Leave():
            actions += _end(state, engine.info, "left")
            actions.append(_log_end(state, Event.LEAVE, engine.info, "left"))
        case Heartbeat(sequence=sequence):
            # If it is higher, the engine dropped events.  The next tick tells all engines.
            engine.sequence = max(engine.sequence, sequence)
        case Events():
            actions += _relay(state, sender, engine, message)
    return actions


def _record_message(state: State, engine: Engine, now: float) -> list[Action]:
    engine.last_heard = now
    if not engine.suspected:
        return []
    engine.suspected = False
    info = engine.info
    return [
        state.broadcast(info.fingerprint, EngineRecovered, epoch=info.epoch),
        Log(Event.RECOVERED, {"engine": info.name, "pid": info.pid}),
    ]


def _relay(state: State, sender: Sender, engine: Engine, events: Events) -> list[Action]:
    if (size := len(events.records)) % RECORD_BYTES or size > MAX_EVENTS_BYTES:
        return state.report(
            sender, Event.GARBLED, f"{size} bytes are not the records of one message"
        )
    if events.sequence <= engine.sequence:
        return state.report(sender, Event.REPEATED, f"events {events.sequence} came again")
    engine.sequence = events.sequence
    relayed = {"epoch": events.epoch, "engine_sequence": events.sequence}
    topic = engine.info.fingerprint
    sent = state.broadcast(topic, EngineEvents, records=events.records, **relayed)
    return [sent._replace(awaited=events.awaited)]


# -- ends


def _on_death(state: State, died: ProcessDeath, now: float) -> list[Action]:
    """The death of any process of an engine ends the epoch.  After a worker's death the log line
    about the end is held back: if a Leave follows, the end was in order.  An engine that leaves
    retires its table (``died.retired``), then gives it up; its Leave may come later."""
    actions: list[Action] = []
    engine = state.engines.get(died.epoch)
    if engine is not None:
        actions = _end_by_death(state, engine.info, died)
        state.ended_by_worker[died.epoch] = engine, now + state.timing.late_leave_seconds
    if died.owner and died.epoch in state.ended_by_worker:
        engine, _ = state.ended_by_worker.pop(died.epoch)
        if died.retired:
            actions.append(_log_end(state, Event.LEAVE, engine.info, "left"))
        else:
            reason = f"process {engine.info.pid} died"
            actions.append(_log_end(state, Event.DEATH, engine.info, reason))
    return [*actions, SweepFiles()]


def _end_by_death(state: State, info: EngineInfo, died: ProcessDeath) -> list[Action]:
    if died.retired:
        return _end(state, info, "left")
    reason = f"process {info.pid} died" if died.owner else "a worker's process ended"
    return _end(state, info, reason, info.lease_bit)


def _on_leave_after_end(state: State, sender: Sender, epoch: int) -> list[Action]:
    """If the epoch ended with a worker, this Leave shows that the worker did not crash."""
    engine, _ = state.ended_by_worker.get(epoch, (None, 0.0))
    if engine is None or (sender.uid, sender.pid) != (state.uid, engine.pid):
        return []
    del state.ended_by_worker[epoch]
    return [_log_end(state, Event.LEAVE, engine.info, "left")]


def _end(state: State, info: EngineInfo, reason: str, bit: int = NO_LEASE_BIT) -> list[Action]:
    """End this epoch: tell all engines, then clear the leases.

    ``bit``: the lease bit of a dead engine, to be swept.  Not given for an engine that leaves: it
    returns the leases of its last copies itself, and a sweep would clear them during these copies.
    """
    state.end(info.epoch)
    gone = state.broadcast(info.fingerprint, EngineGone, epoch=info.epoch, reason=reason)
    mask = 0 if bit == NO_LEASE_BIT else 1 << bit
    return [gone, *_sweep(mask), *state.release_tables()]


def _log_end(state: State, event: Event, info: EngineInfo, reason: str) -> Action:
    about = {"engine": info.name, "pid": info.pid, "epoch": f"{info.epoch:016x}"}
    return Log(event, {**about, "reason": reason, "engines": len(state.engines)})


def _sweep(mask: int) -> list[Action]:
    return [SweepBits(mask)] if mask else []


# -- time


def _on_clock(state: State, now: float) -> list[Action]:
    _discount_own_pause(state, now)
    actions: list[Action] = []
    for engine in state.engines.values():
        if not engine.suspected and now - engine.last_heard > state.timing.suspect_seconds:
            actions += _suspect(state, engine, now)
    actions += _ticks(state)
    actions += _end_grace(state, now)
    for engine, until in list(state.ended_by_worker.values()):
        if now >= until:
            del state.ended_by_worker[engine.info.epoch]
            actions.append(_log_end(state, Event.DEATH, engine.info, "a worker's process died"))
    if now >= state.schedule.next_leftovers:
        state.schedule.next_leftovers = now + state.timing.leftovers_seconds
        actions.append(SweepFiles())
    if now >= state.schedule.next_cleanup:
        state.schedule.next_cleanup = now + state.timing.cleanup_seconds
        state.forget_idle_topics()
    return actions


def _end_grace(state: State, now: float) -> list[Action]:
    """Once the engines of an earlier coordinator have had time to join, clear the leases of the
    engines that did not.  An engine that was stopped and loses leases by this finds out when it
    re-checks its copies."""
    if state.schedule.grace_until is None:
        state.schedule.grace_until = now + state.timing.grace_seconds
    if state.schedule.grace_over or now < state.schedule.grace_until:
        return []
    state.schedule.grace_over = True
    return _sweep(state.bits.free)


def _discount_own_pause(state: State, now: float) -> None:
    """Do not count time in which this process was stopped as silence of the engines: their messages
    are still unread.  After a long stop every engine has its full time again."""
    timing = state.timing
    since = 0.0 if state.schedule.last_clock is None else now - state.schedule.last_clock
    state.schedule.last_clock = now
    if since > 2 * timing.heartbeat_seconds:
        long = since > timing.suspect_seconds
        discount = math.inf if long else since - timing.heartbeat_seconds
        for engine in state.engines.values():
            engine.last_heard = min(now, engine.last_heard + discount)


def _suspect(state: State, engine: Engine, now: float) -> list[Action]:
    engine.suspected = True
    info, silent = engine.info, round(now - engine.last_heard, 1)
    about = {"engine": info.name, "pid": info.pid, "silent_s": silent}
    return [
        state.broadcast(info.fingerprint, EngineSuspected, epoch=info.epoch),
        Log(Event.SUSPECTED, about),
    ]


def _ticks(state: State) -> list[Action]:
    """One Tick for each topic that has engines.  A Tick repeats the number of the topic's last
    broadcast and gets none of its own; ``num_incompatible`` counts the engines of other topics."""
    heard: dict[bytes, dict[int, int]] = {}
    for epoch, engine in state.engines.items():
        heard.setdefault(engine.info.fingerprint, {})[epoch] = engine.sequence
    return [
        SendBroadcast(
            topic,
            Tick(
                coordinator_epoch=state.epoch,
                sequence=state.topics[topic],
                sequences=sequences,
                num_incompatible=len(state.engines) - len(sequences),
            ),
        )
        for topic, sequences in heard.items()
    ]
