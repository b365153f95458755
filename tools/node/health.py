"""Judges what a look at a node found: which engines live, are ready, and go round.  Pure.

Three questions about an engine, each of which needs the one before:

    live       its process runs and has handed out its slot table
    ready      it has joined, and all ranks have opened its epoch: others can read its blocks
    progress   each loop has gone round lately, unless nothing waits for it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvshm._base.declined import Declined
from kvshm._base.ids import Epoch
from kvshm._node.incompatible import remedy
from kvshm._shm.error_log import ErrorCode
from kvshm._shm.progress import SCHEDULER_LOOP, LoopProgress

from .reading import EngineReading, NamespaceReading, NodeReading

SCHEDULER_SECONDS = 60.0
"""How long a step may take: without chunks a long prompt is prefilled in one."""
LOOP_SECONDS = 10.0
"""How long other loops may rest: they go round once a second."""
LOAD_SECONDS = 30.0
CANNOT_TELL = "its clock cannot be compared with that of this process"


class State(StrEnum):
    """From best to worst."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It serves, but does not share as it should."""
    DOWN = "down"
    """It does not serve, or nothing is known of it."""


class Code(StrEnum):
    """The kind of a reason, for programs; its text is for people."""

    ENDED = "ended"
    RANK_ENDED = "rank-ended"
    SILENT = "silent"
    UNREADABLE = "unreadable"
    SCHEDULER_STALLED = "scheduler-stalled"
    LOOP_STALLED = "loop-stalled"
    HOOK_FAILED = "hook-failed"
    EPOCH_ENDED = "epoch-ended"
    NOT_OPENED = "not-opened"
    NOT_JOINED = "not-joined"
    ALONE = "alone"
    LONG_LOAD = "long-load"
    NO_LEASE_BIT = "no-lease-bit"
    MISMATCHED = "mismatched"
    WAITS = "waits"
    CLOCK_UNKNOWN = "clock-unknown"
    NO_COORDINATOR = "no-coordinator"
    COORDINATOR_STALLED = "coordinator-stalled"
    NOT_SHARING = "not-sharing"


class Reason(NamedTuple):
    code: Code
    text: str


_ORDER = tuple(State)


def worst(states: Iterable[State]) -> State:
    return max(states, key=_ORDER.index, default=State.HEALTHY)


@dataclass(frozen=True)
class EngineHealth:
    engine: EngineReading
    live: bool
    ready: bool
    progress: bool | None
    """None: it is not known, as a reason says."""
    state: State
    reasons: tuple[Reason, ...]
    """The most important first; of a healthy engine what it waits for and what is not known."""

    @property
    def texts(self) -> list[str]:
        return [reason.text for reason in self.reasons]


class CoordinatorHealth(NamedTuple):
    state: State
    reason: Reason | None = None

    @property
    def text(self) -> str:
        return self.reason.text if self.reason else ""


class DeclinedHealth(NamedTuple):
    record: Declined
    state: State
    reason: Reason


@dataclass(frozen=True)
class NamespaceHealth:
    reading: NamespaceReading
    coordinator: CoordinatorHealth
    engines: tuple[EngineHealth, ...]
    unknown: Mapping[Epoch, Reason]
    """Why engines are down whose tables are not known: those that have ended first."""
    declined: tuple[DeclinedHealth, ...]

    @property
    def states(self) -> Iterator[State]:
        yield self.coordinator.state
        yield from (engine.state for engine in self.engines)
        yield from (declined.state for declined in self.declined)
        yield from (State.DOWN for _ in self.unknown)


@dataclass(frozen=True)
class NodeHealth:
    reading: NodeReading
    state: State
    """The worst state on it; DOWN if there is nothing."""
    namespaces: tuple[NamespaceHealth, ...]

    @property
    def engines(self) -> Iterator[EngineHealth]:
        return (engine for space in self.namespaces for engine in space.engines)


@dataclass(frozen=True)
class Limits:
    """After how many seconds a loop that does not go round counts as stalled."""

    scheduler: float = SCHEDULER_SECONDS
    loop: float = LOOP_SECONDS
    load: float = LOAD_SECONDS


