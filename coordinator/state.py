"""What the coordinator does about what happens.  Pure.

``decide`` is the only function that changes a ``State``.  It does no I/O, reads no clock and
never raises for what an engine sent: it returns actions, and the shell (server.py) carries
them out in their order.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from kvshm.protocol import (
    HEARTBEAT_SECONDS,
    MAX_EVENTS_BYTES,
    SUSPECT_AFTER_SECONDS,
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
from kvshm.records import RECORD_BYTES
from kvshm.terms import NO_LEASE_BIT

from .actions import (
    Action,
    Clock,
    Died,
    EndLife,
    Event,
    Examined,
    Foreign,
    Garbled,
    Log,
    Peer,
    Process,
    Publish,
    Received,
    Send,
    SweepBits,
    SweepLeftovers,
    SweepProcess,
    UnlinkEpoch,
    WriteLease,
)
from .joining import admit, on_foreign, on_join, refuse
from .roster import Engine, State

GRACE_SECONDS = 3 * HEARTBEAT_SECONDS
"""How long the bits of owners found dead at the start stay as they are."""
LEFTOVERS_SECONDS = 30.0
EXPLAIN_SECONDS = 1.0
"""How long an engine whose worker has ended may take to say that it leaves.  Whoever stops all
of its processes at once tells both at the same time; a later leave is what its death led to."""


def decide(state: State, event: Event, now: float) -> list[Action]:
    """Return what has to be done about ``event``, and take note of it in ``state``."""
    match event:
        case Received():
            if isinstance(event.message, Join):
                return on_join(state, event.peer, event.message)
            return _on_message(state, event.peer, event.message, now)
        case Examined():
            if event.refusal is not None:
                return refuse(state, event.peer, event.join.engine, event.refusal)
            return admit(state, event.peer, event.join, now)
        case Foreign():
            return on_foreign(state, event.peer, event.join)
        case Garbled():
            return state.complain(event.peer, "garbled", event.error)
        case Died():
            return _on_death(state, event.process, now)
        case Clock():
            return _on_clock(state, now)


# -- messages of engines in the roster


def _on_message(
    state: State, peer: Peer, message: Leave | Events | Heartbeat, now: float
) -> list[Action]:
    engine = state.engines.get(message.epoch)
    if engine is None:
        # Events of an epoch that is not in the roster are dropped; a leave has come true.
        if isinstance(message, Leave):
            return _explain(state, peer, message.epoch)
        reply = JoinFirst(coordinator_epoch=state.epoch, engine_epoch=message.epoch)
        return [Send(peer.route, reply)]
    if (peer.uid, peer.pid) != (state.uid, engine.info.pid):
        return state.complain(peer, "impostor", f"speaks for pid {engine.info.pid}")
    actions = _heard(state, engine, now)
    match message:
        case Leave():
            actions += _end(state, [engine.info], "left")
            actions += _log_ends(state, "leave", [engine.info], "left")
        case Heartbeat(sequence=sequence):
            # Higher than relayed: the engine had to drop some.  The next tick tells everybody.
            engine.sequence = max(engine.sequence, sequence)
        case Events():
            actions += _relay(state, peer, engine, message)
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


def _relay(state: State, peer: Peer, engine: Engine, events: Events) -> list[Action]:
    if (size := len(events.records)) % RECORD_BYTES or size > MAX_EVENTS_BYTES:
        return state.complain(peer, "garbled", f"{size} bytes are no records of one message")
    if events.sequence <= engine.sequence:
        return state.complain(peer, "repeated", f"events {events.sequence} came again")
    engine.sequence = events.sequence
    relayed = {"epoch": events.epoch, "engine_sequence": events.sequence}
    topic = engine.info.fingerprint
    return [state.publish(topic, EngineEvents, records=events.records, **relayed)]


# -- ends


def _on_death(state: State, process: Process, now: float) -> list[Action]:
    """A process has died: every epoch that needs it is over, its bits are orphans.  If it was a
    worker's, the engine's next word or its silence tells whether that is worth a line."""
    state.watched.discard(process)
    orphans = state.bits.died(process)
    infos = [e.info for e in state.engines.values() if process in e.processes]
    dead = [info for info in infos if _speaks_for(process, info)]
    dead += [i for i, _ in state.unexplained.values() if _speaks_for(process, i)]
    reason = f"process {process.pid} {'died' if dead else 'ended'}"
    bits = {info.lease_bit for info in infos} - {NO_LEASE_BIT} | set(orphans)
    actions = _end(state, infos, reason, bits)
    actions.append(SweepProcess(process))
    actions += [WriteLease(bit, state.bits.free(bit)) for bit in orphans]
    for info in infos:
        state.unexplained[info.epoch] = info, now + EXPLAIN_SECONDS
    for info in dead:
        del state.unexplained[info.epoch]
    return [*actions, *_log_ends(state, "death", dead, reason)]


def _speaks_for(process: Process, info: EngineInfo) -> bool:
    return process == Process(info.pid, info.start_time)


def _explain(state: State, peer: Peer, epoch: int) -> list[Action]:
    """An engine says that it leaves after its worker has ended: that was no death."""
    info, _ = state.unexplained.get(epoch, (None, 0.0))
    if info is None or (peer.uid, peer.pid) != (state.uid, info.pid):
        return []
    del state.unexplained[epoch]
    return _log_ends(state, "leave", [info], "left")


def _end(
    state: State, infos: list[EngineInfo], reason: str, bits: Iterable[int] = ()
) -> list[Action]:
    """These epochs are over.  The order is the point: nothing can be delivered any more,
    everybody is told, leases are cleared, names are removed.

    ``bits``: those of the dead.  A process that leaves keeps its bit, and whatever it still
    copies gives its leases back itself: a sweep would take them from under it.
    """
    for info in infos:
        state.end(info.epoch)
    actions: list[Action] = [EndLife(info.table) for info in infos]
    for info in infos:
        gone = {"epoch": info.epoch, "reason": reason}
        actions.append(state.publish(info.fingerprint, EngineGone, **gone))
    actions += _sweep(bits)
    actions += [UnlinkEpoch(info.table, info.epoch) for info in infos]
    return [*actions, *state.watch()]


def _log_ends(state: State, event: str, infos: list[EngineInfo], reason: str) -> list[Action]:
    lines: list[Action] = []
    for info in infos:
        about = {"engine": info.name, "pid": info.pid, "epoch": f"{info.epoch:016x}"}
        fields = {**about, "reason": reason, "engines": len(state.engines)}
        lines.append(Log(logging.INFO, event, fields))
    return lines


def _sweep(bits: Iterable[int]) -> list[Action]:
    mask = sum(1 << bit for bit in bits)
    return [SweepBits(mask)] if mask else []


# -- time


def _on_clock(state: State, now: float) -> list[Action]:
    _forgive(state, now)
    actions: list[Action] = []
    for engine in state.engines.values():
        if not engine.suspected and now - engine.last_heard > SUSPECT_AFTER_SECONDS:
            actions += _suspect(state, engine, now)
    actions += _ticks(state)
    due = state.bits.due(now)
    actions += _sweep(due)
    actions += [WriteLease(bit, state.bits.free(bit)) for bit in due]
    for info, until in list(state.unexplained.values()):
        if now >= until:
            del state.unexplained[info.epoch]
            actions += _log_ends(state, "death", [info], "a worker's process died")
    if now >= state.next_leftovers:
        state.next_leftovers = now + LEFTOVERS_SECONDS
        state.forget_idle_topics()
        actions.append(SweepLeftovers(frozenset(state.engines)))
    return actions


def _forgive(state: State, now: float) -> None:
    """Time in which this process stood still is nobody's silence: what was said meanwhile is
    yet to be read.  After a long one every engine has its full time again."""
    since = 0.0 if state.last_clock is None else now - state.last_clock
    state.last_clock = now
    if since > 2 * HEARTBEAT_SECONDS:
        still = math.inf if since > SUSPECT_AFTER_SECONDS else since - HEARTBEAT_SECONDS
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
