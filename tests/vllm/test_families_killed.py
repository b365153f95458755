"""An exporter with several KV cache groups is killed: imports from it were right, later ones are
misses, and what was imported stays.  One family; test_pair.py shows the same for one group."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_node import wait_until
from sharing_node import observe

from .engines import PATIENCE_S, SharedNode
from .families import SEVERAL_GROUPS
from .oracle import random_prompt
from .test_families import InTurnSpec, tell

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

FAMILY = next(family for family in SEVERAL_GROUPS if family.name == "gemma3")


def test_a_killed_exporter_leaves_nothing_but_misses(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = str(FAMILY.write(tmp_path / "model"))
    begin = {"arguments": {"model": model, "num_gpu_blocks_override": 400}, "environment": {}}
    used, unused = random_prompt(9500, 900), random_prompt(9501, 900)
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with SharedNode() as node:
        node.start_coordinator()
        exporter, importer = node.start_engines(
            InTurnSpec("killed", tmp_path, core=0, environment=inside),
            InTurnSpec("left", tmp_path, core=1, environment=inside),
        )
        for engine in (exporter, importer):
            tell(engine, "/begin", **begin)
        node.wait_joined(exporter, importer)
        with node.sharing(exporter, 2 * FAMILY.published(used)):
            exporter.complete(used)
            computed = exporter.complete(unused)
        with observe(node, importer) as seen:
            imported = importer.complete(used)
        assert seen.tokens.imported == FAMILY.shareable(used)
        assert imported == exporter.complete(used)

        left = node.owned(exporter)
        assert left
        exporter.kill()
        for _ in wait_until("the dead engine is swept", PATIENCE_S):
            if not left & set(node.sockets()):
                break
        with observe(node, importer) as seen:
            assert importer.complete(unused) == computed
        assert seen.tokens.computed == len(unused)
        with observe(node, importer) as seen:
            assert importer.complete(used) == imported
        assert seen.tokens.local_hit == FAMILY.shareable(used)
