"""The import of a prompt's prefix into the paged cache, as if it had been computed there.

transformers schedules, computes and imports on one thread, so an import holds up all requests,
within a bound.  What does not arrive is computed.  A load that does not end in time is left to
itself, and keeps its blocks until it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)

from kvshm.api import Found, Load, LoadState

from ..boundary import guarded
from .shared_prefixes import SharedPrefixes

WAIT_SECONDS = 1.0
"""Longest wait for one load, unless the user says otherwise."""
END_SECONDS = 0.1
"""How long a load that was cancelled may take to end before it is left to itself."""
ROOM_SECONDS = 5.0
"""Longest wait for the blocks of a load that was left to itself."""


@dataclass
class ImportCounts:
    """What became of prefixes.  Only ever counted up."""

    local_hit_tokens: int = 0  # of prompts, from the own cache
    imported_tokens: int = 0  # of prompts, from other engines; the others were computed
    imports: int = 0  # loads
    failed_imports: int = 0  # loads of which some block did not arrive, or not in time
    late_imports: int = 0  # loads that took too long
    no_room: int = 0
    """How often too few blocks were free for an import, each time that a request is considered."""


class Importer:
    """One allocator's.  Only the generation thread uses it."""

    def __init__(
        self, prefixes: SharedPrefixes, allocator: Any, first: int, wait_seconds: float
    ) -> None:
        """``first``: the block that others know as 0."""
        self.counts = ImportCounts()
        self.wait_seconds = wait_seconds
        self.to_compute = 1
        """Fewest tokens of a prompt that are not imported: transformers computes the last one, and
        where it forks requests it schedules that apart from one before it."""
        self._prefixes = prefixes
        self._allocator = allocator
        self._first = first
        self._left: list[tuple[Load, list[int]]] = []
        """Loads that were left to themselves, and their blocks."""

    @property
    def strict(self) -> bool:
        return self._prefixes.strict

    def hook_failed(self, hook: str, exc: Exception) -> None:
        """Share nothing any more (hooks/boundary.py)."""
        self._prefixes.hook_failed(hook, exc)

    @guarded(lambda *_: None)
    def import_prefix(self, prompt: list[int], keys: Sequence[bytes]) -> list[int] | None:
        """Import what other engines have of a prompt behind its local hit into the cache; return
        None, or the blocks that are hit if nothing was imported.  ``keys``: those of the prompt's
        full blocks.  Blocks as long as a load may take."""
        self.collect()
        local: list[int] = self._allocator.match_prefix_blocks(prompt)
        start, size = len(local), self._allocator.tokens_per_page
        wanted = min(len(keys), max(0, len(prompt) - self.to_compute) // size)
        if start >= wanted or not self._prefixes.are_sound(self.shared(local), keys):
            return local
        if not self._has_room(len(prompt), start):
            self.counts.no_room += 1
            return local
        found = self._prefixes.node.lookup(keys[:wanted], start=start)
        if not found:
            return local
        if not self._has_room(len(prompt), start - found.num_blocks):
            self.counts.no_room += 1
            return local
        blocks = self._load(found, self._take(found.num_blocks))
        self.counts.imported_tokens += len(blocks) * size
        self._enter(prompt, keys, local, blocks)
        return None

    @guarded(lambda *_: None)
    def finish(self) -> None:
        """Wait, before the pool is reset, until loads that were left to themselves have ended."""
        left, self._left = self._left, []
        for load, _ in left:
            load.wait()

    @guarded(lambda *_: False)
    def make_room(self) -> bool:
        """Free blocks of loads that were left to themselves, when nothing else can give any; return
        whether there are any.  Blocks for ROOM_SECONDS at most."""
        if self._left and not self._prefixes.node.closed:
            self._left[0][0].wait(ROOM_SECONDS)
        return self.collect()

    def _has_room(self, tokens: int, start: int) -> bool:
        """Whether the whole prompt fits behind ``start`` blocks, as it must to be scheduled.  To
        fit beside a load that takes too long, ``start`` is less by the load's blocks."""
        pool, index = self._allocator.pool, self._allocator.index
        free = pool.count_free_blocks(index)
        free += pool.num_free_sectors * self._allocator.blocks_per_sector
        return bool(ceil(tokens / self._allocator.tokens_per_page) - start <= free)

    def _take(self, count: int) -> list[int]:
        """Take free blocks out of the pool."""
        pool, index = self._allocator.pool, self._allocator.index
        missing = max(0, count - pool.count_free_blocks(index))
        for _ in range(ceil(missing / self._allocator.blocks_per_sector)):
            pool.allocate_sector(index)
        return list(pool.get_free_blocks(index, count))

    def _load(self, found: Found, blocks: list[int]) -> list[int]:
        """Return the first blocks, which hold what was found; the others are freed."""
        try:
            load = self._prefixes.node.load(found, into=self.shared(blocks))
        except BaseException:
            self._give_back(blocks)
            raise
        self.counts.imports += 1
        try:
            state = load.wait(self.wait_seconds)
            if state is LoadState.PENDING:
                self.counts.late_imports += 1
                load.cancel()
                state = load.wait(END_SECONDS)
        except BaseException:
            self._left.append((load, blocks))  # it may be writing to them
            raise
        if state is not LoadState.DONE:
            self.counts.failed_imports += 1
        if state is LoadState.PENDING:
            self._left.append((load, blocks))
            return []
        self._give_back(blocks[load.good :])
        return blocks[: load.good]

    def _enter(
        self, prompt: list[int], keys: Sequence[bytes], local: list[int], blocks: list[int]
    ) -> None:
        """Enter imported blocks into the ledger as those of a finished request."""
        ledger, size = self._allocator.ledger, self._allocator.tokens_per_page
        block_hash = ledger.block_to_hash[local[-1]] if local else None
        entered: dict[int, int] = {}
        for index, block in enumerate(blocks, len(local)):
            tokens = prompt[index * size : (index + 1) * size]
            block_hash = compute_block_hash(block_hash, tokens)
            if ledger.register_new_hash(block, block_hash) is None:
                ledger.cached_blocks[block] = None
                entered[index] = block - self._first
            else:  # behind a gap the cache has this block already
                self._give_back([block])
        self._prefixes.imported(keys, entered)

    def collect(self) -> bool:
        """Free the blocks of loads that have ended by themselves; return whether there were any.
        Does not block."""
        left, self._left = self._left, []
        ended = False
        while left:
            load, blocks = left.pop(0)
            try:
                # A node that is closed has ended all its loads.
                pending = not self._prefixes.node.closed and load.poll() is LoadState.PENDING
            except BaseException:
                self._left += [(load, blocks), *left]
                raise
            if pending:
                self._left.append((load, blocks))
            else:
                self._give_back(blocks)
                ended = True
        return ended

    def shared(self, blocks: Sequence[int]) -> list[int]:
        """Return the numbers by which others know the blocks."""
        return [block - self._first for block in blocks]

    def _give_back(self, blocks: Sequence[int]) -> None:
        self._allocator.pool.free_blocks(self._allocator.index, list(blocks))