USUAL_LIMITS = Limits()


def judge_node(reading: NodeReading, limits: Limits = USUAL_LIMITS) -> NodeHealth:
    spaces = tuple(_judge_namespace(space, reading.at_ns, limits) for space in reading.namespaces)
    state = worst(state for space in spaces for state in space.states) if spaces else State.DOWN
    return NodeHealth(reading, state, spaces)


def _judge_namespace(space: NamespaceReading, now_ns: int, limits: Limits) -> NamespaceHealth:
    unknown = {epoch: Reason(Code.ENDED, "its process has ended") for epoch in space.ended}
    for epoch, why in space.unreadable.items():
        unknown[epoch] = Reason(Code.SILENT if epoch in space.silent else Code.UNREADABLE, why)
    return NamespaceHealth(
        reading=space,
        coordinator=judge_coordinator(space, now_ns, limits),
        engines=tuple(judge(engine, space, now_ns, limits) for engine in space.engines),
        unknown=unknown,
        declined=tuple(map(_judge_declined, space.declined)),
    )


def _judge_declined(record: Declined) -> DeclinedHealth:
    reason = Reason(Code.NOT_SHARING, f"not sharing: {record.reason}")
    return DeclinedHealth(record, State.HEALTHY if record.on_purpose else State.DEGRADED, reason)


def judge(
    engine: EngineReading, space: NamespaceReading, now_ns: int, limits: Limits
) -> EngineHealth:
    """Judge one engine.  ``now_ns``: CLOCK_MONOTONIC of the reading."""
    dead = list(_why_dead(engine))
    live, waits = not dead, _waits(engine)
    timed = live and engine.clock_known
    stalled = list(_stalled(engine, now_ns, limits)) if timed else []
    unready = list(_why_unready(engine, space)) if live and not waits else []
    others = [*_alone(engine, space), *_other_faults(engine, now_ns, limits)] if live else []
    serves = live and not any(reason.code is Code.SCHEDULER_STALLED for reason in stalled)
    reasons = [*dead, *stalled, *unready, *others]
    state = State.HEALTHY if not reasons else State.DEGRADED if serves else State.DOWN
    if live and waits:
        why = "it is ready after its first request, with which its ranks open the epoch"
        reasons.append(Reason(Code.WAITS, why))
    if live and not timed:
        why = f"whether its loops go round is not known: {CANNOT_TELL}"
        reasons.append(Reason(Code.CLOCK_UNKNOWN, why))
    return EngineHealth(
        engine=engine,
        live=live,
        ready=live and not unready and not waits,
        progress=None if live and not timed else timed and not stalled,
        state=state,
        reasons=tuple(reasons),
    )


def judge_coordinator(space: NamespaceReading, now_ns: int, limits: Limits) -> CoordinatorHealth:
    """Judge a namespace's coordinator, by its socket alone if no engine is in its roster."""
    if not space.coordinated:
        if not space.whole.engines and _none_means_to_share(space.whole):
            state, why = State.HEALTHY, "no coordinator runs, and no engine means to share"
        else:
            state, why = State.DEGRADED, "no coordinator runs: engines hear of no new engine"
        return CoordinatorHealth(state, Reason(Code.NO_COORDINATOR, why))
    if not space.coordinator_answers:
        return _stalled_coordinator("it does not answer")
    if space.coordinator_ns is None:
        why = f"coordinator answers, but whether it goes round is not known: {CANNOT_TELL}"
        return CoordinatorHealth(State.HEALTHY, Reason(Code.CLOCK_UNKNOWN, why))
    rested = _seconds(space.coordinator_ns or now_ns, now_ns)
    if rested > limits.loop:
        return _stalled_coordinator(f"it has not gone round for {rested:.0f} s")
    return CoordinatorHealth(State.HEALTHY)


def _stalled_coordinator(why: str) -> CoordinatorHealth:
    reason = Reason(Code.COORDINATOR_STALLED, f"coordinator stalled: {why}")
    return CoordinatorHealth(State.DEGRADED, reason)


def _none_means_to_share(space: NamespaceReading) -> bool:
    return bool(space.declined) and all(record.on_purpose for record in space.declined)


