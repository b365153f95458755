"""Has vLLM hand out first the free blocks that another engine has, too: *duplicates*.

vLLM hands out the block that has rested longest.  With several engines that keeps copies of the
same popular prefixes in each of them, and drops the same unpopular ones.  A duplicate costs an
import if it is wanted again; the last copy of a block costs computing it.

Just before vLLM takes blocks from its queue, as many duplicates move to the queue's head, those
first that have rested longest; only blocks without a hash come before them, as vLLM has it.  The
others stay where they are, so last copies go in vLLM's order; without other engines all do.

The duplicates that were used last stay, too.  If importing takes a tenth of computing, dropping one
that is wanted ten times as often as the last copy at the queue's head is no better than dropping
that one.  How often a block is wanted is taken from when it was used last: a duplicate goes if that
is at least a tenth as long ago as for that last copy.  So a last copy that nobody wants any more
goes as well, after some time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvshm.halves import (
    DUPLICATES_REUSED,
    LAST_COPIES_REUSED,
    DuplicateSearch,
    Found,
    SchedulerHalf,
    skip_unhashed,
)

AHEAD = 64
"""Duplicates to find in one walk, if no more are wanted."""
MOST_WALKED = 1024
"""Blocks to look at in one walk.  The next one goes on there, unless there are enough duplicates
nearer to the queue's head."""
MOST_CHOSEN = 1024
"""Duplicates to move for one allocation, which no longer than for these must wait; behind them it
goes in vLLM's order.  MOST_WALKED blocks more are looked at for it in all."""
MOST_ASKED = 256
"""Duplicates to look at once more for one allocation, where many are none any more: another engine
has just dropped its copies, or they were used since."""
REST_SECONDS = 20e-6
"""After a walk that found fewer there is none for so long for each block that it looked at: a
hundred times as long as it took."""
LEAST_REST_SECONDS = 1e-3
"""The same for a short walk."""
LONG_REST_SECONDS = 1.0
"""After it turned out that imports cost too much."""


@dataclass(slots=True)
class _Place:
    """Where in the queue a walk began or ended."""

    block: Any
    """The last one before it."""
    used: int
    """When that was used last."""
    passed: int
    """Free blocks up to it, or fewer."""


class Duplicates:
    """The duplicates among one engine's free blocks.  Scheduler's thread."""

    def __init__(
        self,
        cache: SchedulerHalf,
        search: DuplicateSearch,
        queue: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``queue``: vLLM's of free blocks."""
        self._cache = cache
        self._search = search
        self._queue = queue
        self._clock = clock
        self._found = Found()
        """Duplicates that walks have found, and are not taken yet."""
        self._may_walk = 0
        """How many blocks may still be looked at for this allocation."""
        self._walked_to: list[_Place] = []
        """Where the next walk begins, and last where the one before it did, if that block has been
        used meanwhile; unless one is left, at the queue's head."""
        self._are_near_head = False
        """Whether the last walk found enough of them near the queue's head."""
        self._rests_until = 0.0
        self.may_exist = search.may_find
        """Whether there may be any.  Fast: asked at every allocation."""

    def put_first(self, wanted: int) -> None:
        """Move duplicates to where vLLM is about to take ``wanted`` blocks."""
        queue, epoch = self._queue, self._cache.epoch_state
        if epoch is None or not 0 < wanted <= queue.num_free_blocks:
            return
        place, wanted = skip_unhashed(queue.fake_free_list_head, wanted)
        if not wanted:
            return
        most = min(wanted, MOST_CHOSEN)
        self._may_walk = MOST_WALKED + most
        chosen = self._choose(most)
        for reached in self._walked_to:
            reached.passed -= wanted
        if chosen:
            self._move(chosen, place)
            epoch.table.counters.add(DUPLICATES_REUSED, len(chosen))
        if len(chosen) < wanted:
            epoch.table.counters.add(LAST_COPIES_REUSED, wanted - len(chosen))

    def handed_out(self) -> None:
        """Call once the blocks that were put first are retracted."""
        self._search.count_lost()

    def _choose(self, wanted: int) -> list[Any]:
        """Duplicates as of now, ``wanted`` of them at most."""
        self._search.begin()
        if len(self._found) < wanted:
            self._begin_anew()
        chosen, asked = list[Any](), 0
        while len(self._found) and (missing := wanted - len(chosen)):
            if asked >= MOST_ASKED + wanted:
                return chosen
            earlier = self._found.take(missing)
            asked += len(earlier)
            # One that was used meanwhile is no longer the one that rested longest, or is in use.
            chosen += self._search.confirm(earlier)
        may_find_more = True
        while may_find_more and (missing := wanted - len(chosen)):
            may_find_more = self._find_more(max(missing, AHEAD))
            chosen += self._search.choose(self._found.take(missing))
        return chosen

    def _begin_anew(self) -> None:
        """Walk from the queue's head again, if that is near: what rests there may have become a
        duplicate, and goes before what rests behind it."""
        near = self._queue.num_free_blocks <= MOST_WALKED or self._are_near_head
        if near and self._clock() >= self._rests_until:
            self._search.forget(self._found.blocks)
            self._found = Found()
            self._walked_to = []

    def _find_more(self, wanted: int) -> bool:
        """Walk on to more duplicates; whether another walk may find more."""
        if (now := self._clock()) < self._rests_until or self._may_walk <= 0:
            return False
        began = self._next_place()
        if (ratio := self._search.import_ratio()) >= 1:
            self._rests_until = now + LONG_REST_SECONDS
            return False
        left = self._queue.num_free_blocks - began.passed
        most = max(0, min(left, MOST_WALKED, self._may_walk))
        anew = began.block is self._queue.fake_free_list_head
        walked = self._search.walk(began.block, wanted, most, anew=anew, ratio=ratio)
        self._may_walk -= walked.blocks
        passed = began.passed + walked.blocks
        ended = walked.ended or walked.blocks >= left
        last = self._place(walked.last, passed)
        self._walked_to = [] if ended else [last, began]
        self._found.add(walked.found)
        self._are_near_head = passed <= MOST_WALKED and walked.met >= AHEAD
        may_find_more = len(walked.found) >= AHEAD or (ended and not anew)
        if not may_find_more:
            self._rests_until = now + max(REST_SECONDS * walked.blocks, LEAST_REST_SECONDS)
        return may_find_more

    def _next_place(self) -> _Place:
        """Where the next walk begins: where the last one ended or, at least, began, unless that
        block was used since: it is in use, or has moved to the queue's end."""
        for place in self._walked_to:
            now = self._place(place.block, place.passed)
            if _is_free(place.block) and now.used == place.used:
                return place
        return self._place(self._queue.fake_free_list_head, 0)

    def _place(self, block: Any, passed: int) -> _Place:
        """``block``: of the queue, or its head, which is no block of the pool's."""
        is_head = block is self._queue.fake_free_list_head
        return _Place(block, 0 if is_head else self._search.used_at(block), passed)

    def _move(self, blocks: list[Any], place: Any) -> None:
        """Move blocks of the queue behind ``place``.  A walk that ended at one of them goes on
        where it was."""
        ends = [reached.block for reached in self._walked_to]
        self._search.put_behind(place, blocks, ends)
        for reached, end in zip(self._walked_to, ends, strict=True):
            if end is not reached.block:
                before = self._place(end, 0)
                reached.block, reached.used = before.block, before.used


def _is_free(block: Any) -> bool:
    return block.next_free_block is not None
