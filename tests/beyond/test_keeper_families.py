"""States and windows out of a store: a prompt crosses with what its end needs of each group."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path

import pytest
from local_node import wait_until

from ..vllm.engines import PATIENCE_S
from ..vllm.families import SEVERAL_GROUPS
from ..vllm.oracle import random_prompt
from .nodes import nodes
from .ways import keeper

pytestmark = [pytest.mark.vllm, pytest.mark.beyond, pytest.mark.timeout(1800)]

FAMILIES = {family.name: family for family in SEVERAL_GROUPS}
PROMPTS = 3
NUM_BLOCKS = 300
"""Enough for the longest prompt in each group."""


@pytest.mark.parametrize("name", ["qwen3-next", "gemma3"])
def test_a_prompt_of_several_groups_is_answered_as_on_a_local_hit(
    name: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    length = 4 * max(family.step, 256) + family.tail
    model = family.write(tmp_path / "model")
    way = partial(keeper, memory="256M")
    with nodes(way, model, tmp_path, engines=(1, 1), num_blocks=NUM_BLOCKS) as both:
        (one, first), (two, second) = ((m, m.engines[0]) for m in both.machines)
        came, seeds = 0, count(1)
        for _ in wait_until("prompts cross", PATIENCE_S, 2.0):
            prompt = random_prompt(next(seeds), length)
            one.ask(first, prompt)
            local_hit = one.ask(first, prompt)
            asked = two.ask(second, prompt)
            if asked.tokens.imported:
                assert asked.answer == local_hit.answer
                came += asked.tokens.imported == local_hit.tokens.local_hit
            if came == PROMPTS:
                break
