"""Why two engines of one node cannot share, in words: for the log, and for the slot table.

Both sides say it, each with its own value first.  Pure.
"""

from __future__ import annotations

from .error_log import TEXT_BYTES
from .protocol import Stranger

FIELDS_NAMED = 3
"""Differing fields whose values a log line gives; the others follow from these, mostly."""


def sentence(stranger: Stranger) -> str:
    """Return the log line about a stranger: the differing fields with both values."""
    named = list(stranger.differences.items())[:FIELDS_NAMED]
    text = ", ".join(
        f"{name} differs ({ours} here, {theirs} there)" for name, (ours, theirs) in named
    )
    if more := len(stranger.differences) - len(named):
        text += f" and {more} more"
    return f"engine {stranger.name} (pid {stranger.pid}) cannot share with this one: {text}"


def note(stranger: Stranger) -> str:
    """Return the same for the slot table's error log, which ``dump_index`` shows: only the
    first field, and of long values the part where they differ."""
    name, values = next(iter(stranger.differences.items()))
    head = f"cannot share with {stranger.name}: {name} is "
    room = (TEXT_BYTES - len(f"{head} here,  there")) // 2
    ours, theirs = _excerpts(*values, room)
    return f"{head}{ours} here, {theirs} there"


def _excerpts(ours: str, theirs: str, size: int) -> tuple[str, str]:
    same = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    begin = max(0, same - size // 2) if max(len(ours), len(theirs)) > size else 0
    return ours[begin : begin + size], theirs[begin : begin + size]
