"""An engine with several KV cache groups is stopped or killed.  An importer, in the middle of a
load: what its exporter has reused meanwhile is lost, and no wrong token follows; its leases come
back, and its exporter goes on.  An exporter: imports from it were right, later ones are misses, and
what was imported stays.  One family with states and one with windows; test_pair.py shows the latter
for one group, and test_states_lost.py every byte."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest
from completions import Result
from local_node import Engine, wait_until
from sharing_node import observe

from .engines import PATIENCE_S, SharedNode
from .families import SEVERAL_GROUPS, Family
from .oracle import Prompt, random_prompt
from .test_families import InTurnSpec, tell

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

FAMILIES = {family.name: family for family in SEVERAL_GROUPS}
INSIDE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Three(NamedTuple):
    """Engines that share, on one node."""

    family: Family
    node: SharedNode
    exporter: Engine
    importer: Engine
    stopped: Engine
    """Is stopped in a load, and killed."""


@pytest.fixture(scope="module", params=["qwen3-next", "gemma3"])
def three(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Three]:
    pytest.importorskip("vllm")
    family, tmp_path = FAMILIES[request.param], tmp_path_factory.mktemp("killed")
    model = str(family.write(tmp_path / "model"))
    blocks = {"num_gpu_blocks_override": 2 * family.few_blocks}
    begin = {"arguments": {"model": model, **blocks}, "environment": {}}
    with SharedNode() as node:
        node.start_coordinator()
        engines = node.start_engines(
            InTurnSpec("killed", tmp_path, core=0, environment=INSIDE),
            InTurnSpec("left", tmp_path, core=1, environment=INSIDE),
            InTurnSpec("stopped", tmp_path, core=1, environment=INSIDE),
        )
        for engine in engines:
            tell(engine, "/begin", **begin)
        node.wait_joined(*engines)
        yield Three(family, node, *engines)


@contextlib.contextmanager
def stopped_in_a_load(three: Three, engine: Engine, prompt: Prompt) -> Iterator[Future[Result]]:
    """The engine is asked, and stopped with leases on blocks of the exporter, of every group."""
    tell(engine, "/stop")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(engine.complete, prompt)
        for _ in wait_until("a load holds leases", PATIENCE_S):
            if leased := three.node.leased(three.exporter):
                break
        with contextlib.closing(three.node.table(three.exporter)) as table:
            groups = {slot.group for block, slot in enumerate(table.slots()) if block in leased}
        assert groups == set(range(len(three.family.groups)))
        yield asked


def test_blocks_that_are_reused_in_the_middle_of_a_load_are_lost(three: Three) -> None:
    """All of them: states and windows too; their request is computed."""
    family, node, exporter, importer, _ = three
    used = random_prompt(9520, 900)
    with node.sharing(exporter, family.published(used)):
        computed = exporter.complete(used)
    with observe(node, importer) as seen, stopped_in_a_load(three, importer, used) as asked:
        leased = node.leased(exporter)
        read = {place for place in node.shown(exporter) if place[0] in leased}
        for number, _ in enumerate(wait_until("what is read is reused", PATIENCE_S)):
            exporter.complete(random_prompt(9530 + number, 900))
            if not read & node.shown(exporter):
                break
        importer.signal(signal.SIGCONT)
        assert asked.result() == computed
    assert seen.recheck_failed > 0
    assert seen.tokens.computed == len(used)


def test_an_importer_that_is_killed_in_a_load_leaves_no_lease(three: Three) -> None:
    """Of no group; what it was copying is as it was."""
    family, node, exporter, importer, stopped = three
    used, meanwhile = random_prompt(9510, 900), random_prompt(9511, 900)
    with node.sharing(exporter, family.published(used)):
        exporter.complete(used)
    local_hit = exporter.complete(used)
    with stopped_in_a_load(three, stopped, used) as asked:
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
    assert seen.tokens.imported == family.shareable(used)
    assert seen.mismatched == 0


def test_a_killed_exporter_leaves_nothing_but_misses(three: Three) -> None:
    family, node, exporter, importer, _ = three
    used, unused = random_prompt(9500, 900), random_prompt(9501, 900)
    with node.sharing(exporter, 2 * family.published(used)):
        exporter.complete(used)
        computed = exporter.complete(unused)
    with observe(node, importer) as seen:
        imported = importer.complete(used)
    assert seen.tokens.imported == family.shareable(used)
    assert imported == exporter.complete(used)

    node.kill(exporter)
    with observe(node, importer) as seen:
        assert importer.complete(unused) == computed
    assert seen.tokens.computed == len(unused)
    with observe(node, importer) as seen:
        assert importer.complete(used) == imported
    assert seen.tokens.local_hit == family.shareable(used)
