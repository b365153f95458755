"""Judges what a look at a node found: who lives, who is ready, whose loops go round.  Pure.

Three questions about an engine, each of which needs the one before:

    live       its process runs and has handed out its slot table
    ready      it has joined, and all ranks have opened its epoch: others can read its blocks
    progress   each loop has gone round lately, unless nothing waits for it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvshm._node.incompatible import NO_BIT, REFUSED, differing_field
from kvshm._shm.progress import SCHEDULER_LOOP, LoopProgress

from .reading import EngineReading, NamespaceReading, NodeReading

SCHEDULER_SECONDS = 60.0
"""How long a step may take: without chunks a long prompt is prefilled in one."""
LOOP_SECONDS = 10.0
"""How long other loops may rest: they go round once a second."""
LOAD_SECONDS = 30.0
"""How long a load may hold its leases."""
ALONE = "shares with nobody"
NO_COORDINATOR = "no coordinator runs"
"""How these reasons begin."""
CANNOT_TELL = "its clock cannot be compared with that of this process"


class State(StrEnum):
    """How well something does, from best to worst."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It serves, but does not share as it should."""
    DOWN = "down"
    """It does not serve, or nothing is known of it."""


_ORDER = tuple(State)


def worst(states: Iterator[State]) -> State:
    """The worst of these states; HEALTHY if there are none."""
    return max(states, key=_ORDER.index, default=State.HEALTHY)


@dataclass(frozen=True)
class Health:
    """The judgement of one engine."""

    live: bool
    ready: bool
    progress: bool | None
    """None: it cannot be told, as a reason says."""
    state: State
    reasons: tuple[str, ...]
    """What is wrong, the most important first; of a healthy engine at most what it waits for, and
    what cannot be told of it."""


@dataclass(frozen=True)
class Limits:
    """After how many seconds a loop that does not go round counts as stalled."""

    scheduler: float = SCHEDULER_SECONDS
    loop: float = LOOP_SECONDS
    load: float = LOAD_SECONDS


def judge(engine: EngineReading, space: NamespaceReading, now_ns: int, limits: Limits) -> Health:
    """Judge one engine of a namespace.  ``now_ns``: CLOCK_MONOTONIC of the reading."""
    dead = _why_dead(engine)
    timed = not dead and engine.clock_known
    stalled = list(_stalled(engine, now_ns, limits)) if timed else []
    unready = [] if dead or _waits(engine) else list(_why_unready(engine, space))
    others = [] if dead else [*_alone(engine, space), *_other_faults(engine, now_ns, limits)]
    serves = not dead and not any(reason.startswith(SCHEDULER_LOOP) for reason in stalled)
    reasons = (*dead, *stalled, *unready, *others)
    state = State.HEALTHY if not reasons else State.DEGRADED if serves else State.DOWN
    live = not dead
    if live and _waits(engine):
        reasons = (*reasons, "it waits for its first request, with which its ranks open the epoch")
    ready = live and not unready and not _waits(engine)
    progress: bool | None = timed and not stalled
    if live and not timed:
        progress = None
        reasons = (*reasons, f"whether its loops go round cannot be told: {CANNOT_TELL}")
    return Health(live, ready, progress, state, reasons)


def judge_coordinator(space: NamespaceReading, now_ns: int, limits: Limits) -> tuple[State, str]:
    """Judge a namespace's coordinator; returns its state and what is wrong.  Without an engine in
    its roster only its socket tells of it."""
    if not space.coordinated and not space.whole.engines and _none_means_to_share(space.whole):
        return State.HEALTHY, f"{NO_COORDINATOR}, and no engine means to share"
    if not space.coordinated:
        return State.DEGRADED, f"{NO_COORDINATOR}: engines hear of no new engine"
    if not space.coordinator_answers:
        return State.DEGRADED, "coordinator stalled: it does not answer"
    if space.coordinator_ns is None:
        told = "coordinator answers, but whether it goes round cannot be told"
        return State.HEALTHY, f"{told}: {CANNOT_TELL}"
    rested = _seconds(space.coordinator_ns or now_ns, now_ns)
    if rested > limits.loop:
        return State.DEGRADED, f"coordinator stalled: it has not gone round for {rested:.0f} s"
    return State.HEALTHY, ""


