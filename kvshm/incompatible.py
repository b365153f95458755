"""Why two engines of one node cannot share, in words: for the log, and for the slot table.

Both sides say it, each with its own value first.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .error_log import TEXT_BYTES
from .protocol import Stranger

FIELDS_NAMED = 12
"""Differing fields whose values a log line gives; of the others it gives the names."""
VALUE_CHARACTERS = 64
NAMES_CHARACTERS = 200


def sentence(stranger: Stranger) -> str:
    """Return the log line about a stranger: the differing fields with both values, of long
    values the part where they differ."""
    items = list(stranger.differences.items())
    said = []
    for name, values in items[:FIELDS_NAMED]:
        ours, theirs = _excerpts(*values, VALUE_CHARACTERS)
        said.append(f"{name} differs ({ours} here, {theirs} there)")
    if rest := items[FIELDS_NAMED:]:
        said.append(_others((name for name, _ in rest), NAMES_CHARACTERS))
    who = f"engine {stranger.name} (pid {stranger.pid})"
    return f"{who} cannot share with this one: {', '.join(said)}"


def divide(strangers: Sequence[Stranger], room: int) -> list[tuple[Stranger, int]]:
    """Divide ``room`` entries of the error log among strangers: of each of the first that find
    room one field, of the first of each fingerprint more.  Those of one differ in the same."""
    named, kinds = strangers[:room], set()
    firsts = []
    for stranger in named:
        kind = tuple(stranger.differences.items())
        firsts.append(kind not in kinds)
        kinds.add(kind)
    entries = (room - len(named) + len(kinds)) // max(1, len(kinds))
    return [(s, entries if first else 1) for s, first in zip(named, firsts, strict=True)]


def notes(stranger: Stranger, room: int) -> list[str]:
    """Return the same for the slot table's error log, which ``dump_index`` shows: a field
    each, the most telling first, in at most ``room`` entries.  The last entry names the fields
    that have none; with a single entry only the first field is named."""
    head = f"cannot share with {stranger.name}: "
    items = list(stranger.differences.items())
    named = items if len(items) <= room else items[: max(1, room - 1)]
    said = [_note(head, name, *values) for name, values in named]
    if len(said) < room and len(items) > len(named):
        names = (name for name, _ in items[len(named) :])
        said.append(head + _others(names, TEXT_BYTES - len(head)))
    return said


def _note(head: str, name: str, ours: str, theirs: str) -> str:
    head = f"{head}{name} is "
    room = (TEXT_BYTES - len(f"{head} here,  there")) // 2
    ours, theirs = _excerpts(ours, theirs, room)
    return f"{head}{ours} here, {theirs} there"


def _others(names: Iterable[str], size: int) -> str:
    text = f"also {' '.join(names)}"
    return text if len(text) <= size else f"{text[: size - 3]}..."


def _excerpts(ours: str, theirs: str, size: int) -> tuple[str, str]:
    same = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    begin = max(0, same - size // 2) if max(len(ours), len(theirs)) > size else 0
    return ours[begin : begin + size], theirs[begin : begin + size]
