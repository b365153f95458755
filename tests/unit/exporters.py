"""Other engines, as far as tests of peers need them: real slot tables, events by hand."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

from kvshm._node.peers import Peers
from kvshm._node.protocol import EngineInfo, RankInfo
from kvshm._shm.layout import (
    LAYOUT_VERSION,
    VERSION_OFFSET,
    BlockRecord,
    pack_records,
    unpack_records,
)
from kvshm.interfaces import MemoryDescriptor, Region

from .served import ServedNode

OWN_EPOCH = 0xFFFF
FINGERPRINT = bytes(range(32))
NUM_BLOCKS = 64
HASHES = [hashlib.sha256(bytes([n])).digest() for n in range(200)]


class Exporter:
    def __init__(
        self,
        node: ServedNode,
        epoch: int,
        name: str = "a",
        ranks: int = 1,
        regions: Sequence[Region] = (),
    ) -> None:
        self._node = node
        self.served = node.serve(name, epoch, NUM_BLOCKS, ranks, FINGERPRINT)
        self.table = self.served.table
        node.enlist(self.table)
        for rank in range(ranks):
            self.table.set_life(rank)
        memory = MemoryDescriptor("none", epoch, 0, list(regions))
        self.info = EngineInfo(
            epoch=epoch,
            name=name,
            pid=1000 + epoch,
            fingerprint=FINGERPRINT,
            fields={},
            num_blocks=NUM_BLOCKS,
            ranks=[RankInfo(pid=1, memory=memory)] * ranks,
            lease_bit=epoch % 28,
        )

    def publish(self, *contents: int, shift: int = 0) -> bytes:
        """Block ``n + shift`` gets content ``n``; returns the event."""
        records = [BlockRecord(HASHES[n], n + shift, 0, n) for n in contents]
        return self.table.publish(pack_records(records), bytes(8 * len(contents)))

    def reuse(self, *blocks: int) -> bytes:
        """Retract; returns the event."""
        return self.table.retract(list(blocks))[0]

    def end(self) -> None:
        self._node.roster.pop(self.info.epoch, None)
        self.served.close()


def break_version(a: Exporter) -> None:
    struct.pack_into("<I", a.table._segment.buffer, VERSION_OFFSET, 99)


def mend_version(a: Exporter) -> None:
    struct.pack_into("<I", a.table._segment.buffer, VERSION_OFFSET, LAYOUT_VERSION)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Make = Callable[..., Exporter]


def offered(peers: Peers, content: int) -> list[tuple[int, int, int]]:
    return [
        (run.peer.info.epoch, r.block_id, r.generation)
        for run in peers.lookup(HASHES, content, content + 1)
        for r in unpack_records(run.records)
    ]
