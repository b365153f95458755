"""How far a drain has come, and when it ends.  Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from enum import StrEnum
from typing import NamedTuple

STALL_SECONDS = 5.0
"""After so long without another copied block, full keepers take no more."""
SILENT_SECONDS = 5.0
"""An engine whose heartbeat rests for so long does not answer: others read from it no more."""
YOUNG_SECONDS = 5.0
"""A keeper that is younger, or has just got to know an engine, may yet begin to keep its blocks."""
FULL_SHARE = 0.95
"""Of a keeper's memory.  Blocks of several sizes leave some of it unused."""

LEAST_PAUSE, PAUSES_PER_LOOK, MOST_PAUSE = 0.1, 5, 1.0
"""Between two looks, which read the tables of all engines."""

Name = bytes
"""A block's key, and its group."""


class Other(NamedTuple):
    """Another engine of the namespace, as one look finds it."""

    name: str
    pid: int
    alike: bool
    """Whether it has the fingerprint of the engine in drain."""
    names: Set[Name]
    """Its blocks; none, unless it is alike."""
    keeps: bool
    in_drain: bool
    answers: bool
    age: float
    """Seconds since its epoch began."""
    filled: float
    """Share of its blocks that it shows."""


class Found(NamedTuple):
    """Where the blocks of the engine in drain are."""

    alone: Set[Name]
    """Those that no engine has which goes on, and answers."""
    kept: Set[Name]
    """Those that a keeper has."""
    keepers: int
    """How many keep its blocks, and answer."""
    full: bool
    """Whether all of these are."""


def find(own: Set[Name], others: Iterable[Other]) -> Found:
    alone, kept, keepers = set(own), set[Name](), set[tuple[str, int]]()
    filled = defaultdict[tuple[str, int], float](float)
    for other in others:
        if other.keeps:  # all that one process keeps lies in one memory
            filled[other.name, other.pid] += other.filled
        if not (other.alike and other.answers):
            continue
        if other.keeps:
            kept |= own & other.names
            keepers.add((other.name, other.pid))
        if not other.in_drain:
            alone -= other.names
    full = all(filled[keeper] >= FULL_SHARE for keeper in keepers)
    return Found(alone, kept, len(keepers), full)


class NoKeeper(NamedTuple):
    """Why none helps."""

    why: str
    may_come: bool
    """Whether one may help in a moment."""


def why_none(age: float, seconds: float, others: Iterable[Other]) -> NoKeeper:
    """``age``: of the engine in drain.  ``seconds``: since the drain began."""
    keepers = [other for other in others if other.keeps]
    young = age < YOUNG_SECONDS or any(keeper.age < YOUNG_SECONDS for keeper in keepers)
    if silent := {keeper.name for keeper in keepers if keeper.alike}:
        who = ", ".join(sorted(silent))
        return NoKeeper(f"keeper {who} does not answer", young or seconds < SILENT_SECONDS)
    if keepers:
        who = ", ".join(sorted({keeper.name for keeper in keepers}))
        why = f"keeper {who} keeps blocks of other engines only, and says on its stdout why"
        return NoKeeper(why, young)
    return NoKeeper("no keeper keeps blocks in its namespace (kvshm keeper)", young)


class Limits(NamedTuple):
    """What the user allows, for each engine."""

    seconds: float
    nbytes: int | None
    """About how much keepers may copy."""


class End(StrEnum):
    """Why a drain has ended."""

    KEPT = "kept"
    NO_KEEPER = "no-keeper"
    STALLED = "stalled"
    SECONDS = "seconds"
    BYTES = "bytes"
    SILENT = "silent"
    GONE = "gone"
    UNDONE = "undone"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """It has not begun."""


class Progress(NamedTuple):
    """A drain at one moment."""

    left: int
    """Blocks that would be lost if the engine were stopped now."""
    kept_bytes: int
    """What keepers have copied since it began."""
    keepers: int
    full: bool
    may_come: bool
    """Whether a keeper may yet help, if none does."""
    seconds: float
    """Since it began."""
    rested: float
    """Seconds since a keeper has copied a block, of this engine or another, or since it began."""
    gone: bool
    """Whether the engine has ended, or begun another epoch."""
    undone: bool
    """Whether it is not in drain any more."""
    silent: bool
    """Whether it does not answer: keepers read from it no more, once the coordinator suspects
    it."""


def decide(now: Progress, limits: Limits) -> End | None:
    """Return why the drain ends now; None: it goes on."""
    if now.gone:
        return End.GONE
    if now.undone:
        return End.UNDONE
    if not now.left:
        return End.KEPT
    if not now.keepers:
        return None if now.may_come and now.seconds < limits.seconds else End.NO_KEEPER
    return _spent(now, limits)


def _spent(now: Progress, limits: Limits) -> End | None:
    if limits.nbytes is not None and now.kept_bytes >= limits.nbytes:
        return End.BYTES
    if now.seconds >= limits.seconds:
        return End.SECONDS
    if now.rested < STALL_SECONDS:
        return None
    return End.SILENT if now.silent else End.STALLED if now.full else None


def pause_after(took: float, left: float) -> float:
    """Return for how many seconds to rest after a look that took so long.  ``left``: of the time
    that the user allows."""
    return max(min(PAUSES_PER_LOOK * took, MOST_PAUSE, left), min(LEAST_PAUSE, left), 0.0)
