"""Why two engines of one node cannot share, in one line: both log it, their own value first."""

from __future__ import annotations

from kvshm._base.core_lines import CoreLine
from kvshm._base.fingerprint import (
    ATTENTION,
    BLOCK_SIZE,
    DTYPE,
    EXECUTION,
    HASH_ALGORITHM,
    KV_DTYPE,
    LORA,
    MODEL,
    MODEL_CONFIG,
    NONE_HASH,
    PARALLEL,
    QUANTIZATION,
    WEIGHTS,
)
from kvshm._base.log import engine_name
from kvshm._base.log_format import quote
from kvshm._base.log_lines import FilledLine
from kvshm._shm.error_log import TEXT_BYTES, ErrorCode, LoggedError

from .protocol import IncompatibleEngine

LINE_CHARACTERS = 600
"""Enough for the names of all fields of a fingerprint."""
VALUE_CHARACTERS = 64
ENOUGH_CHARACTERS = 12
"""Of a value: it is cut no further for the names of other fields that differ."""
NOT_GIVEN = "(none)"
_DECIDED_BY = {
    NONE_HASH: "PYTHONHASHSEED",
    HASH_ALGORITHM: "--prefix-caching-hash-algo",
    BLOCK_SIZE: "--block-size",
    DTYPE: "--dtype",
    KV_DTYPE: "--kv-cache-dtype",
    EXECUTION: "--enforce-eager or --compilation-config",
    ATTENTION: "--attention-backend",
}
"""Fields that a variable or an option of the engine decides by itself."""
_OF_ONE_MODEL = {DTYPE, KV_DTYPE, LORA, PARALLEL, QUANTIZATION}
"""Fields that give the weights of the same model another digest."""


def log_line(other: IncompatibleEngine) -> FilledLine:
    """Return the log line: the first differing field with both values, and the others' names."""
    who = engine_name(name=other.name, pid=other.pid)
    first = next(iter(other.differences))
    return CoreLine.INCOMPATIBLE.fill(who, reason(other, LINE_CHARACTERS) + remedy(first))


def remedy(field: str) -> str:
    """Return what to give both engines alike, "" if no single option decides this field."""
    option = _DECIDED_BY.get(field)
    return f" (give both the same {option})" if option else ""


def record(other: IncompatibleEngine) -> tuple[str, str, str]:
    """Return what the slot table's error log keeps of an incompatible engine (the parts of
    ``ErrorCode.CANNOT_SHARE``), short enough for it."""
    name = quote(other.name)
    room = TEXT_BYTES - len(ErrorCode.CANNOT_SHARE.text(name, "", ""))
    field, _, values = reason(other, room + len(" ")).partition(" ")
    return name, field, values


def differing_field(error: LoggedError, other: str) -> str | None:
    """Return the first differing field if the error is about an engine with the name ``other``."""
    if error.code is not ErrorCode.CANNOT_SHARE or error.about[:1] != (quote(other),):
        return None
    return error.about[1] if len(error.about) > 1 else ""


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
    start = max(0, equal - room // 2) if equal >= room else 0
    ours, theirs = ours[start : start + room], theirs[start : start + room]
    text = f"{name} is {ours or NOT_GIVEN} here, {theirs or NOT_GIVEN} there{also}"
    return text if len(text) <= size else f"{text[: size - 3]}..."


def has_another_model(other: IncompatibleEngine) -> bool:
    """Whether the engine probably serves another model: then it is not meant to share."""
    differing = other.differences.keys()
    if MODEL in differing or WEIGHTS not in differing:
        return MODEL in differing
    return MODEL_CONFIG in differing or differing.isdisjoint(_OF_ONE_MODEL)
