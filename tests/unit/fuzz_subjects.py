"""Segments to be spoiled byte by byte, and everybody who reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replicas import wrong_in
from served import AnyTable, Served, ServedNode, fetched

from kvshm._base.ids import (
    NO_LEASE_BIT,
    BlockHash,
    BlockId,
    Epoch,
    Fingerprint,
    Generation,
    LeaseBit,
    Rank,
)
from kvshm._replica.index import Replica
from kvshm._replica.index_check import violations
from kvshm._replica.index_reader import LARGEST_INDEX, ReplicaReader
from kvshm._shm.layout import (
    EPOCH_OFFSET,
    HISTOGRAMS_OFFSET,
    INDEX_HEADER_BYTES,
    LIFE_OFFSET,
    PID_OFFSET,
    RETIRED_OFFSET,
    SLOT_BYTES,
    SLOT_HASH_OFFSET,
    SLOT_PARENT_OFFSET,
    TABLE_HEADER_BYTES,
    BlockRecord,
    RowState,
    pack_records,
)
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.segment import Segment
from kvshm.tools.check import check_once
from kvshm.tools.metrics.samples import samples_of
from kvshm.tools.node.reader import NodeReader
from kvshm.tools.render import render
from kvshm.tools.report import Filters, build_report

BLOCKS, RANKS = 20, 2  # a flipped bit of 20 makes it smaller, too
EPOCH = Epoch(0x1122334455667788)

Readers = Iterator[tuple[str, Callable[[], object]]]


def record(block: int) -> BlockRecord:
    return BlockRecord(BlockHash(bytes([block + 1]) * 32), BlockId(block), Generation(0), block)


PUBLISHED = pack_records(record(block) for block in range(8))
UNPUBLISHED = pack_records(record(block) for block in range(8, BLOCKS))
MANY = pack_records(record(block) for block in range(8, 64))
"""More than an index for 64 entries takes."""
HASHES = [record(block).block_hash for block in range(BLOCKS)]
LEASABLE = 7
SOME = [BlockId(block) for block in range(3)]


def queue() -> Any:
    following = None
    for block in reversed(range(-1, BLOCKS)):
        following = SimpleNamespace(block_id=block, next_free_block=following)
    return following


def make_table(namespace: str) -> AnyTable:
    spec = TableSpec(namespace, "fuzzed", BLOCKS, 16, RANKS, Fingerprint(bytes(range(32))), "m")
    table = AnyTable.create(spec, EPOCH)
    for rank in range(RANKS):
        table.set_life(Rank(rank))
    table.publish(PUBLISHED, bytes(8 * 8))
    table.lease(LeaseBit(3), PUBLISHED)
    table.release(LeaseBit(3), PUBLISHED[:240])
    table.retract([BlockId(7)])
    table.set_lease_bit(LeaseBit(0))
    table.counters.add(0, 8)
    table.log_error("one error")
    table.take_ticket(RANKS)
    return table


def fill(replica: Replica) -> None:
    replica.apply(replica.add_row(Epoch(7), "other", 64, LeaseBit(2)), PUBLISHED)
    replica.add_row(Epoch(8), "third", BLOCKS, LeaseBit(4))


class Subject:
    header_bytes: int
    statistics = range(0)
    """Where the header has numbers that only tools read."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.sound = self._contents = bytes(segment.buffer)
        self.spoiled = 0

    def flip(self, offset: int, mask: int) -> None:
        contents = bytearray(self.sound)
        contents[offset] ^= mask
        self.spoiled, self._contents = offset, bytes(contents)

    def write(self) -> None:
        self._segment.buffer[:] = self._contents

    def readers(self) -> Readers:
        raise NotImplementedError

    def forget(self) -> None:
        """Unmap what was mapped since the flip."""


