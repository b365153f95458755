"""Atomic operations on shared memory, in C.

core.h describes the functions that the core has too.  What a core function writes through a
pointer is returned here, after the count or instead of the count.

Every buffer is an mmap, bytearray, bytes or memoryview of contiguous bytes; a segment must be
8-byte aligned and is given whole.  "records" are packed 48-byte records (kvshm/_shm/layout.py).
Large batches of records or blocks, scans and copies release the GIL.  All functions raise
CorruptSegment if a header contradicts itself or the buffer's length, IndexError for a block, rank,
bit, row or offset that does not exist, ValueError or TypeError for other bad arguments (BufferError
or TypeError if a buffer that is written is read-only).  No function blocks, except ``pulse``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from typing_extensions import Buffer

from ._base.ids import BlockId

_Region: TypeAlias = tuple[int, int, int, int]
"""Address of block 0, stride, bytes per block, number of blocks."""

_Run = TypeVar("_Run", bound=tuple[Any, ...])
"""Chain, index of the first block, packed pairs of block and version; then, if given, how many
hashes the chain has for each block (otherwise 1), and whatever the caller adds."""

FoundDuplicates: TypeAlias = tuple[list[Any], bytes, bytes, int, Any, int, bool, float]
Views: TypeAlias = tuple[Buffer, Buffer, Mapping[int, Buffer], Buffer, Buffer, int, Buffer]
KeptRuns: TypeAlias = tuple[list[tuple[Any, Any]], int, int]

NUM_SYNC_POINTS: int
"""The core's sync points have the numbers below this."""

# -- slots: exporter's side (the table is written)

def publish(table: Buffer, records: Buffer, parents: Buffer, published_ms: int, /) -> bytes: ...
def retract(table: Buffer, blocks: Sequence[int], /) -> tuple[bytes, list[BlockId]]: ...
def drain(table: Buffer, blocks: Sequence[int], slow: int, /) -> list[BlockId]: ...
def force(table: Buffer, blocks: Sequence[int], /) -> tuple[int, int]: ...
def reset(table: Buffer, /) -> int: ...

# -- marks of the exporter's own blocks (kvshm/_engine/marks.py): 8 bytes each, private memory

def marks_change(marks: Buffer, blocks: Sequence[int], keep: int, /) -> list[int]:
    """Advance the versions, clear all flags but ``keep``.  Returns the published blocks."""

def marks_retract(
    table: Buffer, marks: Buffer, blocks: Sequence[int], counter: int, /
) -> tuple[bytes, list[BlockId]]:
    """``marks_change``, then ``retract`` for the published ones, counted at offset ``counter``."""

def marks_sound(marks: Buffer, table: Sequence[Any], stop: int, /) -> int:
    """See ``Marks.sound``."""

def marks_touch(marks: Buffer, table: Sequence[Any], stop: int, tick: int, /) -> int:
    """See ``Marks.touch``."""

def marks_write(
    marks: Buffer, table: Sequence[Any], first: int, last: int, complete: int, /
) -> tuple[bytes, list[BlockId]]:
    """See ``Marks.write`` (kvshm/_engine/marks.py)."""

def marks_step(
    requests: dict[str, Any], scheduled: dict[str, int], size: int, epochs: int, drafts: int, /
) -> list[tuple[Any, int, int]]:
    """See ``touching`` (kvshm/_engine/marks.py)."""

def marks_publish(
    table: Buffer,
    marks: Buffer,
    pool: Sequence[Any],
    runs: list[_Run],
    published_ms: int,
    counter: int,
    /,
) -> tuple[bytes, list[_Run]]:
    """``OwnSlotTable.publish_marked``; counted at offset ``counter``.  A block's
    ``pool[block].block_hash`` is the last of the chain's hashes for its index, with a group of at
    most 65535 behind it (4 bytes, big endian).  A block without a hash counts only while in use
    (``ref_cnt``)."""

# -- the engine's queue of free blocks

