"""Has vLLM hand out last the free blocks that other engines read or want to find again.

vLLM takes blocks from the head of its queue of free blocks.  Just before it does, *kept* blocks at
the head move to the end, as if they had just been used: those that an importer has leased, or that
are held (``PeerSlotTable.hold``).  If there are not enough others, kept ones are handed out.
"""

from __future__ import annotations

from typing import Any

from kvshm.halves import KEPT, SchedulerHalf


class KeptBlocks:
    """The kept blocks of one engine's pool.  Scheduler's thread."""

    def __init__(self, cache: SchedulerHalf, queue: Any) -> None:
        """``queue``: vLLM's of free blocks."""
        self._cache = cache
        self._queue = queue
        self._all_kept: tuple[Any, int, int] = (None, 0, 0)
        """The queue's last block when there were not enough others, how many blocks that left in
        the queue, and the second when that was."""

    def may_exist(self) -> bool:
        """Whether any block may be leased or held.  Fast: asked at every allocation."""
        epoch = self._cache.epoch_state
        return epoch is not None and epoch.table.kept_until != 0

    def put_last(self, wanted: int) -> None:
        """Move kept blocks out of the way of vLLM, which is about to take ``wanted`` blocks.

        Looks at every free block once at most; when only kept ones are left, not again for the rest
        of the second, unless a block becomes free behind them.
        """
        epoch, queue = self._cache.epoch_state, self._queue
        free = queue.num_free_blocks
        if epoch is None or not 0 < wanted < free or not epoch.table.keeps_blocks():
            return
        tail, now = queue.fake_free_list_tail, epoch.table.now
        last, most, second = self._all_kept
        if tail.prev_free_block is last and free <= most and now == second:
            self._all_kept = last, free - wanted, second
            return
        runs, others, kept = epoch.table.kept_runs(queue.fake_free_list_head, wanted, free)
        if others:
            for run in runs:
                _append(run, tail)
            epoch.table.counters.add(KEPT, kept)
        if others < wanted:
            self._all_kept = tail.prev_free_block, free - wanted, now


def _append(run: tuple[Any, Any], tail: Any) -> None:
    """Move a run of the queue to the queue's end, before ``tail``."""
    first, last = run
    before, behind = first.prev_free_block, last.next_free_block
    before.next_free_block, behind.prev_free_block = behind, before
    end = tail.prev_free_block
    end.next_free_block, first.prev_free_block = first, end
    last.next_free_block, tail.prev_free_block = tail, last
