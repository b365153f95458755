"""What goes wrong between two real engines costs a miss, never a token and never a stall."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from completions import Result
from local_node import EngineSpec, wait_until
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair
from .engines import SharedNode
from .oracle import Prompt, random_prompt, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BUDGET_MS = 200
FEW_BLOCKS = 24


@pytest.fixture
def stopping(model: Path) -> Iterator[Pair]:
    """A small cache, and an importer that stops itself between its first lease and copy."""
    short = ("--max-model-len", str((FEW_BLOCKS - 6) * BLOCK_SIZE))
    budget = {"KVSHM_DRAIN_BUDGET_MS": str(BUDGET_MS)}
    stop = {"KVSHM_TEST_SYNC_POINT": "COPY_BEGINS:stop"}
    with SharedNode() as node:
        node.start_coordinator()
        small, importer = node.start_engines(
            EngineSpec("small", model, 0, FEW_BLOCKS, arguments=short, environment=budget),
            EngineSpec("stopping", model, 1, arguments=short, environment=stop),
        )
        node.wait_joined(small, importer)
        yield Pair(node, small, importer)


def test_blocks_reused_while_leased_are_discarded(stopping: Pair) -> None:
    node, small, importer = stopping
    prompt = random_prompt(100, 5 * BLOCK_SIZE + 30)
    with node.sharing(small, shareable(prompt)):
        computed = small.complete(prompt)
    with observe(node, importer) as seen, ThreadPoolExecutor(1) as pool:
        pending: Future[Result] = pool.submit(importer.complete, prompt)
        try:
            for _ in wait_until("the importer stops with its leases", 60):
                if "T" in importer.processes().values():
                    break
            assert len(node.leased(small)) == shareable(prompt)
            _reuse_all_blocks(stopping)
        finally:
            importer.signal(signal.SIGCONT)
        answer = pending.result()
    assert answer == computed
    assert seen.discarded == shareable(prompt)
    assert seen.imported_blocks == 0
    assert seen.tokens.imported == 0
    assert not node.leased(small)
    _assert_next_import_works(stopping)


def _reuse_all_blocks(stopping: Pair) -> None:
    """Make the small engine overwrite every block it has, leased or not: READY -> DRAINING
    -> forced.  It waits for the stopped importer once, for one budget."""
    node, small, _ = stopping
    with observe(node, small) as seen:
        for seed in range(101, 104):
            small.complete(random_prompt(seed, (FEW_BLOCKS - 8) * BLOCK_SIZE), max_tokens=2)
    assert seen.forced == 5
    assert BUDGET_MS * 1000 <= seen.drain_wait_us < 2 * BUDGET_MS * 1000


def _assert_next_import_works(stopping: Pair) -> None:
    node, small, importer = stopping
    prompt: Prompt = random_prompt(110, 3 * BLOCK_SIZE + 7)
    with node.sharing(small, shareable(prompt)):
        small.complete(prompt)
    with observe(node, importer) as seen:
        imported = importer.complete(prompt)
    seen.assert_imported(shareable(prompt))
    assert imported == small.complete(prompt)
