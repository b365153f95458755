"""A keeper on each node, as the store's one client, and engines that share by kvshm alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from local_node import Engine, wait_until
from sharing_node import BLOCK_SIZE

from ..vllm.engines import PATIENCE_S
from ..vllm.oracle import random_prompt
from .nodes import Machine, Nodes, nodes
from .test_lmcache import BLOCKS, LENGTH, ask, compute
from .ways import keeper

pytestmark = [pytest.mark.vllm, pytest.mark.beyond, pytest.mark.timeout(1800)]

FEW_BLOCKS = 40
"""Of each engine; a keeper has room for a third of that."""
ANSWERED_S = 10.0
"""How long computing a prompt takes at most while a part hangs, on a busy machine."""


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    way = partial(keeper, memory="4M")
    with nodes(way, model, tmp_path_factory.mktemp("store"), num_blocks=FEW_BLOCKS) as running:
        for machine in running.machines:
            for engine in machine.engines:
                wait_until_used(running, machine, engine, count(10**6 * engine.port))
        yield running


def wait_until_used(both: Nodes, machine: Machine, engine: Engine, seeds: Iterator[int]) -> None:
    """Wait until an engine imports over the wire what an engine of the other node has computed:
    the first forward passes are over, and keeper and store know each other."""
    other = both.machines[1 - both.machines.index(machine)]
    for _ in wait_until("prompts cross", PATIENCE_S, 2.0):
        prompt = random_prompt(next(seeds), LENGTH)
        other.ask(other.engines[0], prompt)
        local_hit = other.ask(other.engines[0], prompt).answer
        asked, crossed = ask(both, machine, engine, prompt)
        if (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, BLOCKS):
            assert asked.answer == local_hit
            break


def test_a_prefix_crosses_once_and_is_shared_in_place(both: Nodes) -> None:
    two, prompt = both.machines[1], random_prompt(1, LENGTH)
    local_hit = compute(both, prompt)
    stored = both.store.keys()
    for engine, blocks in zip(two.engines, (BLOCKS, 0), strict=True):
        asked, crossed = ask(both, two, engine, prompt)
        assert asked.tokens.imported == BLOCKS * BLOCK_SIZE
        assert crossed == blocks
        assert asked.answer == local_hit
    assert both.store.keys() == stored


def test_what_no_engine_and_no_keeper_has_comes_back(both: Nodes) -> None:
    one, prompt = both.machines[0], random_prompt(2, LENGTH)
    local_hit = compute(both, prompt)
    for other in range(10):
        compute(both, random_prompt(100 + other, LENGTH))
    asked, crossed = ask(both, one, one.engines[0], prompt)
    assert (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, BLOCKS)
    assert asked.answer == local_hit


def test_a_prefix_that_a_neighbour_has_does_not_cross(both: Nodes) -> None:
    one, prompt = both.machines[0], random_prompt(3, LENGTH)
    local_hit = compute(both, prompt)
    asked, crossed = ask(both, one, one.engines[1], prompt)
    assert (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, 0)
    assert asked.answer == local_hit


def test_prompts_with_a_salt_cross_to_those_with_the_same(both: Nodes) -> None:
    two, prompt = both.machines[1], random_prompt(4, LENGTH)
    compute(both, prompt)
    asked, crossed = ask(both, two, two.engines[0], prompt, cache_salt="another")
    assert (asked.tokens.imported, crossed) == (0, 0)


def test_what_is_reset_on_one_node_comes_back_on_none(both: Nodes) -> None:
    one, two = both.machines
    prompt = random_prompt(5, LENGTH)
    compute(both, prompt)
    one.forget(one.engines[0])
    time.sleep(2.0)  # what a look at the generation takes, twice
    asked, crossed = ask(both, two, two.engines[0], prompt)
    assert (asked.tokens.imported, crossed) == (0, 0)


@pytest.mark.parametrize("what", ["killed", "stopped"])
@pytest.mark.parametrize("lost", ["memory", "master", "keeper"])
def test_without_a_part_prompts_are_computed_and_cross_again_with_it(
    both: Nodes, lost: str, what: str
) -> None:
    two = both.machines[1]
    service = two.attached.services["keeper"] if lost == "keeper" else getattr(both.store, lost)
    seeds = count(1000 * ["memory", "master", "keeper"].index(lost) + 500 * (what == "killed"))
    prompt = random_prompt(next(seeds), LENGTH)
    local_hit = compute(both, prompt)
    if what == "killed":
        service.kill()
    with service.stopped() if what == "stopped" else nullcontext():
        begun = time.monotonic()
        asked, crossed = ask(both, two, two.engines[0], prompt)
        assert time.monotonic() - begun < ANSWERED_S
        assert (asked.tokens.imported, crossed) == (0, 0)
        assert asked.answer.tokens == local_hit.tokens
    if what == "killed":
        service.start()
    wait_until_used(both, two, two.engines[1], seeds)
