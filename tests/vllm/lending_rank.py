"""A rank of another engine that lends blocks of its memory, in a process of its own, without vLLM.

    python -m tests.vllm.lending_rank RUN_DIR NAMESPACE EPOCH REGIONS

REGIONS are msgpack in hex.  It publishes what it is told on its standard input, a list of blocks,
and says where; or it reuses a block, a number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation
from kvshm._base.rundir import rank_socket
from kvshm._shm.layout import BlockRecord, SlotState, pack_records
from kvshm._shm.own_slot_table import TableSpec
from kvshm.interfaces import MemoryDescriptor, Region
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport
from kvshm.transport.regions import spans

from ..unit.served import AnyTable, Served

REUSED = 255


class Lent(msgspec.Struct):
    """What it has published, as packed records, and where that lies."""

    memory: MemoryDescriptor
    shown: bytes


def content(epoch: int, block: int, nbytes: int) -> bytes:
    """What a block holds in each region, until it is reused."""
    return bytes([epoch * 16 + block]) * nbytes


class Lender:
    def __init__(self, run_dir: Path, namespace: str, epoch: Epoch, regions: Sequence[Region]):
        size = max(r.offset + r.stride * r.num_blocks for r in regions)
        self.epoch, self.regions, self.memory = epoch, regions, KVMemory.create(size)
        path = rank_socket(run_dir, namespace, "lender", 0)
        self.transport = PosixShmTransport(self.memory, regions, 0, path)
        self.described = self.transport.export(epoch)
        fingerprint = Fingerprint(bytes(32))
        spec = TableSpec(namespace, "lender", regions[0].num_blocks, 4, 1, fingerprint, "m")
        self.table = AnyTable.create(spec, epoch)
        self.table.set_life(0)
        self.served = Served(run_dir, self.table, namespace)

    def fill(self, block: int, what: bytes | None) -> None:
        for _, start, end in spans(self.regions, BlockId(block)):
            whole = what or content(self.epoch, block, end - start)
            self.memory.buffer[start:end] = whole[:1] * (end - start)

    def publish(self, blocks: Sequence[int]) -> Lent:
        self.retract([b for b in blocks if self.table.slot(BlockId(b)).state is SlotState.READY])
        records = []
        for block in blocks:
            self.fill(block, None)
            one = BlockId(block)
            generation = Generation(self.table.slot(one).generation)
            records.append(BlockRecord(BlockHash(bytes([block]) * 32), one, generation, 0))
        return Lent(
            self.described, self.table.publish(pack_records(records), bytes(8 * len(blocks)))
        )

    def retract(self, blocks: Sequence[int]) -> None:
        self.table.retract(list(map(BlockId, blocks)))
        self.table.force(list(map(BlockId, blocks)))

    def reuse(self, block: int) -> None:
        self.retract([block])
        self.fill(block, bytes([REUSED]))


def main(run_dir: str, namespace: str, epoch: str, regions: str) -> None:
    wanted = msgspec.msgpack.decode(bytes.fromhex(regions), type=list[Region])
    lender = Lender(Path(run_dir), namespace, Epoch(int(epoch)), wanted)
    for line in sys.stdin:
        if isinstance(told := json.loads(line), list):
            print(msgspec.msgpack.encode(lender.publish(told)).hex(), flush=True)
        else:
            lender.reuse(told)
            print("reused", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
