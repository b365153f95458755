"""Two engines of two pipeline ranks each share: every rank imports the blocks of its own layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import EngineSpec
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair
from .engines import SharedNode, remove_what_vllm_leaves
from .oracle import ask_both, assert_bit_equal, prompts, shareable

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.nightly,  # each rank's part of a block is shown by test_ranks.py
    pytest.mark.timeout(900),
]

RANKS = 2
ARGUMENTS = (
    "--pipeline-parallel-size",
    str(RANKS),
    "--max-model-len",
    "2048",
    # vLLM's CPU build makes room for what the first rank sends to the second one in a warm-up that
    # it leaves out with --enforce-eager: the second rank then dies in its first step.
    "--no-enforce-eager",
    "--compilation-config",
    '{"backend": "eager"}',
)


@pytest.fixture
def deep(model: Path) -> Iterator[Pair]:
    """Both engines have a rank on either core."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with SharedNode() as node:
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("deep-a", model, 0, 64, ARGUMENTS, cores),
            EngineSpec("deep-b", model, 1, 64, ARGUMENTS, cores),
        )
        node.wait_joined(a, b)
        yield Pair(node, a, b)
        node.stop_engines(a, b)
        for engine in (a, b):
            remove_what_vllm_leaves(engine)


def test_every_rank_imports_and_the_answer_is_that_of_a_local_hit(deep: Pair) -> None:
    node, a, b = deep
    for exporter, importer, seed in ((a, b, 450), (b, a, 451)):
        sent = list(prompts(2, seed))
        blocks = sum(map(shareable, sent))
        with observe(node, importer) as seen:
            answers = ask_both(node, exporter, importer, sent)
        assert_bit_equal(answers)
        assert seen.imported_blocks == blocks > 0
        assert seen.blocks_copied == seen.verified == RANKS * blocks
        assert seen.discarded == seen.mismatched == seen.loads_failed == 0
        assert seen.tokens.imported == seen.loaded["imported_tokens"] == blocks * BLOCK_SIZE
        assert not node.leased(exporter)
