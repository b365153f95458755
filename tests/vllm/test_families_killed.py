"""An engine with several KV cache groups is killed.  An importer, in the middle of a load: its
leases come back, and its exporter goes on.  An exporter: imports from it were right, later ones are
misses, and what was imported stays.  One family; test_pair.py shows the latter for one group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from local_node import Engine, wait_until
from sharing_node import observe

from kvshm._base.syncpoints import VARIABLE

from .engines import PATIENCE_S, SharedNode
from .families import SEVERAL_GROUPS
from .oracle import random_prompt
from .test_families import InTurnSpec, tell

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

FAMILY = next(family for family in SEVERAL_GROUPS if family.name == "gemma3")
INSIDE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Three(NamedTuple):
    """Engines that share, on one node."""

    node: SharedNode
    exporter: Engine
    importer: Engine
    stopped: Engine
    """Stops in its first load, before the copy."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    pytest.importorskip("vllm")
    tmp_path = tmp_path_factory.mktemp("killed")
    model = str(FAMILY.write(tmp_path / "model"))
    begin = {"arguments": {"model": model, "num_gpu_blocks_override": 400}, "environment": {}}
    with SharedNode() as node:
        node.start_coordinator()
        engines = node.start_engines(
            InTurnSpec("killed", tmp_path, core=0, environment=INSIDE),
            InTurnSpec("left", tmp_path, core=1, environment=INSIDE),
            InTurnSpec(
                "stopped", tmp_path, core=1, environment={**INSIDE, VARIABLE: "COPY_BEGINS:stop"}
            ),
        )
        for engine in engines:
            tell(engine, "/begin", **begin)
        node.wait_joined(*engines)
        yield Three(node, *engines)


def test_an_importer_that_is_killed_in_a_load_leaves_no_lease(three: Three) -> None:
    """Of no group; what it was copying is as it was."""
    node, exporter, importer, stopped = three
    used, meanwhile = random_prompt(9510, 900), random_prompt(9511, 900)
    with node.sharing(exporter, FAMILY.published(used)):
        exporter.complete(used)
    local_hit = exporter.complete(used)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(stopped.complete, used)
        for _ in wait_until("a load holds leases", PATIENCE_S):
            if leased := node.leased(exporter):
                break
        with contextlib.closing(node.table(exporter)) as table:
            slots = table.slots()
            groups = {slot.group for block, slot in enumerate(slots) if block in leased}
        assert groups == set(range(len(FAMILY.groups)))
        exporter.complete(meanwhile)
        assert exporter.complete(used) == local_hit
        stopped.kill()
        node.engines.remove(stopped)
        assert asked.exception() is not None
    for _ in wait_until("the dead engine's leases are taken back", PATIENCE_S):
        if not node.leased(exporter):
            break
    assert exporter.complete(used) == local_hit
    with observe(node, importer) as seen:
        assert importer.complete(used) == local_hit
    assert seen.tokens.imported == FAMILY.shareable(used)
    assert seen.mismatched == 0


def test_a_killed_exporter_leaves_nothing_but_misses(three: Three) -> None:
    node, exporter, importer, _ = three
    used, unused = random_prompt(9500, 900), random_prompt(9501, 900)
    with node.sharing(exporter, 2 * FAMILY.published(used)):
        exporter.complete(used)
        computed = exporter.complete(unused)
    with observe(node, importer) as seen:
        imported = importer.complete(used)
    assert seen.tokens.imported == FAMILY.shareable(used)
    assert imported == exporter.complete(used)

    node.kill(exporter)
    with observe(node, importer) as seen:
        assert importer.complete(unused) == computed
    assert seen.tokens.computed == len(unused)
    with observe(node, importer) as seen:
        assert importer.complete(used) == imported
    assert seen.tokens.local_hit == FAMILY.shareable(used)
