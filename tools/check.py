"""Checks that everything in shared memory obeys its laws, on a running or a crashed node.

Reads only, needs no coordinator.  What looks wrong is looked at again until it either has
changed or has stayed for longer than any change takes, so a busy node gives no false alarm.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvshm import _native
from kvshm.errors import KvshmError, SegmentNotFound, SegmentNotReady
from kvshm.index_parts import violations
from kvshm.index_reader import check_capacity
from kvshm.records import (
    INDEX_MAGIC,
    REVISION_OFFSET,
    SEQUENCE_OFFSET,
    SUCCESSOR_OFFSET,
)
from kvshm.segment import (
    INDEX_KIND,
    LEASES_KIND,
    SHM_DIRECTORY,
    TABLE_KIND,
    Segment,
    SegmentName,
    check_header,
    list_segments,
)

from .laws import (
    AFTER_A_SWEEP,
    SOON,
    Violation,
    between,
    of_leases,
    of_table,
    stated,
    without_coordinator,
)
from .snapshot import LeaseTableSnapshot, TableSnapshot, read_leases, read_table

PAUSE_SECONDS = 0.1
_STABLE_READS = 20


@dataclass
class Look:
    """What one look at all segments found."""

    checked: Counter[str] = field(default_factory=Counter)
    """How many segments of each kind."""
    suspects: list[Violation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What is sound, and still not what anybody wants."""


def check(
    namespace: str | None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Look:
    """Look at all segments of a namespace (None: of all), and again at what looks wrong.

    The suspects that are returned are no longer suspects: they are violations.  Blocks for
    about half a second if something seems wrong, for ten if it seems to be a death that
    nobody has noticed.
    """
    first = look(namespace)
    began, proven, suspects = clock(), set[Violation](), set(first.suspects)
    while suspects:
        proven |= {v for v in suspects if clock() - began >= v.patience}
        suspects -= proven
        if suspects:
            pause(PAUSE_SECONDS)
            suspects &= set(look(namespace).suspects)
    return Look(first.checked, [v for v in first.suspects if v in proven], first.warnings)


def look(namespace: str | None) -> Look:
    """Read every segment once.  One that is removed meanwhile is left out."""
    found, names = Look(), list_segments(namespace)
    for one in sorted({name.namespace for name in names}):
        _look_at_namespace([name for name in names if name.namespace == one], found)
    return found


def _look_at_namespace(names: list[SegmentName], found: Look) -> None:
    tables: list[TableSnapshot] = []
    leases: list[LeaseTableSnapshot] = []
    for name in names:
        try:
            found.suspects += _look_at(name, tables, leases)
        except (SegmentNotFound, FileNotFoundError):
            continue
        except KvshmError as exc:
            patience = AFTER_A_SWEEP if isinstance(exc, SegmentNotReady) else SOON
            law = f"{type(exc).__name__}: {exc}"
            found.suspects.append(Violation(str(name), "header", law, patience))
        found.checked[name.kind] += 1
    found.suspects += between(tables, leases[0] if leases else None)
    if (warning := without_coordinator(tables, leases[0] if leases else None)) is not None:
        found.warnings.append(warning)


def _look_at(
    name: SegmentName, tables: list[TableSnapshot], leases: list[LeaseTableSnapshot]
) -> Iterator[Violation]:
    if name.kind == TABLE_KIND:
        tables.append(read_table(name))
        yield from of_table(tables[-1], (SHM_DIRECTORY / str(name)).stat().st_size)
    elif name.kind == LEASES_KIND:
        leases.append(read_leases(name))
        yield from of_leases(leases[-1])
    elif name.kind == INDEX_KIND:
        yield from _look_at_index(name)
    else:
        yield Violation(str(name), "name", f"kind {name.kind!r} is unknown to this kvshm")


# -- replica indexes


def _look_at_index(name: SegmentName) -> Iterator[Violation]:
    segment = Segment.open(str(name), writable=False)
    try:
        header = check_header(segment, INDEX_MAGIC)
        check_capacity(segment)
        revision, successor = (
            _native.load(segment.buffer, at) for at in (REVISION_OFFSET, SUCCESSOR_OFFSET)
        )
        if (header.epoch, revision) != (name.epoch, name.revision):
            law = f"says epoch {header.epoch:016x}, revision {revision}; its name does not"
            yield Violation(str(name), "header", law)
        if successor:
            law = f"is replaced by revision {successor}, but keeps its name"
            yield Violation(str(name), "header", law)
        yield from _look_at_entries(name, segment.buffer)
    finally:
        segment.close()


def _look_at_entries(name: SegmentName, buffer: memoryview) -> Iterator[Violation]:
    """Check a copy that was taken while the writer was quiet.  If it never is, nothing is
    said, unless it always is in the middle of the same write."""
    seen = set()
    for _ in range(_STABLE_READS):
        before = _native.load(buffer, SEQUENCE_OFFSET)
        copy = memoryview(bytes(buffer))
        seen |= {before, _native.load(buffer, SEQUENCE_OFFSET)}
        if before % 2 == 0 and _native.load(buffer, SEQUENCE_OFFSET) == before:
            yield from stated(name, violations(copy))
            return
    if len(seen) == 1:  # the writer was ended, or stopped, in the middle
        yield from stated(name, violations(copy), AFTER_A_SWEEP)