def kept_runs(table: Buffer, head: Any, wanted: int, most: int, now: int, /) -> KeptRuns:
    """Walk the blocks that follow ``head`` by their ``next_free_block``, ``most`` at most, until
    ``wanted`` of them are not kept (``kvshm_kept``).  Returns the first and last block of each run
    of kept ones, and how many blocks were not kept, and how many were."""

def skip_unhashed(head: Any, wanted: int, /) -> tuple[Any, int]:
    """Walk the blocks that follow ``head`` up to the first with a hash, ``wanted`` at most.
    Returns the last one without, or ``head``, and how many are still wanted."""

def put_behind(known: Buffer, place: Any, blocks: list[Any], ends: list[Any], /) -> None:
    """Move blocks of the queue behind another one of it, in this order; they are no longer
    ``known`` (``find_duplicates``).  In ``ends`` one that moves is replaced by the block before it.
    """

# -- duplicates: the ``tables`` are those of the engines that count, by row of ``index``

def find_duplicates(
    table: Buffer,
    index: Buffer,
    tables: Mapping[int, Buffer],
    marks: Buffer,
    needed: Buffer,
    turn: int,
    known: Buffer,
    begin: Any,
    wanted: int,
    most: int,
    now: int,
    limits: tuple[int, int, float, float, int, int],
    /,
) -> FoundDuplicates:
    """Walk such a queue from behind ``begin`` until ``wanted`` duplicates were found that no block
    needs which stays, or ``most`` blocks were walked, or the queue has ended.  One that was used
    too lately stays: less than ``ratio`` times as long ago as the first last copy that was walked;
    and so do prefixes of fewer blocks than are imported, and what is behind the last one that would
    be.  Returns those duplicates that were not ``known`` (a byte for each block, set for those that
    are found), the mark of each, how many there were with known ones, the last block walked, how
    many were, whether the queue has ended, and for how many seconds that last copy has rested.
    ``limits``: the present tick of the marks,
    the table's age in milliseconds, ``ratio``, those seconds of the walk before (0: none was met),
    and the fewest and most blocks of an import.  ``needed``: room that walks share, of 8 bytes for
    each of a power of two of hashes, 0 at first; a walk uses what others of its ``turn`` have put
    there."""

def still_duplicates(
    table: Buffer,
    index: Buffer,
    tables: Mapping[int, Buffer],
    marks: Buffer,
    needed: Buffer,
    turn: int,
    known: Buffer,
    blocks: list[Any],
    were: bytes,
    now: int,
    /,
) -> tuple[list[Any], bytes]:
    """Return those of these pool blocks, which walks have found in this order, that are duplicates
    now and not needed, and have the mark that they had, and one copy of each, packed.  The others
    are no longer ``known``."""

def forget(known: Buffer, blocks: list[Any], /) -> None:
    """These pool blocks are no longer known."""

def count_lost(index: Buffer, tables: Mapping[int, Buffer], copies: bytes, /) -> int:
    """Return how many of these copies are gone."""

# -- slots: importer's side

def lease(table: Buffer, epoch: int, bit: int, records: Buffer, /) -> tuple[int, bytes]: ...
def release(table: Buffer, bit: int, records: Buffer, taken: bytes | None, /) -> int: ...
def recheck(table: Buffer, epoch: int, rank: int, records: Buffer, /) -> bytes: ...
def hold(table: Buffer, epoch: int, records: Buffer, now: int, until: int, /) -> int:
    """0 if the table is mapped read-only."""

def sweep(table: Buffer, bits: int, /) -> int: ...
def scan(table: Buffer, first: int, count: int, stop: int = ..., /) -> tuple[bytes, int]:
    """``stop``: the first block that is not looked at; without it all are."""

# -- words

def load(segment: Buffer, offset: int, /) -> int: ...
def store(segment: Buffer, offset: int, value: int, /) -> None: ...
def add(segment: Buffer, offset: int, delta: int, /, *more: int) -> int:
    """Add to a word, and to up to three more: offset and delta each.  The first one's old value."""

