"""Which engine gets a place in the roster, and the answer it gets.  Pure."""

from __future__ import annotations

import msgspec

from kvshm._base.fingerprint import differences
from kvshm._base.ids import NO_LEASE_BIT
from kvshm._node.protocol import (
    FINGERPRINT_BYTES,
    MAX_FIELDS_CHARACTERS,
    OTHER_VERSION,
    PROTOCOL_VERSION,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    ForeignEngine,
    ForeignJoin,
    IncompatibleEngine,
    IncompatibleJoined,
    Join,
    Joined,
    Refused,
    check_version,
)
from kvshm._shm.layout import ENGINE_NAME_BYTES, MAX_BLOCKS, MAX_RANKS
from kvshm.errors import VersionMismatch
from kvshm.version import __version__

from .actions import Action, CheckTable, Log, Refusal, Sender, SendReply, SweepBits
from .log_lines import RETRIED, Event
from .roster import Engine, State

MAX_OF_PROCESS = 8
"""Engines of one process: a bound for a process that begins epochs and ends none."""
MAX_TABLES_OF_PROCESS = 2 * MAX_OF_PROCESS
"""Tables of one process, including tables of ended epochs, under which it might hold leases."""
_LET_GO = f"{RETRIED}; if that does not help restart the engine"
_NEW_EPOCH = "begin a new epoch and join with that"
_LEAVE = "leave with epochs that have ended; give more engines processes of their own"


def on_join(state: State, sender: Sender, join: Join) -> list[Action]:
    """Refuse at once if the message shows a reason; else let the shell check the table."""
    refusal = (
        _refuse_sender(state, sender)
        or _refuse_protocol(join.protocol, join.engine)
        or _refuse_message(join.engine)
        or refuse_place(state, sender, join.engine)
    )
    if refusal is None:
        return [CheckTable(sender, join)]
    return refuse(state, sender, join.engine, refusal)


def on_bad_join(state: State, sender: Sender, join: ForeignJoin, error: str) -> list[Action]:
    """Refuse an engine whose Join is malformed or of another version of the protocol."""
    refusal = (
        _refuse_sender(state, sender)
        or _refuse_protocol(join.protocol, join.engine)
        or Refusal("the description of the engine is malformed", f"report this as a bug: {error}")
    )
    return refuse(state, sender, join.engine, refusal)


def _refuse_sender(state: State, sender: Sender) -> Refusal | None:
    if sender.pid < 0:
        return Refusal(
            "the socket does not name the sender's process",
            "install a libzmq with SO_PEERCRED support",
        )
    if sender.uid != state.uid:
        return Refusal(
            f"the engine runs as uid {sender.uid}, the coordinator as uid {state.uid}",
            "run both as one user",
        )
    return None


def _refuse_protocol(protocol: int, engine: EngineInfo | ForeignEngine) -> Refusal | None:
    try:
        check_version(protocol)
    except VersionMismatch as exc:
        return refuse_version("protocol", exc, engine.kvshm_version)
    return None


def refuse_version(what: str, mismatch: VersionMismatch, engine_version: str) -> Refusal:
    """Refuse an engine whose ``what`` ("protocol", "layout") differs from the coordinator's."""
    theirs = f"{what} {mismatch.theirs} (kvshm {engine_version or 'unknown'})"
    ours = f"{what} {mismatch.ours} (kvshm {__version__})"
    if mismatch.theirs < mismatch.ours:
        remedy = f"upgrade kvshm in the engine's environment to {__version__}, restart the engine"
    else:
        newer = engine_version or "the engine's version"
        remedy = f"upgrade kvshm in the coordinator's environment to {newer}, restart it"
    reason = f"the engine has {theirs}, the coordinator {ours}"
    return Refusal(reason, remedy, code=OTHER_VERSION)


def _refuse_message(engine: EngineInfo) -> Refusal | None:
    if (
        engine.epoch == 0
        or len(engine.fingerprint) != FINGERPRINT_BYTES
        or not 0 < len(engine.ranks) <= MAX_RANKS
        or not 0 < engine.num_blocks <= MAX_BLOCKS
        or len(engine.name) > ENGINE_NAME_BYTES
        or sum(len(k) + len(v) for k, v in engine.fields.items()) > MAX_FIELDS_CHARACTERS
    ):
        return Refusal("the description of the engine is malformed", "report this as a bug")
    return None


def refuse_place(state: State, sender: Sender, engine: EngineInfo) -> Refusal | None:
    """Return why this epoch gets no place, or None.  Called again once its table was checked."""
    if engine.epoch in state.ended:
        return Refusal("this epoch has ended", _NEW_EPOCH)
    known = state.engines.get(engine.epoch)
    if known is None:
        return _refuse_one_more(state, sender.pid)
    if known.pid != sender.pid or known.info.fingerprint != engine.fingerprint:
        return Refusal("another engine has this epoch", _NEW_EPOCH)
    return None


