"""Every byte offset of kvshm's shared memory, in one place; docs/layout.md draws what lies there.

C has the same numbers in ``layout.h``, and docs/layout.md in its tables: `make docs` writes both.
``kvshm._native`` refuses to load if it was built with different numbers.  All integers are
little-endian (kvshm runs on x86-64 and aarch64 Linux only).
"""

from __future__ import annotations

import struct
from binascii import crc32
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple, cast

from kvshm._base.ids import HASH_BYTES, BlockHash, BlockId, Generation

LAYOUT_VERSION = 10

# -- common prefix of all segments
MAGIC_OFFSET = 0
VERSION_OFFSET = MAGIC_OFFSET + 8
HEADER_BYTES_OFFSET = VERSION_OFFSET + 4
SEGMENT_BYTES_OFFSET = HEADER_BYTES_OFFSET + 4
EPOCH_OFFSET = SEGMENT_BYTES_OFFSET + 8
PID_OFFSET = EPOCH_OFFSET + 8
PREFIX_BYTES = 64

# -- slot table
TABLE_MAGIC = b"KVSHMSLT"
TABLE_HEADER_BYTES = 32768
FINGERPRINT_OFFSET = PREFIX_BYTES
NUM_BLOCKS_OFFSET = FINGERPRINT_OFFSET + 32
BLOCK_SIZE_OFFSET = NUM_BLOCKS_OFFSET + 4
NUM_RANKS_OFFSET = BLOCK_SIZE_OFFSET + 4
LEASE_BIT_OFFSET = NUM_RANKS_OFFSET + 4
CREATED_OFFSET = LEASE_BIT_OFFSET + 4
HEARTBEAT_OFFSET = CREATED_OFFSET + 8
LEASES_TAKEN_OFFSET = HEARTBEAT_OFFSET + 8
RETIRED_OFFSET = LEASES_TAKEN_OFFSET + 8
KEPT_UNTIL_OFFSET = RETIRED_OFFSET + 8
KEEPS_OFFSET = KEPT_UNTIL_OFFSET + 8
WITHDRAWN_OFFSET = KEEPS_OFFSET + 8
IN_DRAIN_OFFSET = WITHDRAWN_OFFSET + 8
LIFE_OFFSET = 192
MAX_RANKS = 64
MAX_BLOCKS = 1 << 24
ENGINE_NAME_OFFSET = LIFE_OFFSET + 8 * MAX_RANKS
ENGINE_NAME_BYTES = 64
MODEL_NAME_OFFSET = ENGINE_NAME_OFFSET + ENGINE_NAME_BYTES
MODEL_NAME_BYTES = 256
COUNTERS_OFFSET = MODEL_NAME_OFFSET + MODEL_NAME_BYTES
NUM_COUNTERS = 128
ERRORS_OFFSET = COUNTERS_OFFSET + 8 * NUM_COUNTERS
NUM_ERRORS = 16
ERROR_BYTES = 128
TICKETS_OFFSET = ERRORS_OFFSET + NUM_ERRORS * ERROR_BYTES
NUM_TICKETS = 256
PULSES_OFFSET = TICKETS_OFFSET + 8 * NUM_TICKETS
PULSE_DIED = 0x40000000
HISTOGRAMS_OFFSET = 8192
NUM_HISTOGRAMS = 32
NUM_BUCKETS = 39
HISTOGRAM_BYTES = 8 * (NUM_BUCKETS + 1)
TRAFFIC_OFFSET = HISTOGRAMS_OFFSET + NUM_HISTOGRAMS * HISTOGRAM_BYTES
NUM_TRAFFIC_ROWS = 64
TRAFFIC_ROW_BYTES = 128
LOOPS_OFFSET = TRAFFIC_OFFSET + NUM_TRAFFIC_ROWS * TRAFFIC_ROW_BYTES
NUM_LOOPS = 3 + MAX_RANKS
LOOP_BYTES = 24
TICKET_TIMES_OFFSET = LOOPS_OFFSET + NUM_LOOPS * LOOP_BYTES

SLOT_BYTES = 64
SLOT_HASH_OFFSET = 8
SLOT_PARENT_OFFSET = SLOT_HASH_OFFSET + HASH_BYTES
SLOT_DEPTH_OFFSET = SLOT_PARENT_OFFSET + 8
SLOT_PUBLISHED_OFFSET = SLOT_DEPTH_OFFSET + 4
SLOT_GROUP_OFFSET = SLOT_PUBLISHED_OFFSET + 4
SLOT_HELD_OFFSET = SLOT_GROUP_OFFSET + 4
MAX_HOLD_SECONDS = 3600

