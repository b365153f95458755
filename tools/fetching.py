"""Asks all engines of a run directory at the same time for their slot tables and replicas.

Every descriptor is read-only.  A stopped engine cannot answer: the coordinator is then asked for
the engine's table.  An engine that has ended has left nothing but its socket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvshm._base.ids import Epoch
from kvshm._base.log import engine_name
from kvshm._base.rundir import list_sockets, tables_socket
from kvshm._node.segment_server import SegmentClient
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.fds import is_served
from kvshm._shm.layout import SlotState
from kvshm._shm.segment import INDEX_KIND, TABLE_KIND, SegmentName
from kvshm._shm.slot_table import Slot, SlotTableView
from kvshm.errors import CorruptSegment, KvshmError, TransportError

_AT_ONCE = 32
"""More engines than a namespace has lease bits: a stopped engine delays no other request."""


class Problem(NamedTuple):
    """Why an engine's table or replica cannot be shown."""

    segment: str
    text: str
    silent: bool
    """Whether the engine did not answer.  Otherwise its answer cannot be used."""


@dataclass
class Segments:
    """The segments that one engine has handed out, in one epoch."""

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
        """The name of the engine's table or replica."""
        engine = "unnamed" if self.table is None else self.table.engine
        return SegmentName(self.namespace, kind, engine, self.epoch)

    @contextmanager
    def recording_problems(self, kind: str) -> Iterator[None]:
        """A context: a KvshmError within it is recorded as a problem of that segment."""
        try:
            yield
        except KvshmError as exc:
            self.record(kind, exc)

    def record(self, kind: str, exc: KvshmError) -> None:
        segment = f"kvshm.{self.namespace}.{kind}.{self.epoch:016x}"
        self.problems.append(Problem(segment, f"{type(exc).__name__}: {exc}", False))

    def close(self) -> None:
        for mapped in (self.table, self.replica):
            if mapped is not None:
                mapped.close()


@contextmanager
def fetch_all(run_dir: Path, namespace: str | None) -> Iterator[list[Segments]]:
    """Ask every engine of a namespace (None: of all); the segments stay mapped within the context.
    Engines that end meanwhile are left out.  Blocks for some seconds at most if engines are
    stopped.  Raises OSError if there is no such directory."""
    engines = [
        Segments(found.namespace, found.epoch, found.path)
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
    """Whether a coordinator serves the namespace."""
    return is_served(tables_socket(run_dir, namespace))


def _fetch(engine: Segments) -> None:
    handouts = SegmentClient(engine.path.parent, engine.namespace)
    try:
        engine.table = handouts.view(engine.epoch)
    except KvshmError as exc:
        if not is_served(engine.path):
            engine.ended = True
            return
        if isinstance(exc.__cause__, TransportError):
            _ask_coordinator(engine, handouts, exc)
            return
        engine.record(TABLE_KIND, exc)
    with engine.recording_problems(INDEX_KIND):
        engine.replica = handouts.replica(engine.epoch)


def _ask_coordinator(engine: Segments, handouts: SegmentClient, silence: KvshmError) -> None:
    try:
        engine.table = handouts.table_from_coordinator(engine.epoch)
        rest = "its table is shown by the coordinator, its replica is not"
    except KvshmError as exc:
        rest = f"nothing of it is shown, since the coordinator has no table of it: {exc}"
    who = f"engine {engine_name(engine.epoch)}"
    engine.problems.append(Problem(who, f"it does not answer: {silence}; {rest}", True))


def slots_in_use(table: SlotTableView) -> Iterator[tuple[int, Slot]]:
    """Yield the slots that are not EMPTY, with their block ids; each is read when it is yielded.
    Slots in an unknown state are left out: ``check_integrity`` names them."""
    for block in range(table.num_blocks):
        try:
            slot = table.slot(block)
        except CorruptSegment:
            continue
        if slot.state is not SlotState.EMPTY:
            yield block, slot
