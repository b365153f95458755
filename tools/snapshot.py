"""Reads everything kvshm keeps in shared memory, read-only, as the engines hand it out.

Every segment is mapped without the right to write, read once and unmapped.  The node runs
on meanwhile: what is read from different segments need not fit together to the last block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvshm.error_log import LoggedError
from kvshm.errors import CorruptSegment, KvshmError
from kvshm.index_layout import Entry, Row
from kvshm.index_reader import ReplicaReader
from kvshm.records import SlotState
from kvshm.rundir import list_coordinators
from kvshm.segment import INDEX_KIND, TABLE_KIND, SegmentName
from kvshm.slots import Slot, SlotTableView
from kvshm.terms import Epoch

from .fetching import Fetched, coordinator_runs, fetch_all


@dataclass(frozen=True)
class TableSnapshot:
    """One engine's slot table; ``slots`` holds those in use by block id."""

    name: SegmentName
    epoch: int
    engine: str
    nbytes: int
    pid: int
    alive: bool
    """Whether the process that made it runs."""
    died: bool
    """Whether one of the engine's processes, its ranks' included, has ended."""
    fingerprint: bytes
    model: str
    num_blocks: int
    block_size: int
    lease_bit: int
    heartbeat: int
    leases_taken: int
    retired: bool
    life: list[int]
    created_ns: int
    slots: dict[int, Slot]
    counters: dict[str, int]
    errors: list[LoggedError]
    problems: list[str]


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One engine's replica index; ``entries`` only if they were asked for."""

    name: SegmentName
    pid: int
    capacity: int
    count: int
    rows: list[Row]
    entries: list[Entry]


class Unreadable(NamedTuple):
    """Something of an engine of which nothing can be said but why."""

    namespace: str
    epoch: Epoch
    segment: str
    problem: str


class Ended(NamedTuple):
    """An engine of which nothing is left but its socket."""

    namespace: str
    epoch: Epoch
    path: Path


@dataclass(frozen=True)
class Snapshot:
    """All of kvshm in one run directory, or of one namespace."""

    tables: list[TableSnapshot] = field(default_factory=list)
    replicas: list[ReplicaSnapshot] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    coordinated: set[str] = field(default_factory=set)
    """The namespaces that a coordinator serves."""

    @property
    def namespaces(self) -> list[str]:
        """The namespaces of which something was found."""
        mapped = [*(t.name for t in self.tables), *(r.name for r in self.replicas)]
        found = {name.namespace for name in mapped}
        found |= {broken.namespace for broken in self.unreadable}
        return sorted(found | self.coordinated | {ended.namespace for ended in self.ended})

    def only(self, namespace: str) -> Snapshot:
        """The part of it that belongs to one namespace."""
        return Snapshot(
            [table for table in self.tables if table.name.namespace == namespace],
            [replica for replica in self.replicas if replica.name.namespace == namespace],
            [broken for broken in self.unreadable if broken.namespace == namespace],
            [ended for ended in self.ended if ended.namespace == namespace],
            self.coordinated & {namespace},
        )


def take(run_dir: Path, namespace: str | None, with_entries: bool) -> Snapshot:
    """Read what the engines of a namespace (None: of all) hand out.  Changes nothing.

    An engine that ends meanwhile is left out; what cannot be read is noted with the reason.
    ``with_entries``: also every entry of the replicas.  Raises OSError if there is no such
    directory.
    """
    taken = Snapshot()
    for fetched in fetch_all(run_dir, namespace):
        with closing(fetched):
            _read(taken, fetched, with_entries)
    named = list_coordinators(run_dir, namespace)
    taken.coordinated.update(name for name in named if coordinator_runs(run_dir, name))
    return taken


def _read(taken: Snapshot, fetched: Fetched, with_entries: bool) -> None:
    space, epoch = fetched.namespace, fetched.epoch
    if fetched.ended:
        taken.ended.append(Ended(space, epoch, fetched.path))
    engine = "unnamed"
    if fetched.table is not None:
        try:
            taken.tables.append(read_table(space, fetched.table))
            engine = fetched.table.engine
        except KvshmError as exc:
            fetched.note(TABLE_KIND, exc)
    if fetched.replica is not None:
        name = SegmentName(space, INDEX_KIND, engine, epoch)
        try:
            taken.replicas.append(_read_replica(name, fetched.replica, with_entries))
        except KvshmError as exc:
            fetched.note(INDEX_KIND, exc)
    taken.unreadable.extend(
        Unreadable(space, epoch, problem.segment, problem.text) for problem in fetched.problems
    )


def read_table(namespace: str, table: SlotTableView) -> TableSnapshot:
    """Read one slot table.  Raises SegmentError."""
    return TableSnapshot(
        name=SegmentName(namespace, TABLE_KIND, table.engine, table.epoch),
        epoch=table.epoch,
        engine=table.engine,
        nbytes=table.nbytes,
        pid=table.pid,
        alive=not table.owner_died,
        died=table.died,
        fingerprint=table.fingerprint,
        model=table.model,
        num_blocks=table.num_blocks,
        block_size=table.block_size,
        lease_bit=table.lease_bit,
        heartbeat=table.heartbeat,
        leases_taken=table.leases_taken,
        retired=table.retired,
        life=[table.life(rank) for rank in range(table.num_ranks)],
        created_ns=table.created_ns,
        slots=dict(_slots_in_use(table)),
        counters=table.counters.snapshot(),
        errors=table.errors(),
        problems=table.check_integrity(),
    )


def _slots_in_use(table: SlotTableView) -> Iterator[tuple[int, Slot]]:
    for block_id in range(table.num_blocks):
        try:
            slot = table.slot(block_id)
        except CorruptSegment:
            continue  # check_integrity names it
        if slot.state is not SlotState.EMPTY:
            yield block_id, slot


def _read_replica(name: SegmentName, reader: ReplicaReader, with_entries: bool) -> ReplicaSnapshot:
    entries = list(reader.entries()) if with_entries else []
    return ReplicaSnapshot(
        name=name,
        pid=reader.header.pid,
        capacity=reader.capacity,
        count=reader.count,
        rows=reader.rows(),
        entries=entries,
    )
