"""Coordinators come and go; engines serve on, and share whenever there is one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import EngineSpec, wait_until
from sharing_node import observe

from .conftest import Pair
from .engines import SharedNode
from .oracle import Prompt, ask_both, assert_bit_equal, prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
def alone(model: Path) -> Iterator[Pair]:
    """Two engines on a node without a coordinator."""
    with SharedNode() as node:
        yield Pair(node, *node.start_engines(EngineSpec("c", model, 0), EngineSpec("d", model, 1)))


def test_the_coordinator_may_come_last_die_and_return(alone: Pair) -> None:
    node, c, d = alone
    first, second, third, fourth, fifth, last = prompts(6, seed=200)
    _assert_serves_unshared(alone, first)

    node.start_coordinator()
    node.wait_joined(c, d)
    _assert_shares(alone, second)

    with node.sharing(c, shareable(third)):
        c.complete(third)
    node.end_coordinator(signal.SIGKILL)
    with observe(node, d) as seen:  # what was known stays known
        imported = d.complete(third)
    seen.assert_imported(shareable(third))
    assert imported == c.complete(third)
    _assert_serves_unshared(alone, fourth)

    node.start_coordinator()
    node.wait_joined(c, d)
    _assert_shares(alone, fifth)

    with node.sharing(c, shareable(last)):
        computed = c.complete(last)
    hit = c.complete(last)
    assert node.end_coordinator() == 0
    left = node.owned(c)
    c.kill()  # nobody is there to tell the other
    assert d.complete(last) in (computed, hit)

    node.start_coordinator()
    for _ in wait_until("what the dead engine left is swept", 60):
        if left and not left & set(node.segments()):
            break
    assert d.complete(last) in (computed, hit)


def _assert_serves_unshared(alone: Pair, prompt: Prompt) -> None:
    _, c, d = alone
    before = d.prompt_tokens()
    assert d.complete(prompt) == c.complete(prompt)
    assert (d.prompt_tokens() - before).computed == len(prompt)


def _assert_shares(alone: Pair, prompt: Prompt) -> None:
    node, c, d = alone
    with observe(node, d) as seen:
        assert_bit_equal(ask_both(node, c, d, [prompt]))
    seen.assert_imported(shareable(prompt))