NOT_ADMITTED = "no coordinator has admitted it yet"


def _why_dead(engine: EngineReading) -> Iterator[Reason]:
    if engine.owner_died:
        yield Reason(Code.ENDED, "its process has ended")
    elif engine.died:
        yield Reason(Code.RANK_ENDED, "a worker process has ended")
    elif not engine.answers:
        yield Reason(Code.SILENT, "it does not answer: stopped, or out of descriptors")


def _waits(engine: EngineReading) -> bool:
    """Whether it has joined and has had no request yet."""
    begun = any(loop.last_ns for loop in engine.progress if loop.loop == SCHEDULER_LOOP)
    idle = not begun and not any(engine.life) and not engine.retired
    return idle and engine.joined and not engine.counters["hook_errors"]


def _why_unready(engine: EngineReading, space: NamespaceReading) -> Iterator[Reason]:
    if engine.counters["hook_errors"]:
        why = "a hook of kvshm has failed: it shares nothing until it is restarted"
        yield Reason(Code.HOOK_FAILED, why)
    if engine.retired:
        yield Reason(Code.EPOCH_ENDED, "its epoch has ended, and no other one has begun")
    elif not all(engine.life):
        ranks = ", ".join(str(rank) for rank, life in enumerate(engine.life) if not life)
        admitted = space.coordinated or engine.joined
        why = f"ranks that have not opened the epoch: {ranks}" if admitted else NOT_ADMITTED
        yield Reason(Code.NOT_OPENED, why)
    if space.coordinated and not engine.joined:
        why = engine.last_error(ErrorCode.REFUSED, ErrorCode.OTHER_VERSION)
        text = "it is not in the coordinator's roster" + (f": {why}" if why else "")
        yield Reason(Code.NOT_JOINED, text)


def _stalled(engine: EngineReading, now_ns: int, limits: Limits) -> Iterator[Reason]:
    for loop in engine.progress:
        rested = _seconds(loop.last_ns or now_ns, now_ns)  # it may be about to start
        if _is_stalled(loop, rested, limits):
            waiting = f" with {loop.pending} waiting" if loop.pending else ""
            is_scheduler = loop.loop == SCHEDULER_LOOP
            yield Reason(
                Code.SCHEDULER_STALLED if is_scheduler else Code.LOOP_STALLED,
                f"{loop.loop} stalled: it has not gone round for {rested:.0f} s{waiting}",
            )


def _is_stalled(loop: LoopProgress, rested: float, limits: Limits) -> bool:
    if loop.idles and not loop.pending:
        return False
    return rested > (limits.scheduler if loop.idles else limits.loop)


def _alone(engine: EngineReading, space: NamespaceReading) -> Iterator[Reason]:
    """Why it shares with none of the engines of its model that are here."""
    others = [e for e in space.whole.engines if e.epoch != engine.epoch and not any(_why_dead(e))]
    alike = {e.name for e in others if e.model == engine.model}
    if engine.keeps or not alike or any(e.fingerprint == engine.fingerprint for e in others):
        return
    for field, text in engine.differences(*alike):
        yield Reason(Code.ALONE, f"shares with no engine here: {text}{remedy(field)}")
        return


def _other_faults(engine: EngineReading, now_ns: int, limits: Limits) -> Iterator[Reason]:
    oldest = min(engine.loads_since, default=now_ns)
    held = _seconds(oldest, now_ns) if engine.clock_known else 0.0
    if held > limits.load:
        yield Reason(Code.LONG_LOAD, f"a load holds its leases for {held:.0f} s")
    why = engine.last_error(ErrorCode.NO_LEASE_BIT)
    if why and engine.joined and engine.lease_bit is None and not engine.keeps:
        yield Reason(Code.NO_LEASE_BIT, why)
    if mismatched := engine.counters["mismatched"]:
        why = f"{mismatched} copied blocks differed from what was published"
        yield Reason(Code.MISMATCHED, why)


def _seconds(since_ns: int, now_ns: int) -> float:
    return max(now_ns - since_ns, 0) / 1e9
