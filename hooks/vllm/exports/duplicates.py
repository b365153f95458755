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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvshm.halves import DUPLICATES_REUSED, LAST_COPIES_REUSED, DuplicateSearch, SchedulerHalf

AHEAD = 64
"""Duplicates to find in one walk."""
MOST_WALKED = 1024
"""Blocks to look at in one walk.  The next one goes on there, unless there are enough duplicates
nearer to the queue's head."""
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


class _Found(NamedTuple):
    """A duplicate that a walk has found."""

    block: Any
    used: int
    """When it was used last."""
    hash: Any
    """Of its contents."""

    def is_cached(self) -> bool:
        """Whether it is free, with these contents.  Blocks without contents are first already."""
        return _is_free(self.block) and None is not self.hash == self.block.block_hash


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
        self._found: deque[_Found] = deque()
        """Duplicates that walks have found, and are not taken yet."""
        self._known: set[int] = set()
        """The ids of these, and of those that are being taken."""
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
        place = queue.fake_free_list_head
        while wanted and place.next_free_block.block_hash is None:
            place, wanted = place.next_free_block, wanted - 1
        if not wanted:
            return
        chosen = self._choose(wanted)
        self._known.difference_update(block.block_id for block in chosen)
        for reached in self._walked_to:
            reached.passed -= wanted
        for block in chosen:
            self._step_back_from(block)
            _put_behind(block, place)
            place = block
        if chosen:
            epoch.table.counters.add(DUPLICATES_REUSED, len(chosen))
        if len(chosen) < wanted:
            epoch.table.counters.add(LAST_COPIES_REUSED, wanted - len(chosen))

    def handed_out(self) -> None:
        """Call once the blocks that were put first are retracted."""
        self._search.count_lost()

    def _choose(self, wanted: int) -> list[Any]:
        """Duplicates as of now, ``wanted`` of them at most."""
        if len(self._found) < wanted:
            self._begin_anew()
        chosen, used_at, asked = list[Any](), self._search.used_at, 0
        while (missing := wanted - len(chosen)) and asked < MOST_ASKED + wanted:
            if not self._have_found(missing):
                break
            taken = [self._found.popleft() for _ in range(min(missing, len(self._found)))]
            asked += len(taken)
            # One that was used meanwhile is no longer the one that rested longest, or is in use.
            still = [f.block for f in taken if used_at(f.block) == f.used and f.is_cached()]
            good = self._search.confirm(still, anew=not chosen) if still else []
            self._known.difference_update(found.block.block_id for found in taken)
            self._known.update(block.block_id for block in good)
            chosen += good
        return chosen

    def _begin_anew(self) -> None:
        """Walk from the queue's head again, if that is near: what rests there may have become a
        duplicate, and goes before what rests behind it."""
        near = self._queue.num_free_blocks <= MOST_WALKED or self._are_near_head
        if near and self._clock() >= self._rests_until:
            self._found.clear()
            self._known.clear()
            self._walked_to = []

    def _have_found(self, wanted: int) -> bool:
        """Walk on until so many duplicates are known besides the chosen ones; whether any is."""
        while len(self._found) < wanted and self._find_more():
            pass
        return bool(self._found)

    def _find_more(self) -> bool:
        """Walk on to more duplicates; whether another walk may find more."""
        if (now := self._clock()) < self._rests_until:
            return False
        began = self._next_place()
        if (ratio := self._search.import_ratio()) >= 1:
            self._rests_until = now + LONG_REST_SECONDS
            return False
        left = self._queue.num_free_blocks - began.passed
        most, anew = max(0, min(left, MOST_WALKED)), began.block is self._queue.fake_free_list_head
        walked = self._search.walk(began.block, AHEAD, most, anew=anew, ratio=ratio)
        passed = began.passed + walked.blocks
        ended = walked.ended or walked.blocks >= left
        last = self._place(walked.last, passed)
        self._walked_to = [] if ended else [last, began]
        new = [block for block in walked.found if block.block_id not in self._known]
        self._found += [_Found(b, self._search.used_at(b), b.block_hash) for b in new]
        self._known.update(block.block_id for block in new)
        self._are_near_head = passed <= MOST_WALKED and len(walked.found) == AHEAD
        may_find_more = len(new) == AHEAD or (ended and not anew)
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

    def _step_back_from(self, block: Any) -> None:
        """A block is about to move to the queue's head: a walk that ended there goes on where it
        was."""
        for place in self._walked_to:
            if place.block is block:
                before = self._place(block.prev_free_block, place.passed)
                place.block, place.used = before.block, before.used


def _is_free(block: Any) -> bool:
    return block.next_free_block is not None


def _put_behind(block: Any, place: Any) -> None:
    """Move a block of the queue behind another one of it."""
    if (following := place.next_free_block) is not block:
        before, behind = block.prev_free_block, block.next_free_block
        before.next_free_block, behind.prev_free_block = behind, before
        place.next_free_block, block.prev_free_block = block, place
        block.next_free_block, following.prev_free_block = following, block
