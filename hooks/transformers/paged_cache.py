"""The paged cache of transformers' continuous batching, with blocks that other engines read.

    cache tensor   | trash | trash | block 2n | block 2n + 1 | ...      n blocks to a sector
    what is shared                 | block 0  | block 1      | ...

The tensor lies in shared memory, its trash sectors without a description.  Others may read what has
a hash in the ledger: it is complete, and not written again before the ledger forgets the hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger

from kvshm.api import Region

from .imports import Importer
from .shared_prefixes import SharedPrefixes


class SharedLedger(BlockLedger):
    """A ledger that calls ``forgetting`` before it forgets what stands in blocks."""

    def __init__(self, forgetting: Callable[[Sequence[int]], None]) -> None:
        super().__init__()
        self._forgetting = forgetting

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        if no_cache and self.is_known(block_id) and self.is_last_reference(block_id):
            self._forgetting([block_id])
        return bool(super().release(block_id, no_cache))

    def evict_cached_blocks(self) -> list[int]:
        self._forgetting(list(self.cached_blocks))
        return list(super().evict_cached_blocks())

    def reset(self) -> None:
        self._forgetting(list(self.block_to_hash))
        super().reset()

    def is_known(self, block_id: int) -> bool:
        """Whether the block is complete and can be found by its hash."""
        return block_id in self.block_to_hash

    def is_last_reference(self, block_id: int) -> bool:
        """Whether no request needs the block any more once it is released."""
        return int(self.shared_ref_counts.get(block_id, 1)) <= 1


def allocator_of(cache: PagedAttentionCache) -> Any:
    """The one allocator of a cache whose layers are all of full attention."""
    return cache.cache_allocators[FULL_ATTENTION]


def regions_of(cache: PagedAttentionCache) -> list[Region]:
    """Where the blocks lie in the cache tensor."""
    allocator = allocator_of(cache)
    size = allocator.bytes_per_block
    return [Region(_trash_bytes(cache), size, size, allocator.num_blocks)]


def move(cache: PagedAttentionCache, tensor: torch.Tensor) -> None:
    """Have a cache lie in another tensor of zeros.  Only before its first request."""
    cache.cache_tensor = tensor
    allocator_of(cache).register_cache_tensor(
        cache.bytes_per_sector, tensor.numel() - _trash_bytes(cache), tensor, cache.pool
    )


def _trash_bytes(cache: PagedAttentionCache) -> int:
    return 2 * int(cache.bytes_per_sector)


class SharedPagedAttentionCache(PagedAttentionCache):
    """A PagedAttentionCache that publishes what it caches, and imports what is missing."""

    prefixes: SharedPrefixes
    importer: Importer

    @classmethod
    def take_over(
        cls, cache: PagedAttentionCache, prefixes: SharedPrefixes, wait_seconds: float
    ) -> None:
        """Make a plain cache a shared one, in place, because scheduler and processor hold it
        already.  It lies in the memory that ``prefixes`` was joined with, and has had no request.
        """
        allocator = allocator_of(cache)
        first = _trash_bytes(cache) // allocator.bytes_per_block
        cache.prefixes = prefixes
        cache.importer = Importer(prefixes, allocator, first, wait_seconds)
        cache.__class__ = cls
        allocator.ledger = SharedLedger(cache._forgetting)

    @property
    def _allocator(self) -> Any:
        return allocator_of(self)

    # -- what transformers calls

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        keys = self.prefixes.begin(request_id, prompt_ids)
        counts = self.importer.counts
        imported_before = counts.imported_tokens
        hit = self.importer.import_prefix(prompt_ids, keys)
        if hit is None:
            found = int(super().search_prefix_match(request_id, prompt_ids))
        else:  # what transformers would do, which would make all hashes again
            found = len(hit) * self._allocator.tokens_per_page
            if hit:
                self._allocator.acquire_prefix_blocks(request_id, found, hit)
        counts.local_hit_tokens += found - (counts.imported_tokens - imported_before)
        return found

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        if not complete_blocks:  # as in most steps
            return
        request_id = state.request_id
        if (sound := self.prefixes.sound_blocks(request_id)) is None:
            super().mark_complete_blocks(state, complete_blocks)
            return
        is_known, tables = self._allocator.ledger.is_known, self._allocator.block_table
        # A block that is left of these afterwards is a copy of another: that one takes its place.
        computed = {b for b in tables.get(request_id, [])[sound:] if not is_known(b)}
        super().mark_complete_blocks(state, complete_blocks)
        complete = list(takewhile(is_known, tables.get(request_id, [])[sound:]))
        self.prefixes.completed(
            request_id,
            state.initial_tokens,
            state.generated_tokens,
            self.importer.shared(complete),
            set(self.importer.shared(list(filter(is_known, computed)))),
        )

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        self.prefixes.end(request_id)
        if no_cache:  # all at once, so that readers are waited for once
            ledger, table = self._allocator.ledger, self._allocator.block_table
            self._forgetting([b for b in table.get(request_id, ()) if ledger.is_last_reference(b)])
        super().free_blocks(request_id, no_cache)

    def evict_cached_blocks(self) -> bool:
        # If nothing is evicted the generation loop may be about to end for want of blocks.
        return bool(super().evict_cached_blocks()) or bool(self.importer.make_room())

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        self.prefixes.end_all()
        super().free_all_requests(clear_ledgers)

    def reset(self) -> None:
        self.importer.finish()
        super().reset()  # which frees all requests

    def _forgetting(self, block_ids: Sequence[int]) -> None:
        self.prefixes.retract(self.importer.shared(block_ids))
