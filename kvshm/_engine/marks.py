"""Marks: what an exporting engine knows about the contents of each of its own blocks.

A block's version counts its changes.  A run names blocks with the versions they had, so that a
block that has changed since drops out of the run by itself (kvshm/native/py_marks.c walks them).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from kvshm import _native
from kvshm._base.ids import BlockId


class Run(NamedTuple):
    """Consecutive blocks of a chain."""

    chain: list[bytes]
    first: int
    packed: bytes
    scale: int = 1
    """Hashes of the chain for each block.  The last of them is the block's own."""
    owner: Any = None

    @property
    def end(self) -> int:
        """The index behind the last block."""
        return self.first + len(self.packed) // _PAIR.size


MARK_BYTES = 8
SOUND = 1
"""Flag.  The other flag, 2, is the native module's: the block is published.  The bits behind them
say when a request last began with it, in ticks; 0: none has since it was written."""
TICKS_PER_SECOND = 64
_TICKS = (1 << 30) - 1
_USED_SHIFT = 2
_PAIR = struct.Struct("<II")


class Marks:
    """The marks of all blocks.  Used by one thread; nothing blocks.  A "pool block" is vLLM's
    object for a block, with ``block_id``, ``block_hash`` and ``ref_cnt``.  Methods raise
    IndexError for unknown blocks."""

    def __init__(
        self,
        num_blocks: int,
        null_block: BlockId | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``null_block``: stands in block tables for all blocks that are needed no more.  It is
        always sound, because it is never read."""
        self._clock, self._created = clock, clock()
        self._always_sound = [] if null_block is None else [null_block]
        self.packed = bytearray(MARK_BYTES * num_blocks)
        """All marks, for ``OwnSlotTable``, whose methods publish and retract by them."""
        self._words = memoryview(self.packed).cast("I")
        self.sound: Callable[[Sequence[Any], int], int] = partial(_native.marks_sound, self.packed)
        """``(table, count)``: number of sound pool blocks before the first that is not sound,
        among the first ``count``."""
        self.write: Callable[[Sequence[Any], int, int, int], tuple[bytes, list[BlockId]]] = partial(
            _native.marks_write, self.packed
        )
        """``(table, first, last, complete)``: ``table[first:last]`` is about to be written; the
        blocks before ``complete`` will be complete and sound.  Returns these, packed for a run, and
        those of ``table[first:last]`` that are published."""
        self.make_sound(self._always_sound)

    def withdraw(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Take the blocks out of all runs.  Returns those that are published already."""
        return cast(list[BlockId], _native.marks_change(self.packed, blocks, SOUND))

    def clear(self, blocks: Sequence[BlockId | Any]) -> list[BlockId]:
        """Like ``withdraw``, and the blocks' contents become unknown.  Takes pool blocks too."""
        return cast(list[BlockId], _native.marks_change(self.packed, blocks, 0))

    def clear_all(self) -> None:
        """Make the contents of all blocks unknown, and none of them published."""
        _native.marks_change(self.packed, range(len(self._words) // 2), 0)
        self.make_sound(self._always_sound)

    def make_sound(self, blocks: Iterable[BlockId]) -> None:
        """Mark blocks as sound: their contents are trusted, or will be when their step ends."""
        for block in blocks:
            self._words[2 * block + 1] |= SOUND

    def touch(self, table: Sequence[Any], count: int) -> int:
        """Like ``sound``, for a request that begins with these blocks: those that are counted are
        used now."""
        return _native.marks_touch(self.packed, table, count, self.tick())

    def tick(self) -> int:
        """The time, as marks have it: never 0, and from 0 on again after half a year."""
        return int((self._clock() - self._created) * TICKS_PER_SECOND) + 1 & _TICKS or 1

    def used_at(self, block: BlockId) -> int:
        """The tick at which a request last began with a block's present contents; 0: none has."""
        return self._words[2 * block + 1] >> _USED_SHIFT

    def with_versions(self, blocks: Iterable[BlockId]) -> bytes:
        """Return the blocks with their present versions, packed for a run."""
        return b"".join(_PAIR.pack(b, self._words[2 * b]) for b in blocks)


touching = _native.marks_step
"""Find the requests of a step that touch marks; most stay within a block without a mark.

``requests``: by id, objects with ``request`` (vLLM's), ``complete`` (no block of its tables has a
mark behind this number of hashes), ``epochs`` and ``preemptions`` (for which that was found).
``scheduled``: tokens by request, of which ``drafts`` may be rejected later.  Returns the
objects, each with the first hash whose block is written, or was ended by a draft that is accepted
now, and the token before which the step ends."""


def blocks_of(runs: Iterable[Run]) -> list[BlockId]:
    """Return the blocks that the runs name."""
    return [BlockId(block) for run in runs for block, _ in _PAIR.iter_unpack(run.packed)]
