"""Marks: what an exporting engine knows of the contents of each of its own blocks.

A block's version counts its changes; a run names blocks with the version they had, so
that whatever changed since drops out of it without being looked for.  Private memory, 8 bytes a
block: version u32, flags u32 (kvshm/native/py_marks.c walks them, one call per request and
step).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

from kvshm import _native
from kvshm.ids import BlockId

Run: TypeAlias = tuple[list[bytes], int, bytes]
"""Consecutive blocks of a chain: its hashes, the index of the first, and the blocks, packed with
their versions."""

SOUND = 1
"""The other flag, 2, is kept by the native module: the block is published."""
_PAIR = struct.Struct("<II")


class Marks:
    """Used by one thread; nothing blocks.  A "pool block" is what vLLM has for a block: an
    object with ``block_id``, ``block_hash`` and ``ref_cnt``.  IndexError for unknown blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.packed = bytearray(8 * num_blocks)
        """All of them, for ``OwnSlotTable``, which publishes and retracts by them."""
        self._words = memoryview(self.packed).cast("I")
        self.sound: Callable[[Sequence[Any], int], int] = partial(_native.marks_sound, self.packed)
        """How many pool blocks of a table are sound from the first on, looking at so many."""
        self.write: Callable[[Sequence[Any], int, int, int], tuple[bytes, list[BlockId]]] = partial(
            _native.marks_write, self.packed
        )
        """``(table, first, last, complete)``: ``table[first:last]`` is about to be written, up to
        ``complete`` soundly and in full.  Returns the latter, packed for a run, and those of all
        that are published."""

    def withdraw(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        """The blocks are not to be shown: runs lose them.  Returns those that are published."""
        return cast(list[BlockId], _native.marks_change(self.packed, blocks, SOUND))

    def clear(self, blocks: Sequence[BlockId | Any]) -> list[BlockId]:
        """The same, and nothing is known of their contents.  Takes pool blocks too."""
        return cast(list[BlockId], _native.marks_change(self.packed, blocks, 0))

    def clear_all(self) -> None:
        """Nothing is known of any block, and none is published."""
        _native.marks_change(self.packed, range(self._num_blocks), 0)

    def make_sound(self, blocks: Iterable[BlockId]) -> None:
        """The blocks hold what may be vouched for, or soon will."""
        for block in blocks:
            self._words[2 * block + 1] |= SOUND

    def tag(self, blocks: Iterable[BlockId]) -> bytes:
        """The blocks with their present versions, packed for a run."""
        return b"".join(_PAIR.pack(b, self._words[2 * b]) for b in blocks)


touching = _native.marks_step
"""Which requests of a step concern marks; most stay within a block that has none.

``requests``: by id, objects with ``request`` (vLLM's), ``complete`` (from this index on no
block of its table has a mark), ``epochs`` and ``preemptions`` (when that was so).
``scheduled``: tokens by request, of which ``drafts`` may be rejected later.  Returns the
objects, each with the first block that is written and the token before which it ends."""


def blocks_of(runs: Iterable[Run]) -> list[BlockId]:
    """The blocks that runs name."""
    return [BlockId(block) for _, _, packed in runs for block, _ in _PAIR.iter_unpack(packed)]
