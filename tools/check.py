"""Checks that everything in shared memory obeys its laws, as the engines hand it out.

Reads only, needs no coordinator.  What looks wrong is looked at again until it either has
changed or has stayed for longer than any change takes, so a busy node gives no false alarm.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from kvshm import _native
from kvshm.errors import KvshmError
from kvshm.index_check import violations
from kvshm.index_reader import ReplicaReader
from kvshm.records import SEQUENCE_OFFSET
from kvshm.segment import INDEX_KIND, TABLE_KIND, SegmentName

from .fetching import Fetched, coordinator_runs, fetch_all
from .laws import AFTER_A_SWEEP, SOON, Violation, between, of_table, stated, without_coordinator
from .render import leftover
from .snapshot import TableSnapshot, read_table

PAUSE_SECONDS = 0.1
_STABLE_READS = 20


@dataclass
class Look:
    """What one look at a run directory found."""

    checked: Counter[str] = field(default_factory=Counter)
    """How many segments of each kind."""
    suspects: list[Violation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What is sound, or cannot be told, and still not what anybody wants."""


def check(
    run_dir: Path,
    namespace: str | None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Look:
    """Look at all segments of a namespace (None: of all), and again at what looks wrong.

    The suspects that are returned are no longer suspects: they are violations.  Blocks for
    about half a second if something seems wrong, for ten if it seems to be a death that
    nobody has noticed; longer if engines stand still.  Raises OSError if there is no such
    directory.
    """
    first = look(run_dir, namespace)
    began, proven, suspects = clock(), set[Violation](), set(first.suspects)
    while suspects:
        proven |= {v for v in suspects if clock() - began >= v.patience}
        suspects -= proven
        if suspects:
            pause(PAUSE_SECONDS)
            suspects &= set(look(run_dir, namespace).suspects)
    return Look(first.checked, [v for v in first.suspects if v in proven], first.warnings)


def look(run_dir: Path, namespace: str | None) -> Look:
    """Read every segment once.  An engine that ends meanwhile is left out."""
    found, engines = Look(), fetch_all(run_dir, namespace)
    for one in sorted({engine.namespace for engine in engines}):
        members = [engine for engine in engines if engine.namespace == one]
        _look_at_namespace(members, coordinator_runs(run_dir, one), found)
    return found


def _look_at_namespace(engines: list[Fetched], coordinated: bool, found: Look) -> None:
    tables: list[TableSnapshot] = []
    for engine in engines:
        with closing(engine):
            found.suspects += _look_at(engine, tables)
        for problem in engine.problems:
            if problem.silent:
                found.warnings.append(f"{problem.segment}: {problem.text}")
            else:
                found.suspects.append(Violation(problem.segment, "header", problem.text, SOON))
        if engine.ended:
            found.warnings.append(leftover(f"{engine.epoch:016x}", coordinated))
        found.checked[TABLE_KIND] += engine.table is not None
        found.checked[INDEX_KIND] += engine.replica is not None
    known = len(tables) == sum(not engine.ended for engine in engines)
    found.suspects += between(tables, coordinated and known)
    if not coordinated and (warning := without_coordinator(tables)) is not None:
        found.warnings.append(warning)


def _look_at(engine: Fetched, tables: list[TableSnapshot]) -> Iterator[Violation]:
    """What is wrong with what an engine has handed out; what cannot be read is noted there."""
    name = "unnamed"
    if engine.table is not None:
        try:
            tables.append(read_table(engine.namespace, engine.table))
            name = engine.table.engine
            yield from of_table(tables[-1])
        except KvshmError as exc:
            engine.note(TABLE_KIND, exc)
    if engine.replica is not None:
        called = SegmentName(engine.namespace, INDEX_KIND, name, engine.epoch)
        try:
            yield from _look_at_index(called, engine.replica)
        except KvshmError as exc:
            engine.note(INDEX_KIND, exc)


# -- replica indexes


def _look_at_index(name: SegmentName, replica: ReplicaReader) -> Iterator[Violation]:
    if (epoch := replica.header.epoch) != name.epoch:
        yield Violation(str(name), "header", f"says epoch {epoch:016x}; its socket does not")
    yield from _look_at_entries(name, replica.buffer)


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
