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
from .marks import Marks

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


class Walked(NamedTuple):
    """The result of one walk along a queue of free blocks."""

    found: list[Any]
    """Pool blocks, in the queue's order."""
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
        num_blocks = len(marks.packed) // 8
        self._needed = bytearray(8 << min(num_blocks, MOST_REMEMBERED).bit_length())
        self._round = 0
        """How many rounds have begun."""
        self._oldest = 0.0
        """Seconds for which the first last copy of this round has rested; 0: none was met."""
        self._copies = b""
        """A copy of each duplicate that was confirmed last."""

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
                table, known = epoch.table, self._known(epoch)
                ages = self._marks.tick(), table.age_ms, ratio, self._oldest
                limits = *ages, *self._cache.planner.imported_blocks(epoch)
                *walked, self._oldest = _native.find_duplicates(
                    *known, begin, wanted, most, table.now, limits
                )
                return Walked(*walked)
        return Walked([], begin, 0, True)

    def confirm(self, blocks: list[Any], *, anew: bool) -> list[Any]:
        """Return those of these pool blocks, which walks have found in this order, that are
        duplicates at this moment.  Call ``count_lost`` once they are handed out, together with
        those of earlier calls back to the last one ``anew``."""
        if anew:
            self._copies = b""
        if (epoch := self._cache.epoch_state) is not None:
            with suppress(*ENDING):
                now = epoch.table.now
                found, copies = _native.still_duplicates(*self._known(epoch), blocks, now)
                self._copies += copies
                return found
        return []

    def count_lost(self) -> None:
        """Count the confirmed blocks of which the other copy is gone by now, too."""
        if self._copies and (epoch := self._cache.epoch_state) is not None:
            with suppress(*ENDING):
                lost = _native.count_lost(*_others(epoch), self._copies)
                epoch.table.counters.add(DUPLICATES_LOST, lost)
        self._copies = b""

    def _known(self, epoch: EpochState) -> _native.Known:
        """What both looks at free blocks need to know."""
        marks, needed = self._marks.packed, self._needed
        return epoch.table.buffer, *_others(epoch), marks, needed, self._round

    def import_ratio(self) -> float:
        """What importing takes, divided by what computing the same takes, as far as is known."""
        if (epoch := self._cache.epoch_state) is None:
            return 0.0
        size = epoch.table.block_size
        blocks = -(-IMPORT_TOKENS // size)
        nbytes = blocks * epoch.own_peer.block_bytes
        return self._cache.planner.costs.import_ratio(blocks * size, nbytes)


def _others(epoch: EpochState) -> tuple[memoryview, Mapping[int, memoryview]]:
    """The replica, and the tables of the engines from which blocks can be imported, by row."""
    return epoch.peers.replica.buffer, epoch.peers.usable_tables()
