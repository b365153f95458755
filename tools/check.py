"""Checks that the invariants hold in the shared memory that the engines hand out.

Reads only and needs no coordinator.  A suspected violation is read again until it has changed or
has lasted longer than any change takes.  So a busy node gives no false alarm.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvshm import _native
from kvshm._replica.index_check import violations
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.layout import SEQUENCE_OFFSET
from kvshm._shm.segment import INDEX_KIND, TABLE_KIND
from kvshm._shm.slot_table import SlotTableView

from .invariants import (
    AFTER_SWEEP,
    Violation,
    as_violations,
    cross_table_violations,
    no_coordinator_warnings,
    table_violations,
)
from .node.mapped import MappedEngine, MappedNamespace
from .node.reader import NodeReader
from .render import leftover

PAUSE_SECONDS = 0.1
_STABLE_READS = 20


@dataclass
class Findings:
    checked: Counter[str] = field(default_factory=Counter)
    suspects: list[Violation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What a user should know although no invariant is known to be violated."""


def check(
    run_dir: Path,
    namespace: str | None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Findings:
    """Return the proven violations in a namespace (None: in all).  Blocks for half a second if
    something looks wrong, for ten if a death seems unnoticed, longer if engines are stopped."""
    first = check_once(run_dir, namespace)
    began, proven, suspects = clock(), set[Violation](), set(first.suspects)
    while suspects:
        proven |= {v for v in suspects if clock() - began >= v.patience}
        suspects -= proven
        if suspects:
            pause(PAUSE_SECONDS)
            suspects &= set(check_once(run_dir, namespace).suspects)
    return Findings(first.checked, [v for v in first.suspects if v in proven], first.warnings)


def check_once(run_dir: Path, namespace: str | None) -> Findings:
    """Read every segment once.  Engines that end meanwhile are left out."""
    found = Findings()
    with NodeReader(run_dir, namespace) as reader:
        for space in reader.map_segments():
            if space.engines:
                _check_space(space, found)
    return found


def _check_space(space: MappedNamespace, found: Findings) -> None:
    tables: dict[str, SlotTableView] = {}
    for engine in space.engines:
        if engine.table is not None:
            with engine.recording_problems(TABLE_KIND):
                name = str(engine.name(TABLE_KIND))
                found.suspects += table_violations(name, engine.table)
                tables[name] = engine.table
        if engine.replica is not None:
            with engine.recording_problems(INDEX_KIND):
                found.suspects += _check_replica(engine, engine.replica)
        for problem in engine.problems.values():
            if problem.silent:
                found.warnings.append(f"{problem.segment}: {problem.text}")
            else:
                found.suspects.append(Violation(problem.segment, "header", problem.text))
        if engine.ended:
            found.warnings.append(leftover(f"{engine.epoch:016x}", space.coordinated))
        found.checked[TABLE_KIND] += engine.table is not None
        found.checked[INDEX_KIND] += engine.replica is not None
    known = len(tables) == sum(not engine.ended for engine in space.engines)
    found.suspects += cross_table_violations(tables, space.coordinated and known)
    if not space.coordinated:
        found.warnings += no_coordinator_warnings(space.name, tables.values())


# -- replica indexes


def _check_replica(engine: MappedEngine, replica: ReplicaReader) -> Iterator[Violation]:
    name = str(engine.name(INDEX_KIND))
    if (stated := replica.header.epoch) != engine.epoch:
        yield Violation(name, "header", f"says epoch {stated:016x}; its socket does not")
    yield from _check_entries(name, replica.buffer)


def _check_entries(name: str, buffer: memoryview) -> Iterator[Violation]:
    """Check a copy that was taken while nothing was being written.  If there is no such moment,
    report nothing, unless every read meets the same unfinished write."""
    seen = set()
    for _ in range(_STABLE_READS):
        before = _native.load(buffer, SEQUENCE_OFFSET)
        copy = memoryview(bytes(buffer))
        seen |= {before, _native.load(buffer, SEQUENCE_OFFSET)}
        if before % 2 == 0 and _native.load(buffer, SEQUENCE_OFFSET) == before:
            yield from as_violations(name, violations(copy))
            return
    if len(seen) == 1:  # the writer was killed or stopped in the middle of a write
        yield from as_violations(name, violations(copy), AFTER_SWEEP)
