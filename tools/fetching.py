"""Asks the engines of a run directory for their slot tables and replicas, all at the same time.

Every descriptor is read-only.  An engine that stands still cannot answer: then the coordinator is
asked for its table.  Whoever has ended has left nothing but a socket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvshm.errors import CorruptSegment, KvshmError, TransportError
from kvshm.ids import Epoch
from kvshm.node.handout import Handouts
from kvshm.node.leftovers import is_served
from kvshm.replica.index_reader import ReplicaReader
from kvshm.rundir import list_sockets, tables_socket
from kvshm.shm.layout import SlotState
from kvshm.shm.segment import INDEX_KIND, TABLE_KIND, SegmentName
from kvshm.shm.slot_table import Slot, SlotTableView

_AT_ONCE = 32
"""More engines than a namespace has lease bits for: nobody waits for one that stands still."""


class Problem(NamedTuple):
    """Why something of an engine is missing."""

    segment: str
    text: str
    silent: bool
    """Whether the engine has not answered; else what it gave cannot be used."""


@dataclass
class EngineSegments:
    """What one engine, in one epoch, has handed out."""

    namespace: str
    epoch: Epoch
    path: Path
    """The engine's socket."""
    table: SlotTableView | None = None
    replica: ReplicaReader | None = None
    problems: list[Problem] = field(default_factory=list)
    ended: bool = False
    """Whether nobody serves the socket."""

    def name(self, kind: str) -> SegmentName:
        """What its table or replica is called."""
        engine = "unnamed" if self.table is None else self.table.engine
        return SegmentName(self.namespace, kind, engine, self.epoch)

    @contextmanager
    def recording_problems(self, kind: str) -> Iterator[None]:
        """What is read within and cannot be used is noted as a problem of that segment."""
        try:
            yield
        except KvshmError as exc:
            self.note(kind, exc)

    def note(self, kind: str, exc: KvshmError) -> None:
        segment = f"kvshm.{self.namespace}.{kind}.{self.epoch:016x}"
        self.problems.append(Problem(segment, f"{type(exc).__name__}: {exc}", False))

    def close(self) -> None:
        for mapped in (self.table, self.replica):
            if mapped is not None:
                mapped.close()


@contextmanager
def fetch_all(run_dir: Path, namespace: str | None) -> Iterator[list[EngineSegments]]:
    """Ask every engine of a namespace, or (None) of all; what they hand out is mapped within.
    Whoever ends meanwhile is left out.  Blocks for some seconds at most if engines stand still.
    Raises OSError if there is no such directory."""
    engines = [
        EngineSegments(found.namespace, found.epoch, found.path)
        for found in list_sockets(run_dir, namespace)
        if found.epoch is not None
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(_fetch, engines))
    try:
        yield [engine for engine in engines if not engine.ended or os.path.lexists(engine.path)]
    finally:
        for engine in engines:
            engine.close()


def coordinator_runs(run_dir: Path, namespace: str) -> bool:
    """Whether one serves the namespace."""
    return is_served(tables_socket(run_dir, namespace))


def _fetch(engine: EngineSegments) -> None:
    handouts = Handouts(engine.path.parent, engine.namespace)
    try:
        engine.table = handouts.table(SlotTableView, engine.epoch)
    except KvshmError as exc:
        if not is_served(engine.path):
            engine.ended = True
            return
        if isinstance(exc.__cause__, TransportError):
            _ask_coordinator(engine, handouts, exc)
            return
        engine.note(TABLE_KIND, exc)
    with engine.recording_problems(INDEX_KIND):
        engine.replica = handouts.replica(engine.epoch)


def _ask_coordinator(engine: EngineSegments, handouts: Handouts, silence: KvshmError) -> None:
    try:
        engine.table = handouts.table_from_coordinator(engine.epoch)
        rest = "its table is shown by the coordinator, its replica is not"
    except KvshmError as exc:
        rest = f"nothing of it is shown, since the coordinator has no table of it: {exc}"
    who = f"engine {engine.epoch:016x}"
    engine.problems.append(Problem(who, f"it does not answer: {silence}; {rest}", True))


def slots_in_use(table: SlotTableView) -> Iterator[tuple[int, Slot]]:
    """Yield the slots that are not EMPTY, by block id, each read when it is asked for.  One in no
    known state is left out: ``check_integrity`` names it."""
    for block in range(table.num_blocks):
        try:
            slot = table.slot(block)
        except CorruptSegment:
            continue
        if slot.state is not SlotState.EMPTY:
            yield block, slot
