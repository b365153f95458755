"""What the coordinator does about what happens.  Pure.

``decide`` is the only function that changes a ``State``.  It does no I/O, reads no clock and
never raises for what an engine sent: it returns actions, and the shell (server.py) carries
them out in their order.
"""

from __future__ import annotations

import logging
import math

from kvshm.ids import NO_LEASE_BIT
from kvshm.node.protocol import (
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
from kvshm.shm.layout import RECORD_BYTES

from .actions import (
    Action,
    Clock,
    Deserted,
    Died,
    Event,
    Examined,
    Foreign,
    Garbled,
    Log,
    Publish,
    Received,
    Send,
    Sender,
    SweepBits,
    SweepFiles,
)
from .joining import admit, on_foreign, on_join, refuse, refuse_place
from .roster import Engine, State


def decide(state: State, event: Event, now: float) -> list[Action]:
    """Return what has to be done about ``event``, and take note of it in ``state``."""
    match event:
        case Received():
            if isinstance(event.message, Join):
                return on_join(state, event.sender, event.message)
            return _on_message(state, event.sender, event.message, now)
        case Examined():
            return _on_examined(state, event, now)
        case Foreign():
            return on_foreign(state, event.sender, event.join, event.error)
        case Garbled():
            return state.complain(event.sender, "garbled", event.error)
        case Died():
            return _on_death(state, event, now)
        case Deserted():
            return _sweep(state.bits.deserted(event.epoch)) + state.forget()
        case Clock():
            return _on_clock(state, now)


def _on_examined(state: State, event: Examined, now: float) -> list[Action]:
    """Meanwhile the epoch may have ended, or others of its process have taken the places."""
    epoch = event.join.engine.epoch
    if event.refusal is not None:
        return refuse(state, event.sender, event.join.engine, event.refusal)
    state.kept.add(epoch)
    if epoch in state.ended:
        return state.forget()
    refusal = refuse_place(state, event.sender, event.join.engine)
    if refusal is not None:
        return [*refuse(state, event.sender, event.join.engine, refusal), *state.forget()]
    return admit(state, event.sender, event.join, now)


# -- messages of engines in the roster


def _on_message(
    state: State, sender: Sender, message: Leave | Events | Heartbeat, now: float
) -> list[Action]:
    engine = state.engines.get(message.epoch)
    if engine is None:
        # Events of an epoch that is not in the roster are dropped; a leave has come true.
        if isinstance(message, Leave):
            return _explain(state, sender, message.epoch)
        reply = JoinFirst(coordinator_epoch=state.epoch, engine_epoch=message.epoch)
        return [Send(sender.route, reply)]
    if (sender.uid, sender.pid) != (state.uid, engine.pid):
        return state.complain(sender, "impostor", f"speaks for pid {engine.pid}")
    actions = _heard(state, engine, now)
    match message:
        case Leave():
            actions += _end(state, engine.info, "left")
            actions.append(_log_end(state, "leave", engine.info, "left"))
        case Heartbeat(sequence=sequence):
            # Higher than relayed: the engine had to drop some.  The next tick tells everybody.
            engine.sequence = max(engine.sequence, sequence)
        case Events():
            actions += _relay(state, sender, engine, message)
    return actions


def _heard(state: State, engine: Engine, now: float) -> list[Action]:
    engine.last_heard = now
    if not engine.suspected:
        return []
    engine.suspected = False
    info = engine.info
    return [
        state.publish(info.fingerprint, EngineRecovered, epoch=info.epoch),
        Log(logging.INFO, "recovered", {"engine": info.name, "pid": info.pid}),
    ]


def _relay(state: State, sender: Sender, engine: Engine, events: Events) -> list[Action]:
    if (size := len(events.records)) % RECORD_BYTES or size > MAX_EVENTS_BYTES:
        return state.complain(sender, "garbled", f"{size} bytes are no records of one message")
    if events.sequence <= engine.sequence:
        return state.complain(sender, "repeated", f"events {events.sequence} came again")
    engine.sequence = events.sequence
    relayed = {"epoch": events.epoch, "engine_sequence": events.sequence}
    topic = engine.info.fingerprint
    return [state.publish(topic, EngineEvents, records=events.records, **relayed)]


# -- ends


def _on_death(state: State, died: Died, now: float) -> list[Action]:
    """A process without which the epoch is at its end has gone.  If it was a worker's, the engine's
    next word or its silence tells whether that is worth a line.  An engine that leaves gives its
    table up, too, and its Leave may come later."""
    actions: list[Action] = []
    engine = state.engines.get(died.epoch)
    if engine is not None:
        actions = _end_by_death(state, engine.info, died)
        state.unexplained[died.epoch] = engine, now + state.timing.late_leave_seconds
    if died.owner and died.epoch in state.unexplained:
        engine, _ = state.unexplained.pop(died.epoch)
        if died.retired:
            actions.append(_log_end(state, "leave", engine.info, "left"))
        else:
            reason = f"process {engine.info.pid} died"
            actions.append(_log_end(state, "death", engine.info, reason))
    return [*actions, SweepFiles()]


def _end_by_death(state: State, info: EngineInfo, died: Died) -> list[Action]:
    if died.retired:
        return _end(state, info, "left")
    reason = f"process {info.pid} died" if died.owner else "a worker's process ended"
    return _end(state, info, reason, info.lease_bit)


def _explain(state: State, sender: Sender, epoch: int) -> list[Action]:
    """An engine says that it leaves after its worker has ended: that was no death."""
    engine, _ = state.unexplained.get(epoch, (None, 0.0))
    if engine is None or (sender.uid, sender.pid) != (state.uid, engine.pid):
        return []
    del state.unexplained[epoch]
    return [_log_end(state, "leave", engine.info, "left")]


def _end(state: State, info: EngineInfo, reason: str, bit: int = NO_LEASE_BIT) -> list[Action]:
    """This epoch is over: everybody is told, then leases are cleared.

    ``bit``: that of the dead.  A process that leaves keeps its bit, and whatever it still copies
    gives its leases back itself: a sweep would take them from under it.
    """
    state.end(info.epoch)
    gone = state.publish(info.fingerprint, EngineGone, epoch=info.epoch, reason=reason)
    mask = 0 if bit == NO_LEASE_BIT else 1 << bit
    return [gone, *_sweep(mask), *state.forget()]


def _log_end(state: State, event: str, info: EngineInfo, reason: str) -> Action:
    about = {"engine": info.name, "pid": info.pid, "epoch": f"{info.epoch:016x}"}
    return Log(logging.INFO, event, {**about, "reason": reason, "engines": len(state.engines)})


def _sweep(mask: int) -> list[Action]:
    return [SweepBits(mask)] if mask else []


# -- time


def _on_clock(state: State, now: float) -> list[Action]:
    _forgive(state, now)
    actions: list[Action] = []
    for engine in state.engines.values():
        if not engine.suspected and now - engine.last_heard > state.timing.suspect_seconds:
            actions += _suspect(state, engine, now)
    actions += _ticks(state)
    actions += _settle(state, now)
    for engine, until in list(state.unexplained.values()):
        if now >= until:
            del state.unexplained[engine.info.epoch]
            reason = "a worker's process died"
            actions.append(_log_end(state, "death", engine.info, reason))
    if now >= state.next_leftovers:
        state.next_leftovers = now + state.timing.cleanup_seconds
        state.forget_idle_topics()
        actions.append(SweepFiles())
    return actions


def _settle(state: State, now: float) -> list[Action]:
    """Once all that a coordinator before this one knew have had time to come back, clear the leases
    of those that have not.  One that stood still and has lost leases so finds out when it checks
    its copies again."""
    if state.settled_at is None:
        state.settled_at = now + state.timing.grace_seconds
    if state.settled or now < state.settled_at:
        return []
    state.settled = True
    return _sweep(state.bits.free)


def _forgive(state: State, now: float) -> None:
    """Time in which this process stood still is nobody's silence: what was said meanwhile is
    yet to be read.  After a long one every engine has its full time again."""
    since = 0.0 if state.last_clock is None else now - state.last_clock
    state.last_clock = now
    if since > 2 * state.timing.heartbeat_seconds:
        still = (
            math.inf
            if since > state.timing.suspect_seconds
            else since - state.timing.heartbeat_seconds
        )
        for engine in state.engines.values():
            engine.last_heard = min(now, engine.last_heard + still)


def _suspect(state: State, engine: Engine, now: float) -> list[Action]:
    engine.suspected = True
    info, silent = engine.info, round(now - engine.last_heard, 1)
    about = {"engine": info.name, "pid": info.pid, "silent_s": silent}
    return [
        state.publish(info.fingerprint, EngineSuspected, epoch=info.epoch),
        Log(logging.WARNING, "suspected", about),
    ]


def _ticks(state: State) -> list[Action]:
    """One Tick for each topic that has engines; ticks are not numbered themselves."""
    heard: dict[bytes, dict[int, int]] = {}
    for epoch, engine in state.engines.items():
        heard.setdefault(engine.info.fingerprint, {})[epoch] = engine.sequence
    return [
        Publish(
            topic,
            Tick(
                coordinator_epoch=state.epoch,
                sequence=state.topics[topic],
                sequences=sequences,
                strangers=len(state.engines) - len(sequences),
            ),
        )
        for topic, sequences in heard.items()
    ]
