"""Atomic operations on shared memory, in C.

What the core has too is described there, in core.h; what the core writes through a pointer is
returned here, behind the count or in its place.

Every buffer is an mmap, bytearray, bytes or memoryview of contiguous bytes; a segment must be
8-byte aligned and is given whole.  "records" are packed 48-byte records (kvshm/shm/layout.py).
Large batches of records or blocks, scans and copies release the GIL.  All raise CorruptSegment
if a header contradicts itself or the buffer's length, IndexError for a block, rank, bit, row or
offset that does not exist, ValueError or TypeError for other bad arguments (BufferError or
TypeError if a buffer that is written is read-only).  Nothing here blocks or waits.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from typing_extensions import Buffer

from .ids import BlockId

_Region: TypeAlias = tuple[int, int, int, int]
"""Address of block 0, stride, bytes per block, number of blocks."""

NUM_SYNC_POINTS: int
"""The core's sync points have the numbers below this."""

# -- slots: exporter's side (the table is written)

def publish(table: Buffer, records: Buffer, parents: Buffer, published_ms: int, /) -> bytes: ...
def retract(table: Buffer, blocks: Sequence[int], /) -> tuple[bytes, list[BlockId]]: ...
def drain(table: Buffer, blocks: Sequence[int], slow: int, /) -> list[BlockId]: ...
def force(table: Buffer, blocks: Sequence[int], /) -> tuple[int, int]: ...
def reset(table: Buffer, /) -> int: ...

# -- marks of the exporter's own blocks (kvshm/engine/marks.py): 8 bytes each, private memory

def marks_change(marks: Buffer, blocks: Sequence[int], keep: int, /) -> list[int]:
    """The next generation, and no flags but those in ``keep``.  Returns those that were
    published."""

def marks_retract(
    table: Buffer, marks: Buffer, blocks: Sequence[int], counter: int, /
) -> tuple[bytes, list[BlockId]]:
    """``marks_change``, and ``retract`` of those that were published; how many were READY is added
    to the word at offset ``counter`` of the table."""

def marks_sound(marks: Buffer, table: Sequence[Any], stop: int, /) -> int:
    """How many of ``table[:stop]``, objects with a ``block_id``, are sound from the first on."""

def marks_write(
    marks: Buffer, table: Sequence[Any], first: int, last: int, complete: int, /
) -> tuple[bytes, list[BlockId]]:
    """Change ``table[first:last]``; those below ``complete`` become sound.  Returns these as
    packed pairs of block and generation, and the blocks that were published."""

def marks_step(
    requests: dict[str, Any], scheduled: dict[str, int], size: int, epochs: int, drafts: int, /
) -> list[tuple[Any, int, int]]:
    """What is followed of those of the step's requests that write a block with a mark, complete
    one, or have another table than before; each with the first block that the step writes and
    the token that it ends before.  ``drafts`` is not 0 where tokens may be rejected."""

def marks_publish(
    table: Buffer,
    marks: Buffer,
    pool: Sequence[Any],
    runs: list[tuple[list[bytes], int, bytes]],
    published_ms: int,
    counter: int,
    /,
) -> tuple[bytes, list[tuple[list[bytes], int, bytes]]]:
    """Publish the blocks in ``runs`` (chain, index of the first block, packed pairs) that are
    unchanged and whose ``pool[block].block_hash`` is the chain's at their index.  Returns the
    records published, and the runs that hold a block without a hash which is in use
    (``ref_cnt``), or one whose slot is not EMPTY.  How many were published is added to the word
    at offset ``counter`` of the table."""

# -- slots: importer's side

def lease(table: Buffer, epoch: int, bit: int, records: Buffer, /) -> tuple[int, bytes]: ...
def release(table: Buffer, bit: int, records: Buffer, taken: bytes | None, /) -> int: ...
def recheck(table: Buffer, epoch: int, rank: int, records: Buffer, /) -> bytes: ...
def sweep(table: Buffer, bits: int, /) -> int: ...
def scan(table: Buffer, first: int, count: int, /) -> tuple[bytes, int]: ...

# -- words

def load(segment: Buffer, offset: int, /) -> int: ...
def store(segment: Buffer, offset: int, value: int, /) -> None: ...
def add(segment: Buffer, offset: int, delta: int, /) -> int: ...
def compare_exchange(segment: Buffer, offset: int, expected: int, desired: int, /) -> bool: ...
def mark_ready(segment: Buffer, layout_version: int, /) -> None: ...
def address(buffer: Buffer, /) -> int:
    """Address of the buffer's first byte; the caller keeps the buffer alive."""

# -- replica index

def index_apply(
    index: Buffer, batches: list[tuple[bytearray, int, bytes]], /
) -> tuple[int, int, int, int]:
    """Apply batches of events in order, each (tombstones, row, records) of one engine; returns
    (added, removed, ignored, full) of all together.  ``tombstones`` (written) holds 16 bytes per
    block of that engine, zeros at first.  The count of the index and the entries of its rows are
    kept here.  What a batch raises for, those before it are applied."""

def index_stale(before: Buffer, scanned: Buffer, /) -> bytes: ...
def index_drop_row(index: Buffer, row: int, /) -> int: ...
def index_copy(index: Buffer, larger: Buffer, /) -> int: ...
def index_lookup(
    index: Buffer, hashes: list[bytes], start: int, stop: int, rows: int, /
) -> list[tuple[int, bytes]]:
    """Longest run of ``hashes[start:stop]`` (1 to 32 bytes each) held by rows in the mask
    ``rows``, cut where the owner changes: row and records of each part."""

# -- copies

def copy_blocks(
    source: list[_Region],
    target: list[_Region],
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    stop: Buffer | None,
    /,
) -> int: ...

# -- processes

def pulse(segment: Buffer, offset: int, /) -> object:
    """Have the kernel write PULSE_DIED to the word at ``offset`` of a shared mapping when this
    process dies, before any of its memory or descriptors go; it is also written once the object
    that is returned is gone.  Until then the word holds the id of a thread.  Waits for that
    thread to start.  Raises OSError: no room for a thread, or a kernel without robust futexes."""

# -- threads

def timer() -> int:
    """A new descriptor to ``wake`` by: readable, 8 bytes, once its time has come.  Does not block.
    Raises OSError."""

def wake(timer: int, microseconds: int, /) -> None:
    """Have who waits for ``timer`` wake up so much later, whatever was set before, and keep the
    GIL: it runs once the caller waits itself, not in the middle of the caller's work.  Raises
    OSError."""

# -- tests

def arm_sync_point(point: int, signal: int, nth: int, /) -> None:
    """Raise ``signal`` in whichever thread is the ``nth`` to reach ``point`` from now on."""
