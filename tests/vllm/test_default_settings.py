"""Two engines as most people start them: compiled, with nothing verified, and with every error a
cache miss."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_node import EngineSpec
from sharing_node import BLOCK_SIZE, observe

from .engines import SharedNode
from .oracle import ask_both, assert_bit_equal, prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

USUAL = {"KVSHM_VERIFY": "", "KVSHM_STRICT": ""}
"""A variable that is empty counts as unset."""


def test_engines_with_default_settings_share(model: Path) -> None:
    compiled = ("--no-enforce-eager",)
    with SharedNode(USUAL) as node:
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("usual-a", model, 0, 128, arguments=compiled),
            EngineSpec("usual-b", model, 1, 128, arguments=compiled),
        )
        node.wait_joined(a, b)
        for exporter, importer, seed in ((a, b, 900), (b, a, 901)):
            sent = list(prompts(2, seed))
            blocks = sum(map(shareable, sent))
            with observe(node, importer) as seen:
                answers = ask_both(node, exporter, importer, sent)
            assert_bit_equal(answers)
            assert seen.imported_blocks == blocks > 0
            assert seen.tokens.imported == blocks * BLOCK_SIZE
            assert (seen.verified, seen.loads_failed, seen.hook_errors) == (0, 0, 0)
        for engine in (a, b):
            assert not engine.said("kvshm is off for this engine")
            assert len(engine.said("exporting and importing")) == 1
