"""How long a first token takes by where its prompt comes from; the answers are compared, the times
are only reported."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import pytest
from sharing_node import BLOCK_SIZE

from ..vllm.engines import reported
from ..vllm.oracle import random_prompt
from .nodes import Attachment, Machine, nodes
from .store import Store
from .test_keeper import wait_until_used
from .test_lmcache import ask, compute
from .ways import keeper, plain

pytestmark = [pytest.mark.vllm, pytest.mark.beyond, pytest.mark.timeout(1800)]

LENGTH, PROMPTS = 3500, 9
BLOCKS = LENGTH // BLOCK_SIZE


def two_and_a_plain_one(machine: Machine, store: Store) -> Attachment:
    return (plain if machine.name == "node3" else partial(keeper, memory="64M"))(machine, store)


def test_each_source_of_a_prompt_gives_the_same_answer(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    times: dict[str, list[float]] = {}
    with nodes(
        two_and_a_plain_one, model, tmp_path_factory.mktemp("store"), engines=(1, 2, 1)
    ) as running:
        _, two, alone = running.machines
        for number, engine in enumerate(two.engines):
            wait_until_used(running, two, engine, count(10**7 * (1 + number)))
        for seed in range(PROMPTS):
            prompt = random_prompt(10**6 + seed, LENGTH)
            local_hit = compute(running, prompt)
            by_itself = alone.ask(alone.engines[0], prompt).answer
            fetched, crossed = ask(running, two, two.engines[0], prompt)
            neighbour, again = ask(running, two, two.engines[1], prompt)
            for name, answer in (
                ("a local hit", local_hit),
                ("computed by a plain engine", by_itself),
                ("from the store", fetched.answer),
                ("from the engine beside it", neighbour.answer),
            ):
                times.setdefault(name, []).append(answer.ttft_s * 1000)
            if seed:  # the first forward passes are slow, and estimates are made of later ones
                assert (crossed, again) == (BLOCKS, 0)
                assert fetched.answer == neighbour.answer == local_hit
    for name, measured in times.items():
        low, high = min(measured[1:]), max(measured[1:])
        reported.append(
            f"{LENGTH} tokens, first token of {PROMPTS - 1}, {name}: "
            f"p50 {median(measured[1:]):.0f} ms ({low:.0f} to {high:.0f})"
        )
