"""LMCache's server on each node, with the store as its second tier: alone, and beside kvshm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from completions import Result
from local_node import Engine, wait_until
from sharing_node import BLOCK_SIZE

from ..vllm.engines import PATIENCE_S, reported
from ..vllm.oracle import Prompt, random_prompt
from .nodes import BLOCK_BYTES, Asked, Machine, Nodes, Way, nodes
from .services import Service
from .ways import kvshm_and_lmcache, lmcache

pytestmark = [pytest.mark.vllm, pytest.mark.beyond, pytest.mark.timeout(1800)]

BLOCKS, TAIL = 5, 30
LENGTH = BLOCKS * BLOCK_SIZE + TAIL
PAYLOAD = BLOCKS * BLOCK_BYTES


@pytest.fixture(scope="module", params=[lmcache, kvshm_and_lmcache])
def both(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    way: Way = request.param
    with nodes(way, model, tmp_path_factory.mktemp("store"), num_blocks=40) as running:
        yield running


def compute(both: Nodes, prompt: Prompt) -> Result:
    """Have an engine of the first node compute a prompt, until the store has it; returns the answer
    of a local hit."""
    one, before = both.machines[0], both.store.stored()
    one.ask(one.engines[0], prompt)
    for _ in wait_until("the store has the prompt", PATIENCE_S):
        if both.store.stored() - before >= len(prompt) // BLOCK_SIZE:
            break
    return one.ask(one.engines[0], prompt).answer


def ask(
    both: Nodes, machine: Machine, engine: Engine, prompt: Prompt, **options: Any
) -> tuple[Asked, int]:
    """Ask, and say how many blocks have come over the node's wire meanwhile."""
    with both.crossing() as crossed:
        asked = machine.ask(engine, prompt, **options)
    received = crossed[both.machines.index(machine)].received
    reported.append(
        f"{machine.attached.environment.get('KVSHM_ENABLE', 'kvshm')} {engine.spec.name}: "
        f"{asked.tokens}, {received} bytes, first token {asked.answer.ttft_s * 1000:.0f} ms"
    )
    return asked, round(received / BLOCK_BYTES)


def test_a_prefix_crosses_once_for_all_engines_of_a_node(both: Nodes) -> None:
    """The second engine has it from LMCache's server: kvshm shares only blocks that it knows to be
    computed, or copied, by engines with equal weights, and LMCache's are not among them."""
    two, prompt = both.machines[1], random_prompt(1, LENGTH)
    local_hit = compute(both, prompt)
    stored = both.store.stored()
    for engine, blocks in zip(two.engines, (BLOCKS, 0), strict=True):
        asked, crossed = ask(both, two, engine, prompt)
        assert asked.tokens.imported == BLOCKS * BLOCK_SIZE
        assert crossed == blocks
        assert asked.answer == local_hit
    assert both.store.stored() == stored


def test_a_prefix_that_a_neighbour_has_does_not_cross(both: Nodes) -> None:
    one, prompt = both.machines[0], random_prompt(2, LENGTH)
    local_hit = compute(both, prompt)
    asked, crossed = ask(both, one, one.engines[1], prompt)
    assert (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, 0)
    assert asked.answer == local_hit


def test_what_no_engine_has_comes_back_from_the_store(both: Nodes) -> None:
    prompt = random_prompt(3, LENGTH)
    local_hit = compute(both, prompt)
    for machine in both.machines:
        machine.forget(*machine.engines)
    two = both.machines[1]
    asked, crossed = ask(both, two, two.engines[0], prompt)
    assert (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, BLOCKS)
    assert asked.answer == local_hit


@pytest.mark.parametrize("lost", ["memory", "master"])
def test_without_a_part_of_the_store_prompts_are_computed(both: Nodes, lost: str) -> None:
    """And once it is back, they cross again."""
    two, seed = both.machines[1], 10 + 2 * (lost == "master")
    prompt = random_prompt(seed, LENGTH)
    local_hit = compute(both, prompt)
    service: Service = getattr(both.store, lost)
    service.kill()
    asked, crossed = ask(both, two, two.engines[0], prompt)
    assert (asked.tokens.imported, crossed) == (0, 0)
    assert asked.answer.tokens == local_hit.tokens
    service.start()
    # Until the master has given up memory that is lost, it has some objects stored there: in vain.
    for _ in wait_until("the store knows the memory that it has, and no other", PATIENCE_S):
        if both.store.metric("master_total_capacity_bytes") == both.store.size:
            break
    prompt = random_prompt(seed + 1, LENGTH)
    local_hit = compute(both, prompt)
    asked, crossed = ask(both, two, two.engines[0], prompt)
    assert (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, BLOCKS)
    assert asked.answer == local_hit


@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_without_lmcaches_server_prompts_are_computed(both: Nodes, what: str) -> None:
    """It may take as long as LMCache waits for its server; and once that is back, prompts cross
    again."""
    two, seed = both.machines[1], 20 + 50 * (what == "stopped")
    prompt = random_prompt(seed, LENGTH)
    local_hit = compute(both, prompt)
    service = two.attached.services["lmcache"]
    if what == "killed":
        service.kill()
    with service.stopped() if what == "stopped" else nullcontext():
        asked, crossed = ask(both, two, two.engines[0], prompt)
    assert (asked.tokens.imported, crossed) == (0, 0)
    assert asked.answer.tokens == local_hit.tokens
    if what == "killed":
        service.start()
    for number in wait_until_counted("prompts cross again"):
        prompt = random_prompt(seed + number, LENGTH)
        local_hit = compute(both, prompt)
        asked, crossed = ask(both, two, two.engines[0], prompt)
        assert asked.answer.tokens == local_hit.tokens
        if (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, BLOCKS):
            break


def test_an_engine_that_was_started_again_has_it_from_the_node(both: Nodes) -> None:
    two, prompt = both.machines[1], random_prompt(90, LENGTH)
    local_hit = compute(both, prompt)
    ask(both, two, two.engines[0], prompt)
    first = two.engines[0]
    two.stop_engines(first)
    two.start_engines(first.spec)
    asked, crossed = ask(both, two, two.engines[-1], prompt)
    assert (asked.tokens.imported, crossed) == (BLOCKS * BLOCK_SIZE, 0)
    assert asked.answer == local_hit


def wait_until_counted(what: str) -> Iterator[int]:
    return (number for number, _ in enumerate(wait_until(what, PATIENCE_S, 2.0), start=1))
