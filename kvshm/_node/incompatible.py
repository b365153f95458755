"""Why two engines of one node cannot share, in one line: for the log, and for the slot table.

Both engines log the reason, each with its own value first.  Pure.
"""

from __future__ import annotations

from kvshm._base.core_lines import CoreLine
from kvshm._base.fingerprint import (
    DTYPE,
    KV_DTYPE,
    LORA,
    MODEL,
    MODEL_CONFIG,
    PARALLEL,
    QUANTIZATION,
    WEIGHTS,
)
from kvshm._base.log import engine_name
from kvshm._base.log_format import quote
from kvshm._base.log_lines import FilledLine
from kvshm._shm.error_log import TEXT_BYTES

from .protocol import IncompatibleEngine

LINE_CHARACTERS = 600
"""Enough for the names of all fields of a fingerprint."""
VALUE_CHARACTERS = 64
ENOUGH_CHARACTERS = 12
"""Of a value: it is cut no further for the names of other fields that differ."""
NOT_GIVEN = "(none)"
REFUSED = "refused: "
"""How the slot table's error log begins an entry about a refusal by the coordinator."""
NO_BIT = "no lease bit is free, so more of its copies are discarded: use several namespaces"
"""The entry of an engine that has joined as one too many."""
_OF_ONE_MODEL = {DTYPE, KV_DTYPE, LORA, PARALLEL, QUANTIZATION}
"""Fields that give the weights of the same model another digest."""


def log_line(other: IncompatibleEngine) -> FilledLine:
    """Return the log line about an incompatible engine: the first differing field with both
    values, and the names of the other differing fields."""
    who = engine_name(name=other.name, pid=other.pid)
    return CoreLine.INCOMPATIBLE.fill(who, reason(other, LINE_CHARACTERS))


def error_log_entry(other: IncompatibleEngine) -> str:
    """Return the reason as an entry of the slot table's error log, which ``kvshm dump``
    shows."""
    head = _head(other.name)
    return head + reason(other, TEXT_BYTES - len(head))


def differing_field(entry: str, other: str) -> str | None:
    """Return the first differing field that an entry of ``error_log_entry`` has, if it is about an
    engine with the name ``other``; None for another entry."""
    head = _head(other)
    return entry[len(head) :].partition(" is ")[0] if entry.startswith(head) else None


def _head(name: str) -> str:
    """How an entry about an engine begins.  Quoted, because a name may hold what follows it."""
    return f"cannot share with {quote(name)}: "


def reason(other: IncompatibleEngine, size: int) -> str:
    """Return the differences in at most ``size`` characters; of long values the part that
    differs."""
    (name, (ours, theirs)), *others = other.differences.items()
    also = f"; also {' '.join(name for name, _ in others)}" if others else ""
    least = len(f"{name} is  here,  there{'; also ...' if others else ''}")
    enough = min(ENOUGH_CHARACTERS, (size - least) // 2)
    room = (size - len(f"{name} is  here,  there{also}")) // 2
    room = max(1, min(VALUE_CHARACTERS, max(enough, room)))
    if len(ours) + len(theirs) <= 2 * room:  # a short one leaves room to the other
        room = max(len(ours), len(theirs))
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    equal = same.index(False) if False in same else len(same)
    begin = max(0, equal - room // 2) if equal >= room else 0
    ours, theirs = ours[begin : begin + room], theirs[begin : begin + room]
    text = f"{name} is {ours or NOT_GIVEN} here, {theirs or NOT_GIVEN} there{also}"
    return text if len(text) <= size else f"{text[: size - 3]}..."


def has_another_model(other: IncompatibleEngine) -> bool:
    """Whether the engine probably serves another model: then it is not meant to share."""
    differing = other.differences.keys()
    if MODEL in differing or WEIGHTS not in differing:
        return MODEL in differing
    return MODEL_CONFIG in differing or differing.isdisjoint(_OF_ONE_MODEL)
