"""Finds out which of an engine's own free blocks other engines have, too: *duplicates*.

Whether another engine has a block is read in that engine's own slot table, at that moment.  So two
engines drop the last copies of a block only if both look while the other still has it, some
microseconds before they hand it out; that is counted.  A duplicate that a block behind it needs
does not count as one (kvshm/native/py_duplicates.c).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kvshm import _native
from kvshm._shm.statistics import DUPLICATES_LOST
from kvshm.errors import KvshmError

from .epoch_state import EpochState
from .marks import MARK_BYTES, Marks

if TYPE_CHECKING:
    from .scheduler_half import SchedulerHalf

MOST_REMEMBERED = 1 << 16
"""Blocks that others need, as far as one round of walks remembers them."""
IMPORT_TOKENS = 256
"""By imports of this many tokens the costs of importing and computing are compared, until some were
measured: then by one of their mean size."""
ENDING = KvshmError, ValueError
"""What a look raises if the client's thread closes the replica meanwhile, since the epoch ends, or
if the replica is spoilt: then there are no duplicates."""


class Found:
    """Duplicates that walks have found, in the queue's order."""

    def __init__(
        self, blocks: list[Any] | None = None, marks: bytes = b"", copies: bytes = b""
    ) -> None:
        """``marks`` and ``copies``: as these pool blocks had them then, packed."""
        self.blocks, self.marks, self.copies = blocks or [], marks, copies

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, more: Found) -> None:
        """Append what another walk has found."""
        self.blocks += more.blocks
        self.marks += more.marks
        self.copies += more.copies

    def take(self, count: int) -> Found:
        """Take the first ones out, ``count`` at most."""
        if count >= len(self):
            taken = Found(self.blocks, self.marks, self.copies)
            self.blocks, self.marks, self.copies = [], b"", b""
            return taken
        mark, copy = MARK_BYTES * count, len(self.copies) // len(self) * count
        taken = Found(self.blocks[:count], self.marks[:mark], self.copies[:copy])
        self.blocks, self.marks = self.blocks[count:], self.marks[mark:]
        self.copies = self.copies[copy:]
        return taken


class Walked(NamedTuple):
    """The result of one walk along a queue of free blocks."""

    found: Found
    """Those that no walk had found before."""
    met: int
    """How many duplicates there were, with those that had been."""
    last: Any
    """The last block that was walked."""
    blocks: int
    """How many were."""
    ended: bool
    """Whether the last one is the queue's last."""


class DuplicateSearch:
    """The search of one engine.  Scheduler's thread; nothing blocks."""

    def __init__(self, cache: SchedulerHalf, marks: Marks) -> None:
        """``marks``: of all blocks."""
        self._cache = cache
        self._marks = marks
        num_blocks = len(marks.packed) // MARK_BYTES
        self._known = bytearray(num_blocks)
        """For each block whether walks have found it, and it was not handed out since."""
        self._needed = bytearray(8 << min(num_blocks, MOST_REMEMBERED).bit_length())
        self._round = 0
        """How many rounds have begun."""
        self._oldest = 0.0
        """Seconds for which the first last copy of this round has rested; 0: none was met."""
        self._copies: list[bytes] = []
        """Copies of the duplicates that were chosen last, packed by call."""

    def may_find(self) -> bool:
        """Whether other engines offer blocks, which this one could import again.  Fast."""
        epoch = self._cache.epoch_state
        return epoch is not None and epoch.peers.offer_blocks() and not self._cache.role.no_imports

    def used_at(self, block: Any) -> int:
        """The tick at which a request last began with a pool block (``Marks``)."""
        return self._marks.used_at(block.block_id)

    def walk(self, begin: Any, wanted: int, most: int, *, anew: bool, ratio: float) -> Walked:
        """Walk a queue from behind ``begin`` until ``wanted`` duplicates were found that need not
        stay, or ``most`` blocks were walked.  ``anew``: a round begins, at the queue's head.
        ``ratio``: ``import_ratio``."""
        if anew:
            self._round, self._oldest = self._round + 1, 0.0
        epoch = self._cache.epoch_state
        if epoch is not None:
            with suppress(*ENDING):
                table, known = epoch.table, self._views(epoch)
                ages = self._marks.tick(), table.age_ms, ratio, self._oldest
                limits = *ages, *self._cache.planner.imported_blocks(epoch)
                found, marks, copies, *walked, self._oldest = _native.find_duplicates(
                    *known, begin, wanted, most, table.now, limits
                )
                return Walked(Found(found, marks, copies), *walked)
        return Walked(Found(), 0, begin, 0, True)

    def begin(self) -> None:
        """Choose for another allocation."""
        self._copies = []

    def choose(self, found: Found) -> list[Any]:
        """Return the pool blocks of a walk that was made just now: they are to be handed out.  Call
        ``put_behind`` before they are, and ``count_lost`` behind."""
        self._copies.append(found.copies)
        return found.blocks

    def confirm(self, found: Found) -> list[Any]:
        """Like ``choose`` for earlier walks: only those that are duplicates at this moment, free,
        and unused since they were found.  Walks may find the others again."""
        if (epoch := self._cache.epoch_state) is not None:
            with suppress(*ENDING):
                table, views = epoch.table, self._views(epoch)
                blocks, copies = _native.still_duplicates(
                    *views, found.blocks, found.marks, table.now
                )
                self._copies.append(copies)
                return blocks
        self.forget(found.blocks)
        return []

    def put_behind(self, place: Any, blocks: list[Any], ends: list[Any]) -> None:
        """Move the chosen blocks behind ``place``, a block of the queue or its head, in this order.
        In ``ends`` one that moves is replaced by the block before it."""
        _native.put_behind(self._known, place, blocks, ends)

    def forget(self, blocks: list[Any]) -> None:
        """Let walks find these pool blocks anew."""
        _native.forget(self._known, blocks)

    def count_lost(self) -> None:
        """Count the chosen blocks of which the other copy is gone by now, too."""
        if self._copies and (epoch := self._cache.epoch_state) is not None:
            with suppress(*ENDING):
                others = _others(epoch)
                lost = sum(_native.count_lost(*others, copies) for copies in self._copies)
                epoch.table.counters.add(DUPLICATES_LOST, lost)
        self._copies = []

    def _views(self, epoch: EpochState) -> _native.Views:
        """What both looks at free blocks need."""
        marks, needed = self._marks.packed, self._needed
        return epoch.table.buffer, *_others(epoch), marks, needed, self._round, self._known

    def import_ratio(self) -> float:
        """What importing takes, divided by what computing the same takes, as far as is known."""
        if (epoch := self._cache.epoch_state) is None:
            return 0.0
        size = epoch.table.block_size
        blocks = -(-IMPORT_TOKENS // size)
        nbytes = blocks * epoch.own_peer.block_bytes
        return self._cache.planner.costs.import_ratio(blocks * size, nbytes)


skip_unhashed = _native.skip_unhashed
"""``(head, wanted)``: the last block of those that follow in a queue of free blocks, ``wanted`` at
most, before the first that has a hash, or ``head``; and how many are still wanted."""


def _others(epoch: EpochState) -> tuple[memoryview, Mapping[int, memoryview]]:
    """The replica, and the tables of the engines from which blocks can be imported, by row."""
    return epoch.peers.replica.buffer, epoch.peers.usable_tables()