NUM_LEASE_BITS = 28
LEASE_MASK = (1 << NUM_LEASE_BITS) - 1
STATE_SHIFT = NUM_LEASE_BITS
GENERATION_SHIFT = 32

# -- replica index
INDEX_MAGIC = b"KVSHMIDX"
INDEX_HEADER_BYTES = 8192
CAPACITY_OFFSET = PREFIX_BYTES
COUNT_OFFSET = CAPACITY_OFFSET + 8
SEQUENCE_OFFSET = COUNT_OFFSET + 8
ROWS_OFFSET = 4096
NUM_ROWS = 64
ROW_BYTES = 64
ROW_STATE_OFFSET = 8
ROW_ENTRIES_OFFSET = 16
ENTRY_BYTES = 16
ENTRY_ROW_SHIFT = 24
TOMBSTONE_BYTES = 16

RECORD_BYTES = 48
_RECORD = struct.Struct(f"<{HASH_BYTES}sIIIHH")
assert _RECORD.size == RECORD_BYTES


class SlotState(IntEnum):
    """State of a slot; the transitions are drawn in docs/protocol.md."""

    EMPTY = 0
    READY = 1
    DRAINING = 2


class RowState(IntEnum):
    """State of another engine in the replica."""

    FREE = 0
    LIVE = 1
    SUSPECTED = 2
    GONE = 3


class RecordKind(IntEnum):
    """What happened to the block of a record in an event."""

    PUBLISH = 1
    RETRACT = 2


class BlockRecord(NamedTuple):
    """One block of one engine at one generation, in events and plans."""

    block_hash: BlockHash
    block_id: BlockId
    generation: Generation
    depth: int
    kind: RecordKind = RecordKind.PUBLISH
    group: int = 0
    """Index of the block's KV cache group, at most 65535."""


def pack_records(
    records: Iterable[BlockRecord | tuple[bytes, int, int, int, int, int]],
) -> bytes:
    """Return the records as one packed array, RECORD_BYTES each.  Plain tuples of their fields are
    quicker to make."""
    return b"".join(_RECORD.pack(*record) for record in records)


def unpack_records(packed: bytes | memoryview) -> Iterator[BlockRecord]:
    """Yield the records of a packed array.  ValueError if its length is not a multiple
    of RECORD_BYTES or a kind is unknown."""
    if len(packed) % RECORD_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a multiple of {RECORD_BYTES}")
    for block_hash, block_id, generation, depth, kind, group in _RECORD.iter_unpack(packed):
        yield BlockRecord(block_hash, block_id, generation, depth, RecordKind(kind), group)


def block_ids(packed: bytes) -> list[BlockId]:
    """The block ids of a packed array, in order.  ValueError if its length is not a multiple of
    RECORD_BYTES."""
    if len(packed) % RECORD_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a multiple of {RECORD_BYTES}")
    words = memoryview(packed).cast("I")
    return cast(list[BlockId], words[HASH_BYTES // 4 :: RECORD_BYTES // 4].tolist())


def table_bytes(num_blocks: int, num_ranks: int) -> int:
    return TABLE_HEADER_BYTES + num_blocks * (SLOT_BYTES + 8 * num_ranks)


def index_bytes(capacity: int) -> int:
    return INDEX_HEADER_BYTES + capacity * ENTRY_BYTES


def numbers() -> dict[str, int]:
    """All numbers of the layout by name, as in kvshm/native/layout.h."""
    own = {name: value for name, value in globals().items() if name[0].isupper()}
    enums = (SlotState, RowState, RecordKind)
    own |= {member.name: member.value for enum in enums for member in enum}
    return {name: value for name, value in own.items() if type(value) is int and name.isupper()}


def digest(of: Mapping[str, int]) -> int:
    return crc32(repr(sorted(of.items())).encode())


def check_layout(native: int) -> None:
    """Compare the digest of the layout that the native module was built with to this module's.
    ``kvshm._native`` calls it during its import, so it cannot be skipped.  Raises ImportError."""
    if native != digest(numbers()):
        raise ImportError(
            f"kvshm._native was built with another layout than that of {__file__}: "
            "build the native module again, after `make docs` if the layout was changed"
        )
