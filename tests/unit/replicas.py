"""What tests of the replica index speak of: block n holds content n unless said otherwise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kvshm.ids import BlockHash, BlockId, Epoch, Generation
from kvshm.replica.index_reader import ReplicaReader
from kvshm.shm.layout import BlockRecord, RecordKind, pack_records, unpack_records

OWN_EPOCH = Epoch(0x1122334455667788)
PUBLISH, RETRACT = RecordKind.PUBLISH, RecordKind.RETRACT
HASHES = [BlockHash(hashlib.sha256(n.to_bytes(4, "little")).digest()) for n in range(4096)]


def record(
    block: int, generation: int = 1, kind: RecordKind = PUBLISH, content: int | None = None
) -> BlockRecord:
    number = block if content is None else content
    return BlockRecord(HASHES[number], BlockId(block), Generation(generation), number, kind)


def packed(blocks: Iterable[int], generation: int = 1, kind: RecordKind = PUBLISH) -> bytes:
    return pack_records(record(block, generation, kind) for block in blocks)


def found(replica: ReplicaReader, content: int, mask: int | None = None) -> list[tuple[int, int]]:
    """(row, generation) of what a lookup of one content gives."""
    runs = replica.lookup(HASHES, content, content + 1, mask)
    return [(row, r.generation) for row, records in runs for r in unpack_records(records)]