def _none_means_to_share(space: NamespaceReading) -> bool:
    return bool(space.declined) and all(told.on_purpose for told in space.declined)


def judge_node(reading: NodeReading, limits: Limits) -> State:
    """The worst state of all engines and coordinators; DOWN if there are none."""
    states = [
        judge(engine, space, reading.at_ns, limits).state
        for space in reading.namespaces
        for engine in space.engines
    ]
    for space in reading.namespaces:
        states.append(judge_coordinator(space, reading.at_ns, limits)[0])
        states += [State.DOWN] * (len(space.ended) + len(space.unreadable))
        states += [State.DEGRADED for declined in space.declined if not declined.on_purpose]
    return worst(iter(states)) if states else State.DOWN


def _why_dead(engine: EngineReading) -> list[str]:
    if engine.owner_died:
        return ["its process has ended"]
    if engine.died:
        return ["a worker process has ended"]
    return [] if engine.answers else ["it does not answer: stopped, or out of descriptors"]


def _waits(engine: EngineReading) -> bool:
    """Whether it has joined and has had no request yet: nothing is wrong then."""
    begun = any(loop.last_ns for loop in engine.progress if loop.loop == SCHEDULER_LOOP)
    idle = not begun and not any(engine.life) and not engine.retired
    return idle and engine.joined and not engine.counters["hook_errors"]


def _why_unready(engine: EngineReading, space: NamespaceReading) -> Iterator[str]:
    if engine.counters["hook_errors"]:
        yield "a hook of kvshm has failed: it shares nothing until it is restarted"
    if engine.retired:
        yield "its epoch has ended, and no other one has begun"
    elif not all(engine.life):
        ranks = ", ".join(str(rank) for rank, life in enumerate(engine.life) if not life)
        yield f"ranks that have not opened the epoch: {ranks}"
    if space.coordinated and not engine.joined:
        refusals = (e.text for e in reversed(engine.errors) if e.text.startswith(REFUSED))
        why = next(refusals, "")
        yield "it is not in the coordinator's roster" + (f": {why}" if why else "")


def _stalled(engine: EngineReading, now_ns: int, limits: Limits) -> Iterator[str]:
    for loop in engine.progress:
        rested = _seconds(loop.last_ns or now_ns, now_ns)  # it may be about to begin
        if _is_stalled(loop, rested, limits):
            waiting = f" with {loop.pending} waiting" if loop.pending else ""
            yield f"{loop.loop} stalled: it has not gone round for {rested:.0f} s{waiting}"


def _is_stalled(loop: LoopProgress, rested: float, limits: Limits) -> bool:
    if loop.idles and not loop.pending:
        return False
    return rested > (limits.scheduler if loop.idles else limits.loop)


def _alone(engine: EngineReading, space: NamespaceReading) -> Iterator[str]:
    """Why it shares with nobody, if engines of its model are here and none is compatible."""
    others = [e for e in space.whole.engines if e.epoch != engine.epoch and not _why_dead(e)]
    alike = {e.name for e in others if e.model == engine.model}
    if not alike or any(e.fingerprint == engine.fingerprint for e in others):
        return
    for error in reversed(engine.errors):
        if any(differing_field(error.text, name) for name in alike):
            yield f"{ALONE} here: {error.text}"
            return


def _other_faults(engine: EngineReading, now_ns: int, limits: Limits) -> Iterator[str]:
    oldest = min(engine.loads_since, default=now_ns)
    held = _seconds(oldest, now_ns) if engine.clock_known else 0.0
    if held > limits.load:
        yield f"a load holds its leases for {held:.0f} s"
    if engine.joined and engine.lease_bit is None and any(e.text == NO_BIT for e in engine.errors):
        yield NO_BIT
    if engine.counters["mismatched"]:
        yield f"{engine.counters['mismatched']} copied blocks differed from what was published"


def _seconds(since_ns: int, now_ns: int) -> float:
    return max(now_ns - since_ns, 0) / 1e9
