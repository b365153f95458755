"""Blocks are retracted before transformers may hand them out, and all of a request at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from kvshm.hooks.transformers.imports import Importer
from kvshm.hooks.transformers.paged_cache import SharedLedger, SharedPagedAttentionCache


class Watched(SharedLedger):
    def __init__(self) -> None:
        self.retracted: list[list[int]] = []
        super().__init__(self.note)

    def note(self, blocks: Any) -> None:
        assert all(block in self.block_to_hash for block in blocks), "forgotten already"
        self.retracted.append(list(blocks))


@pytest.fixture
def ledger() -> Watched:
    """Blocks 1 and 2 are complete and referenced once, 3 twice, 4 is complete and cached."""
    made = Watched()
    for block in (1, 2, 3, 4):
        made.register_new_hash(block, 100 + block)
    made.acquire(3)
    made.release(4)
    assert made.retracted == []
    return made


def test_eviction_says_so_first(ledger: Watched) -> None:
    assert ledger.evict_cached_blocks() == [4]
    assert ledger.retracted == [[4]]


def test_a_reset_says_so_first(ledger: Watched) -> None:
    ledger.reset()
    assert ledger.retracted == [[1, 2, 3, 4]]


def test_a_block_that_is_not_kept_is_reported_with_its_last_reference(ledger: Watched) -> None:
    assert not ledger.release(1), "it is cached"
    assert ledger.release(2, no_cache=True)
    assert not ledger.release(3, no_cache=True)
    assert ledger.retracted == [[2]]
    assert ledger.release(3, no_cache=True)
    assert ledger.retracted == [[2], [3]]


def test_an_incomplete_block_is_no_ones_business(ledger: Watched) -> None:
    assert ledger.release(9, no_cache=True)
    assert ledger.retracted == []


def test_a_preempted_requests_blocks_are_waited_for_once() -> None:
    reported: list[list[int]] = []
    cache = object.__new__(SharedPagedAttentionCache)
    prefixes: Any = SimpleNamespace(end=lambda _: None, retract=lambda b: reported.append(list(b)))
    ledger = SharedLedger(cache._forgetting)
    released = SimpleNamespace(
        ledger=ledger, block_table={"r": [5, 6, 7]}, free_blocks=lambda *_: None
    )
    cache.prefixes, cache.importer = prefixes, Importer(prefixes, released, 5, 1.0)
    cache.cache_allocators = {"full_attention": released}
    ledger.register_new_hash(7, 1)
    ledger.acquire(7)
    cache.free_blocks("r", no_cache=True)
    assert reported == [[0, 1]], "the block of another request stays"


def test_a_step_that_completed_nothing_is_not_looked_at() -> None:
    cache = object.__new__(SharedPagedAttentionCache)
    cache.cache_allocators, cache.allow_block_sharing = {}, True
    nothing: Any = None
    cache.mark_complete_blocks(nothing, {})
