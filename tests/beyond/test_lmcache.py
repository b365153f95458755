"""LMCache's server on each node, with the store as its second tier: alone, and beside kvshm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import wait_until
from sharing_node import BLOCK_SIZE

from ..vllm.engines import PATIENCE_S, reported
from ..vllm.oracle import random_prompt
from .nodes import BLOCK_BYTES, Nodes, Way, nodes
from .ways import kvshm_and_lmcache, lmcache

pytestmark = [pytest.mark.vllm, pytest.mark.beyond, pytest.mark.timeout(1800)]

BLOCKS, TAIL = 5, 30
LENGTH = BLOCKS * BLOCK_SIZE + TAIL


@pytest.fixture(scope="module", params=[lmcache, kvshm_and_lmcache])
def both(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    way: Way = request.param
    with nodes(way, model, tmp_path_factory.mktemp("store")) as running:
        yield running


def test_a_prefix_crosses_once(both: Nodes) -> None:
    one, two = both.machines
    prompt = random_prompt(1, LENGTH)
    before = both.store.keys()
    with both.crossing() as stored:
        first = one.ask(one.engines[0], prompt)
        for _ in wait_until("the store has the prompt", PATIENCE_S):
            if both.store.keys() - before >= BLOCKS:
                break
    with both.crossing() as fetched:
        second = two.ask(two.engines[0], prompt)
        third = two.ask(two.engines[1], prompt)
    reported.append(f"{both} stored {stored} fetched {fetched}")
    reported.append(f"{[a.tokens for a in (first, second, third)]} {BLOCKS * BLOCK_BYTES}")
    assert both.store.keys() - before == BLOCKS
    assert second.tokens.imported == third.tokens.imported == BLOCKS * BLOCK_SIZE
    local = one.ask(one.engines[0], prompt)
    assert second.answer == third.answer == local.answer
