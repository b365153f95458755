"""What tests of the replica index speak of: block n holds content n unless said otherwise."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from kvshm._base.ids import BlockHash, BlockId, Epoch, Generation
from kvshm._replica.index import Replica
from kvshm._replica.index_check import violations
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.layout import (
    TOMBSTONE_BYTES,
    BlockRecord,
    RecordKind,
    pack_records,
    unpack_records,
)

OWN_EPOCH = Epoch(0x1122334455667788)
PUBLISH, RETRACT = RecordKind.PUBLISH, RecordKind.RETRACT
TOMBSTONE = struct.Struct("<QII")
assert TOMBSTONE.size == TOMBSTONE_BYTES
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


def published_blocks(tombstones: bytes) -> dict[int, tuple[int, int]]:
    """(tag, generation) of the blocks that are published according to these tombstones, by block
    id."""
    return {
        block_id: (tag, generation)
        for block_id, (tag, state, generation) in enumerate(TOMBSTONE.iter_unpack(tombstones))
        if state == PUBLISH
    }


def wrong_in(replica: Replica) -> list[str]:
    """The violations of the index, and the blocks of which its entries and the tombstones tell
    different things."""
    held = {(e.row, int(e.block_id)): (e.tag, int(e.generation)) for e in replica.entries()}
    heard = {
        (row.row, block): known
        for row in replica.rows()
        for block, known in published_blocks(replica.tombstones(row.row)).items()
    }
    return violations(replica.buffer) + [
        f"row, block {place}: {held.get(place)} held, {heard.get(place)} heard of"
        for place in sorted(held.keys() | heard.keys())
        if held.get(place) != heard.get(place)
    ]
