"""One process of the lease race: an exporter that reuses its blocks, or an importer.

    lease_racer.py exporter TABLE DATA patient|forcing ROUNDS
    lease_racer.py importer TABLE DATA BIT LOADS

The data file stands for the KV memory: each block repeats its id and generation, so that any
mixture of two generations shows.  Each process prints one JSON object with its counts.
"""

from __future__ import annotations

import json
import mmap
import random
import sys
from collections import Counter
from pathlib import Path

from kvshm._base.ids import BlockHash, BlockId, Generation, LeaseBit, Rank
from kvshm._shm.layout import RECORD_BYTES, BlockRecord, SlotState, pack_records, unpack_records
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.slot_table import PeerSlotTable, SlotTableView
from kvshm._shm.statistics import DRAINED

BLOCK_BYTES = 1 << 15
RANK = Rank(0)


class RacedTable(OwnSlotTable):
    """The owner's part is played by another process than the one that created the table."""

    from_fd = SlotTableView.__dict__["from_fd"]


def pattern(block: int, generation: int) -> bytes:
    return (block << 32 | generation).to_bytes(8, "little") * (BLOCK_BYTES // 8)


def open_data(path: str, blocks: int) -> mmap.mmap:
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), blocks * BLOCK_BYTES)


class Exporter:
    """Fills, publishes and takes back one block after the other."""

    def __init__(self, table: OwnSlotTable, data: mmap.mmap, patient: bool) -> None:
        self.table, self.data, self.patient = table, data, patient
        self.counts: Counter[str] = Counter()

    def reuse(self, block: BlockId) -> None:
        if self.table.slot(block).state is not SlotState.EMPTY:
            self.take_back(block)
        generation = self.table.slot(block).generation
        start = block * BLOCK_BYTES
        self.data[start : start + BLOCK_BYTES] = b"\xff" * BLOCK_BYTES
        self.data[start : start + BLOCK_BYTES] = pattern(block, generation)
        digest = BlockHash(generation.to_bytes(4, "little") * 8)
        record = BlockRecord(digest, block, Generation(0), 0)
        assert len(self.table.publish(pack_records([record]), bytes(8))) == RECORD_BYTES
        self.counts["reused"] += 1

    def take_back(self, block: BlockId) -> None:
        _, left = self.table.retract([block])
        self.counts["drained"] += len(left)
        self.table.counters.add(DRAINED, len(left))
        tries = 0
        while left and (self.patient or tries < 3):
            left, tries = self.table.drain(left, 0), tries + 1
        forced, holders = self.table.force(left)
        self.counts["forced"] += forced
        self.counts["overridden"] += holders.bit_count()


class Importer:
    """Leases, copies, re-checks, compares and releases."""

    def __init__(self, table: PeerSlotTable, data: mmap.mmap, bit: LeaseBit) -> None:
        self.table, self.data, self.bit = table, data, bit
        self.counts: Counter[str] = Counter()

    def load(self, packed: bytes) -> None:
        length, taken = self.table.lease(self.bit, packed)
        leased, taken = packed[: length * RECORD_BYTES], taken[:length]
        copies = [
            self.data[r.block_id * BLOCK_BYTES : (r.block_id + 1) * BLOCK_BYTES]
            for r in unpack_records(leased)
        ]
        good = self.table.recheck(RANK, leased)
        for record, copy, passed in zip(unpack_records(leased), copies, good, strict=True):
            same = copy == pattern(record.block_id, record.generation)
            self.counts["delivered" if passed else "discarded"] += 1
            self.counts["torn"] += not same
            self.counts["wrong"] += passed and not same
        self.counts["taken"] += sum(taken)
        if self.bit >= 0:
            self.counts["released"] += self.table.release(self.bit, leased, taken)

    def some(self, chance: random.Random) -> bytes:
        """A few of the READY records, as a plan made a moment ago names them."""
        records = list(unpack_records(self.table.scan()))
        chance.shuffle(records)
        return pack_records(records[:3])


def main(role: str, fd: str, path: str, how: str, amount: str, torn: str, met: str) -> Counter[str]:
    """``amount``: of blocks reused or delivered; an importer also goes on until it has met so
    many ``torn`` copies and the exporter so many leases, however seldom a busy machine lets that
    happen."""
    chance = random.Random(how)
    if role == "exporter":
        own = RacedTable.from_fd("the table", int(fd))
        data = open_data(path, own.num_blocks)
        exporter = Exporter(own, data, how == "patient")
        while exporter.counts["reused"] < int(amount) and not own.retired:
            exporter.reuse(BlockId(chance.randrange(own.num_blocks)))
        return exporter.counts
    table = PeerSlotTable.from_fd("the table", int(fd))
    data = open_data(path, table.num_blocks)
    importer = Importer(table, data, LeaseBit(int(how)))
    while (
        importer.counts["delivered"] < int(amount)
        or importer.counts["torn"] < int(torn)
        or table.counters.read(DRAINED) < int(met)
    ):
        importer.load(importer.some(chance))
    return importer.counts


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
