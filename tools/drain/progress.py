"""How far a drain has come, and when it ends.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set
from enum import StrEnum
from typing import NamedTuple

STALL_SECONDS = 5.0
"""After so long without another kept block keepers are taken to be full, or not to answer."""
BAR_CELLS = 24

Name = tuple[bytes, int]
"""A block's key and group."""


class Holder(NamedTuple):
    """An engine whose blocks can be read."""

    names: Set[Name]
    keeps: bool
    in_drain: bool


class Found(NamedTuple):
    """Where the blocks of the engine in drain are."""

    alone: Set[Name]
    """Those that no engine has which goes on."""
    kept: Set[Name]
    """Those that a keeper has."""
    keepers: int


def find(own: Set[Name], others: Iterable[Holder]) -> Found:
    """``others``: with the same fingerprint."""
    alone, kept, keepers = set(own), set[Name](), 0
    for other in others:
        if other.keeps:
            kept |= own & other.names
            keepers += 1
        if not other.in_drain:
            alone -= other.names
    return Found(alone, kept, keepers)


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
    GONE = "gone"
    INTERRUPTED = "interrupted"


class Progress(NamedTuple):
    """A drain at one moment."""

    left: int
    """Blocks that would be lost if the engine were stopped now."""
    kept_bytes: int
    """What keepers have copied since it began."""
    keepers: int
    seconds: float
    """Since it began."""
    rested: float
    """Seconds since another block was kept, or since it began."""
    gone: bool
    """Whether the engine has ended, or begun another epoch."""


def decide(now: Progress, limits: Limits) -> End | None:
    """Return why the drain ends now; None: it goes on."""
    if now.gone:
        return End.GONE
    if not now.left:
        return End.KEPT
    if not now.keepers:
        return End.NO_KEEPER
    if limits.nbytes is not None and now.kept_bytes >= limits.nbytes:
        return End.BYTES
    if now.seconds >= limits.seconds:
        return End.SECONDS
    return End.STALLED if now.rested >= STALL_SECONDS else None


def bar(done: int, whole: int) -> str:
    """Return a progress bar: ``[######......]``."""
    cells = BAR_CELLS * done // whole if whole else BAR_CELLS
    return f"[{'#' * cells}{'.' * (BAR_CELLS - cells)}]"


def size(nbytes: int) -> str:
    """Return a size for people."""
    amount = nbytes / 1e6
    return f"{amount / 1e3:.1f} GB" if amount >= 1e3 else f"{amount:.1f} MB"
