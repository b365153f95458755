"""The order in which vLLM hands out free blocks, where kvshm changes it: duplicates first, kept
blocks last."""

from __future__ import annotations

from typing import Any

from kvshm._base.log import logger
from kvshm.halves import DuplicateSearch, Marks, SchedulerHalf

from ...log_lines import HookLine
from .duplicates import Duplicates
from .kept_blocks import KeptBlocks

log = logger(__name__)

QUEUE = ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks")
LINKS = ("prev_free_block", "next_free_block")


class FreeOrder:
    """Changes the queue of one engine's free blocks.  Scheduler's thread."""

    def __init__(
        self, cache: SchedulerHalf, pool: Any, marks: Marks, *, duplicates_first: bool
    ) -> None:
        """``marks``: of the pool's blocks.  Without such a queue in this vLLM the order stays as it
        is."""
        queue: Any = getattr(pool, "free_block_queue", None)
        usable = all(hasattr(queue, name) for name in QUEUE)
        usable &= all(hasattr(pool.null_block, name) for name in LINKS)
        if not usable:
            log.line(HookLine.UNKNOWN_QUEUE)
        self._kept = KeptBlocks(cache, queue) if usable else None
        self._duplicates: Duplicates | None = None
        if usable and duplicates_first:
            self._duplicates = Duplicates(cache, DuplicateSearch(cache, marks), queue)

    def may_change(self) -> bool:
        """Whether ``change`` may have something to do.  Fast: asked at every allocation."""
        kept, duplicates = self._kept, self._duplicates
        return (kept is not None and kept.may_exist()) or (
            duplicates is not None and duplicates.may_exist()
        )

    def change(self, wanted: int) -> None:
        """Move blocks, since vLLM is about to take ``wanted`` of them from the queue's head."""
        if self._kept is not None and self._kept.may_exist():
            self._kept.put_last(wanted)
        if self._duplicates is not None and self._duplicates.may_exist():
            self._duplicates.put_first(wanted)

    def changed(self) -> None:
        """Call once vLLM has taken blocks, and they are retracted."""
        if self._duplicates is not None:
            self._duplicates.handed_out()