def _refuse_one_more(state: State, pid: int) -> Refusal | None:
    """Refuse an engine of a process that has enough of them.  Pid 0 is never refused: several
    processes that are not visible here may have it."""
    present = {epoch for epoch, other in state.engines.items() if other.pid == pid != 0}
    if len(present) >= MAX_OF_PROCESS:
        return Refusal(f"process {pid} has {len(present)} engines here already", _LEAVE)
    if len(kept := present | state.bits.of_process(pid)) >= MAX_TABLES_OF_PROCESS:
        reason = f"process {pid} still has {len(kept)} slot tables, of epochs that have ended too"
        return Refusal(reason, _LET_GO, retry=True)
    return None


def refuse(
    state: State, sender: Sender, engine: EngineInfo | ForeignEngine, refusal: Refusal
) -> list[Action]:
    """Tell the engine why it is refused; logged once for each sender and reason."""
    reply = Refused(engine_epoch=engine.epoch, **refusal._asdict())
    about = {"engine": engine.name, "remedy": refusal.remedy}
    lines = state.report(sender, Event.REFUSED, refusal.reason, **about)
    return [SendReply(sender.route, reply), *lines]


def admit(state: State, sender: Sender, join: Join, now: float) -> list[Action]:
    """Give a checked engine its lease bit and the roster.

    The other engines hear of it only if the engine is new to them or events of it were lost: an
    engine that only lost broadcasts costs them no scan.
    """
    engine, known = join.engine, state.engines.get(join.engine.epoch)
    others = state.engines.keys() - {engine.epoch}
    returning = not state.schedule.grace_over
    bit = state.bits.grant(engine.epoch, sender.pid, engine.lease_bit, others, returning)
    info = msgspec.structs.replace(engine, lease_bit=bit)
    state.engines[engine.epoch] = Engine(info, sender.pid, join.sequence, now)
    actions = state.release_tables()
    if not state.schedule.grace_over and bit not in (engine.lease_bit, NO_LEASE_BIT):
        # An engine that died before this coordinator began may have left leases with this bit.
        actions.append(SweepBits(1 << bit))
    if known is not None and known.suspected:
        actions.append(state.broadcast(info.fingerprint, EngineRecovered, epoch=info.epoch))
    if known is None or known.sequence != join.sequence or known.info != info:
        news = {"engine": info, "engine_sequence": join.sequence}
        actions.append(state.broadcast(info.fingerprint, EngineJoined, **news))
    if known is None:
        actions += _announce_incompatible(state, info)
    reply = _joined(state, info)
    actions.append(SendReply(sender.route, reply))
    if known is None:
        actions += _log_join(state, info, reply)
    return actions


def _announce_incompatible(state: State, info: EngineInfo) -> list[Action]:
    """Tell the engines of every other fingerprint that they cannot share with this engine; all
    engines of one fingerprint differ from it in the same fields."""
    others = {e.info.fingerprint: e.info for e in state.engines.values()}
    del others[info.fingerprint]
    return [
        state.broadcast(topic, IncompatibleJoined, engine=describe_incompatible(other, info))
        for topic, other in others.items()
    ]


def _joined(state: State, info: EngineInfo) -> Joined:
    others = [e for e in state.engines.values() if e.info.epoch != info.epoch]
    roster = [e for e in others if e.info.fingerprint == info.fingerprint]
    incompatible = [
        describe_incompatible(info, other.info)
        for other in others
        if other.info.fingerprint != info.fingerprint
    ]
    incompatible.sort(key=lambda e: (len(e.differences), e.name, e.pid))  # the most similar first
    return Joined(
        protocol=PROTOCOL_VERSION,
        coordinator_epoch=state.epoch,
        engine_epoch=info.epoch,
        lease_bit=info.lease_bit,
        sequence=state.topics.get(info.fingerprint, 0),
        roster=[e.info for e in roster],
        sequences={e.info.epoch: e.sequence for e in roster},
        suspected=[e.info.epoch for e in roster if e.suspected],
        incompatible=incompatible,
    )


def describe_incompatible(one: EngineInfo, other: EngineInfo) -> IncompatibleEngine:
    """Say why ``one`` cannot share with ``other``."""
    digests = {"fingerprint": (one.fingerprint.hex(), other.fingerprint.hex())}
    differing = differences(one.fields, other.fields) or digests
    return IncompatibleEngine(other.name, other.pid, differing)


def _log_join(state: State, info: EngineInfo, reply: Joined) -> list[Action]:
    about: dict[str, object] = {"engine": info.name, "pid": info.pid}
    epoch, topic = f"{info.epoch:016x}", info.fingerprint.hex()[:16]
    place = {"epoch": epoch, "bit": info.lease_bit, "ranks": len(info.ranks), "topic": topic}
    sizes = {"shares_with": len(reply.roster), "engines": len(state.engines)}
    lines: list[Action] = [Log(Event.JOIN, {**about, **place, **sizes})]
    if info.lease_bit == NO_LEASE_BIT:
        lines.append(Log(Event.NO_LEASE_BIT, about))
    for engine in reply.incompatible:
        name, (here, there) = next(iter(engine.differences.items()))
        other = {"other": engine.name, "other_pid": engine.pid}
        difference = {"differs": name, "here": here, "there": there}
        count = {"differing_fields": len(engine.differences)}
        lines.append(Log(Event.CANNOT_SHARE, {**about, **other, **difference, **count}))
    return lines