def observe(segment: Buffer, histogram: int, value: int, /) -> None:
    """Count a value in the histogram at that offset (kvshm/_shm/histograms.py)."""

def hook_took(segment: Buffer, histogram: int, begun_ns: int, loop: int, pending: int, /) -> None:
    """See ``OwnProgress.hook_took``; takes offsets, and a negative ``pending`` as 0."""

def compare_exchange(segment: Buffer, offset: int, expected: int, desired: int, /) -> bool: ...
def mark_ready(segment: Buffer, layout_version: int, /) -> None: ...
def address(buffer: Buffer, /) -> int:
    """Address of the buffer's first byte; the caller keeps the buffer alive."""

# -- statistics for tools

def census_add(
    table: Buffer, places: Buffer, used: int, number: int, /
) -> tuple[int, int, int, int]:
    """Count the blocks of table ``number`` (from 1 on).  ``places``: 16 bytes each, zeroed at
    first, as many as a power of two above the sum of all tables' blocks; ``used``: 0, then what the
    call before returned.  Returns used, and the READY, DRAINING and leased blocks."""

def census_of(places: Buffer, number: int, /) -> tuple[int, int]:
    """The blocks that table ``number`` was the first to have, and those that no other has."""

def census_missing(table: Buffer, index: Buffer, row: int, /) -> tuple[int, int]:
    """How many READY blocks the table's row misses, and when the first was published, in
    milliseconds since the table was created (2**32 - 1: none)."""

# -- replica index

def index_apply(
    index: Buffer, batches: list[tuple[bytearray, int, bytes]], /
) -> tuple[int, int, int, int]:
    """Apply batches (tombstones, row, records) in order; returns (added, removed, ignored, full).
    ``tombstones`` (written): 16 bytes per block, initially zeros.  If the core refuses a batch, the
    batches before it stay applied."""

def index_stale(before: Buffer, scanned: Buffer, first: int = 0, /) -> bytes:
    """``first``: the block of the first tombstone of ``before``."""

def index_drop_row(index: Buffer, row: int, /) -> int: ...
def index_copy(index: Buffer, larger: Buffer, /) -> int: ...
def index_lookup(
    index: Buffer,
    hashes: list[bytes],
    start: int,
    stop: int,
    rows: int,
    group: int = 0,
    scale: int = 1,
    /,
) -> list[tuple[int, bytes]]:
    """See ``ReplicaReader.lookup``.  Block i has the hash ``hashes[(i + 1) * scale - 1]``."""

def index_last(
    index: Buffer,
    hashes: list[bytes],
    start: int,
    stop: int,
    rows: int,
    group: int = 0,
    scale: int = 1,
    /,
) -> int:
    """See ``ReplicaReader.last``; at most ``start`` if there is none."""

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
    """Make the kernel write PULSE_DIED to the word at ``offset`` of a shared mapping when this
    process dies (docs/layout.md), or the returned object is freed.  Waits until a thread, whose id
    the word holds until then, has started.  Raises OSError without thread or robust futexes."""

# -- threads

def timer() -> int:
    """A new descriptor for ``wake``: readable (8 bytes) when its time has come.  Does not block.
    Raises OSError."""

def wake(timer: int, microseconds: int, /) -> None:
    """Make ``timer`` readable after ``microseconds``, instead of an earlier time.  Keeps the GIL,
    so that the thread which waits for it runs when the caller waits.  Raises OSError."""

def unmap_pages(mapping: Buffer, /) -> None:
    """Take the pages of a whole shared mapping out of this process's page tables: the next access
    to each finds it as it was.  Without the GIL, which unmapping them later would hold.  Raises
    OSError."""

# -- tests

def arm_sync_point(point: int, signal: int, nth: int, /) -> None:
    """Raise ``signal`` in the thread that is the ``nth`` to reach ``point`` from now on."""