class Table(Subject):
    header_bytes = HISTOGRAMS_OFFSET
    statistics = range(HISTOGRAMS_OFFSET, TABLE_HEADER_BYTES)

    def __init__(self, node: ServedNode) -> None:
        self._held = make_table(node.namespace)
        self._opened: list[AnyTable] = []
        super().__init__(self._held._segment)
        node.engines.append(Served(node.run_dir, self._held, node.namespace))
        self._segments = node.segments

    def readers(self) -> Readers:
        yield "fetched", lambda: self._opened.append(fetched(self._segments, EPOCH))
        for table in (self._held, *self._opened):
            yield from self._reading(table)
            yield from self._changing(table)

    def _reading(self, table: AnyTable) -> Readers:
        ranks = [Rank(rank) for rank in range(min(table.num_ranks, 2 * RANKS))]
        blocks = range(min(table.num_blocks, 2 * BLOCKS))
        yield "scan", table.scan
        yield "slot", lambda: [table.slot(block) for block in blocks]
        yield "check_integrity", table.check_integrity
        yield "repr", table.__repr__
        yield "errors", table.errors
        yield "counters", table.counters.snapshot
        yield "histograms", table.histograms.snapshot
        yield "traffic", table.traffic.read
        yield "progress", table.progress
        yield "loads", table.loads_since
        yield "life", lambda: [table.life(rank) for rank in ranks]
        yield "words", lambda: (table.retired, table.heartbeat, table.leases_taken, table.now)
        yield "checksum", lambda: [table.checksum(rank, b) for rank in ranks for b in blocks]
        yield "recheck", lambda: [table.recheck(rank, PUBLISHED) for rank in ranks]
        yield "check only", lambda: self._lease(table, NO_LEASE_BIT)
        yield "lease", lambda: self._lease(table, LeaseBit(5))
        yield "lease with own bit", lambda: self._lease(table, table.lease_bit)

    def _lease(self, table: AnyTable, bit: int) -> None:
        """What was spoiled must be missed: an epoch, a life word, a generation, a hash."""
        length, _ = table.lease(LeaseBit(bit), PUBLISHED)
        assert length <= self._leasable(), f"{length} blocks leased"

    def _leasable(self) -> int:
        """How many blocks may be leased though one byte is spoiled."""
        epoch = range(EPOCH_OFFSET, PID_OFFSET)
        retired = range(RETIRED_OFFSET, RETIRED_OFFSET + 8)
        lives = range(LIFE_OFFSET, LIFE_OFFSET + 8 * RANKS)
        if any(self.spoiled in word for word in (epoch, retired, lives)):
            return 0
        block, within = divmod(self.spoiled - TABLE_HEADER_BYTES, SLOT_BYTES)
        generation_and_hash = range(SLOT_HASH_OFFSET - 4, SLOT_PARENT_OFFSET)
        return block if 0 <= block < LEASABLE and within in generation_and_hash else LEASABLE

    @staticmethod
    def _changing(table: AnyTable) -> Readers:
        yield "release", lambda: table.release(LeaseBit(3), PUBLISHED)
        yield "hold", lambda: table.hold(PUBLISHED, 5)
        yield "keeps", lambda: (table.keeps_blocks(), table.kept_runs(queue(), 1, BLOCKS))
        yield "sweep", lambda: table.sweep(0xF)
        yield "publish", lambda: table.publish(UNPUBLISHED, bytes(8 * (BLOCKS - 8)))
        yield "retract", lambda: table.retract(SOME)
        yield "drain", lambda: table.drain([*SOME, BlockId(7)], 0)
        yield "force", lambda: table.force([*SOME, BlockId(7)])
        yield "reset", table.reset
        yield "take_ticket", lambda: table.take_ticket(RANKS)
        yield "finish_ticket", lambda: table.finish_ticket(0)
        yield "end_life", lambda: table.end_life(None)
        yield "log_error", lambda: table.log_error("another error")
        yield "beat", table.beat
        yield "count", lambda: table.counters.add(0)

    def forget(self) -> None:
        while self._opened:
            self._opened.pop().close()


class Index(Subject):
    header_bytes = INDEX_HEADER_BYTES

    def __init__(self, node: ServedNode) -> None:
        replica = node.serve("fuzzed", EPOCH).replica
        fill(replica)
        super().__init__(replica._segment)
        self._name, self._header = replica.name, replica.header
        self._tombstones = {row: bytes(t) for row, t in replica._tombstones.items()}
        self._segments = node.segments
        self._held = self._segments.replica(EPOCH)
        self._opened: list[ReplicaReader] = []

    def readers(self) -> Readers:
        yield "fetched", lambda: self._opened.append(self._segments.replica(EPOCH))
        for reader in (self._held, *self._opened):
            yield from self._reading(reader)
        for what, change in self._changes():
            yield f"owner's {what}", lambda change=change: self._as_owner(change)

    @staticmethod
    def _reading(reader: ReplicaReader) -> Readers:
        yield "lookup", lambda: reader.lookup(HASHES, 0, BLOCKS)
        yield "lookup in all rows", lambda: reader.lookup(HASHES, 0, BLOCKS, (1 << 64) - 1)
        yield "rows", reader.rows
        yield "entries", lambda: list(reader.entries())
        yield "violations", lambda: violations(reader.buffer)
        yield "repr", reader.__repr__

    @staticmethod
    def _changes() -> Iterator[tuple[str, Callable[[Replica], object]]]:
        yield "lookup", lambda r: r.lookup(HASHES, 0, BLOCKS)
        yield "check", wrong_in
        yield "apply", lambda r: r.apply(0, UNPUBLISHED[:96])
        yield "apply that grows", lambda r: r.apply(0, MANY)
        yield "forget", lambda r: r.forget(0, Epoch(1), PUBLISHED)
        yield "drop_row", lambda r: r.drop_row(0)
        yield "add_row", lambda r: r.add_row(Epoch(9), "x", 4, LeaseBit(1))
        yield "set_row_state", lambda r: r.set_row_state(0, RowState.SUSPECTED)
        yield "resync", lambda r: r.resync(0, r.tombstones(0), UNPUBLISHED[:48])

    def _as_owner(self, change: Callable[[Replica], object]) -> None:
        """The segment is its owner's, with what the owner remembers apart from it."""
        fd = self._segment.descriptor(writable=True)
        owner = Replica(Segment.from_fd(self._name, fd, True, LARGEST_INDEX), self._header)
        owner._tombstones = {row: bytearray(t) for row, t in self._tombstones.items()}
        try:
            change(owner)
        finally:
            owner.close()

    def forget(self) -> None:
        while self._opened:
            self._opened.pop().close()


def dump(run_dir: Path) -> None:
    report = build_report(run_dir, None, Filters(entries=True))
    list(render(report, everything=True))
    json.dumps(report)
    check_once(run_dir, None)


def watch(reader: NodeReader) -> None:
    """What ``kvshm top``, ``status`` and ``metrics`` do at each of their looks."""
    samples_of(reader.read())
