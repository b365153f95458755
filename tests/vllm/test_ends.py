"""An engine ends when it is told to, whatever it is doing; ``ends.py`` makes the whole table.

That it ends at all is what is asserted: how soon, beside plain vLLM, is in docs/reliability.md.
Nightly: that an engine comes to leave is shown by test_shutdown.py, and by a server in
test_lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from local_node import Engine

from .ends import Row, end
from .engines import PATIENCE_S, SharedNode, remove_what_vllm_leaves

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)]

ROWS = (
    Row(True, 1, "importing", "group", "SIGINT"),
    Row(True, 1, "busy", "group", "SIGINT,SIGINT"),
    Row(True, 1, "busy", "server", "SIGTERM"),
)


class Ending(NamedTuple):
    """Engines that are about to end, one for each row, beside one that stays."""

    node: SharedNode
    stays: Engine
    engines: dict[Row, Engine]


@pytest.fixture(scope="module")
def ending(model: Path) -> Iterator[Ending]:
    with SharedNode() as node:
        node.start_coordinator()
        stays = Row(True, 1, "idle", "", "").spec("stays", model)
        specs = [row.spec(f"ends{number}", model) for number, row in enumerate(ROWS)]
        first, *others = node.start_engines(stays, *specs)
        node.wait_joined(first, *others)
        yield Ending(node, first, dict(zip(ROWS, others, strict=True)))
        for engine in others:
            remove_what_vllm_leaves(engine)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.state}-{row.target}-{row.signals}")
def test_it_ends_and_so_do_its_requests(ending: Ending, row: Row) -> None:
    node, stays, engines = ending
    found = end(row, node, engines[row], stays, PATIENCE_S)
    node.engines.remove(engines[row])
    assert None not in (found["server"], found["all"], found["sockets"]), found
    assert (found["left"], found["waiting"]) == (0, 0), found
    assert not [name for name in found["shm"] if "kvshm" in name]
    stays.complete([1, 2, 3], max_tokens=2)
