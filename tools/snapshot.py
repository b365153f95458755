"""Reads everything kvshm keeps in shared memory, read-only, from a running or a crashed node.

Every segment is mapped without the right to write, read once and unmapped.  The node runs
on meanwhile: what is read from different segments need not fit together to the last block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvshm.error_log import LoggedError
from kvshm.errors import CorruptSegment, KvshmError, SegmentNotFound
from kvshm.index_parts import Entry, Row
from kvshm.index_reader import ReplicaReader
from kvshm.records import (
    LEASE_ROW_BYTES,
    LEASE_ROWS_OFFSET,
    LEASE_TABLE_BYTES,
    LEASE_TABLE_MAGIC,
    NUM_LEASE_BITS,
    SlotState,
)
from kvshm.segment import (
    INDEX_KIND,
    LEASES_KIND,
    TABLE_KIND,
    Identity,
    Segment,
    SegmentName,
    check_header,
    is_alive,
    list_segments,
    owner_of,
    parse_segment_name,
)
from kvshm.slots import Slot, SlotTable

_LEASE_ROW = struct.Struct("<QQQ16s")


@dataclass(frozen=True)
class TableSnapshot:
    """One engine's slot table; ``slots`` holds those in use by block id."""

    name: SegmentName
    epoch: int
    engine: str
    identity: Identity
    alive: bool
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
    identity: Identity
    alive: bool
    capacity: int
    count: int
    rows: list[Row]
    entries: list[Entry]


@dataclass(frozen=True)
class LeaseOwner:
    """Who the lease table says holds a lease bit."""

    bit: int
    epoch: int
    identity: Identity
    alive: bool


@dataclass(frozen=True)
class LeaseTableSnapshot:
    """One namespace's lease table, and the coordinator that wrote it last."""

    name: SegmentName
    identity: Identity
    alive: bool
    owners: list[LeaseOwner]


@dataclass(frozen=True)
class Unreadable:
    """A segment of which nothing can be said but why."""

    name: SegmentName
    problem: str


@dataclass(frozen=True)
class Snapshot:
    """All of kvshm on this machine, or of one namespace."""

    tables: list[TableSnapshot] = field(default_factory=list)
    replicas: list[ReplicaSnapshot] = field(default_factory=list)
    leases: list[LeaseTableSnapshot] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)

    @property
    def names(self) -> list[SegmentName]:
        """Names of all segments that were found."""
        readable = [*(t.name for t in self.tables), *(r.name for r in self.replicas)]
        return readable + [s.name for s in self.leases] + [u.name for u in self.unreadable]

    def only(self, namespace: str) -> Snapshot:
        """The part of it that belongs to one namespace."""
        return Snapshot(
            [table for table in self.tables if table.name.namespace == namespace],
            [replica for replica in self.replicas if replica.name.namespace == namespace],
            [leases for leases in self.leases if leases.name.namespace == namespace],
            [broken for broken in self.unreadable if broken.name.namespace == namespace],
        )


def take(namespace: str | None, with_entries: bool) -> Snapshot:
    """Read all segments of a namespace (None: of all).  Changes nothing, needs no coordinator.

    A segment that is removed meanwhile is left out; one that cannot be read is noted with
    the reason.  ``with_entries``: also every entry of the replicas.
    """
    taken = Snapshot()
    for name in list_segments(namespace):
        try:
            _read(taken, name, with_entries)
        except SegmentNotFound:
            continue
        except KvshmError as exc:
            taken.unreadable.append(Unreadable(name, f"{type(exc).__name__}: {exc}"))
    return taken


def _read(taken: Snapshot, name: SegmentName, with_entries: bool) -> None:
    if name.kind == TABLE_KIND:
        taken.tables.append(read_table(name))
    elif name.kind == INDEX_KIND:
        replica = _read_replica(name, with_entries)
        if all(known.name != replica.name for known in taken.replicas):
            taken.replicas.append(replica)
    elif name.kind == LEASES_KIND:
        taken.leases.append(read_leases(name))
    else:
        taken.unreadable.append(Unreadable(name, f"kind {name.kind!r} is unknown to this kvshm"))


def read_table(name: SegmentName) -> TableSnapshot:
    """Read one slot table.  Raises SegmentError."""
    table = SlotTable.open(str(name), writable=False)
    try:
        return TableSnapshot(
            name=name,
            epoch=table.epoch,
            engine=table.engine,
            identity=table.identity,
            alive=is_alive(table.identity),
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
    finally:
        table.close()


def _slots_in_use(table: SlotTable) -> Iterator[tuple[int, Slot]]:
    for block_id in range(table.num_blocks):
        try:
            slot = table.slot(block_id)
        except CorruptSegment:
            continue  # check_integrity names it
        if slot.state is not SlotState.EMPTY:
            yield block_id, slot


def _read_replica(name: SegmentName, with_entries: bool) -> ReplicaSnapshot:
    reader = ReplicaReader.open(str(name))
    try:
        entries = list(reader.entries()) if with_entries else []
        newest = parse_segment_name(reader.name)  # it may have been replaced by a larger one
        assert newest is not None
        identity = owner_of(reader.name)
        return ReplicaSnapshot(
            name=newest,
            identity=identity,
            alive=is_alive(identity),
            capacity=reader.capacity,
            count=reader.count,
            rows=reader.rows(),
            entries=entries,
        )
    finally:
        reader.close()


def read_leases(name: SegmentName) -> LeaseTableSnapshot:
    """Read one lease table.  Raises SegmentError."""
    segment = Segment.open(str(name), writable=False)
    try:
        identity = check_header(segment, LEASE_TABLE_MAGIC).identity
        if segment.buffer.nbytes < LEASE_TABLE_BYTES:
            raise CorruptSegment(f"{name} has {segment.buffer.nbytes} bytes")
        owners = [_lease_owner(segment.buffer, bit) for bit in range(NUM_LEASE_BITS)]
    finally:
        segment.close()
    return LeaseTableSnapshot(name, identity, is_alive(identity), [o for o in owners if o.epoch])


def _lease_owner(buffer: memoryview, bit: int) -> LeaseOwner:
    offset = LEASE_ROWS_OFFSET + bit * LEASE_ROW_BYTES
    epoch, pid, start_time, boot_id = _LEASE_ROW.unpack_from(buffer, offset)
    identity = Identity(boot_id, pid, start_time)
    return LeaseOwner(bit, epoch, identity, is_alive(identity))
