"""Which tests run in one worker when they run side by side (pytest-xdist), and in which order.

A worker takes one test after the other, wherever it stands, so that none waits for another worker.
Tests that share something dear to make, wheels or processes, stay together in one worker.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

ONE_WORKER = (
    r"tests/(packaging)/",
    r"tests/(vllm/test_sleep)\.py",
    r"tests/(vllm/test_quantized)\.py::test_(?:equal|what)_",
    r"tests/multiprocess/(test_versions|test_docs_run|test_status|test_metrics|test_top)\.py",
    r"tests/core/(test_sanitizers)\.py::\w+\[(address|thread)",
    r"tests/(conformance)/\w+\.py::\w+\[([a-z]\w+)",
)
"""Tests whose ids match with the same groups stay together.  Marks of xdist's own would be lost:
xdist 3.8 writes them into ids that pytest 9.2 no longer reads."""


def together(nodeid: str) -> str:
    """Return the name of what a worker takes as a whole: a test, or several that stay together."""
    matches = (re.match(pattern, nodeid) for pattern in ONE_WORKER)
    return next((" ".join(match.groups()) for match in matches if match), nodeid)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return xdist's scheduler, which hands out what stays together as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Return the test in which the worker crashed.  xdist 3.8 hands that one out again, and
            also tests that have ended, for which a worker waits without end."""
            units = self.assigned_work[node]
            tests = (test for unit in units.values() for test in unit.items())
            if crashed := next((name for name, ended in tests if not ended), None):
                units[together(crashed)][crashed] = True
            left = {scope: unit for scope, unit in units.items() if not all(unit.values())}
            self.assigned_work[node] = left
            super().remove_node(node)
            return crashed

        def _reschedule(self, node: Any) -> None:
            """A worker that replaces another gets one test at first, and begins it when it gets the
            next one: hand out until it has enough, or there are no more."""
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
                super()._reschedule(node)

    return Scheduler(config, log)


def spread(items: Sequence[pytest.Item], folder: Callable[[pytest.Item], int]) -> list[pytest.Item]:
    """Return the tests with each folder spread evenly over the whole, so that tests which wait
    run beside tests which compute."""
    sizes = Counter(map(folder, items))
    seen: Counter[int] = Counter()
    places = {}
    for item in items:
        places[item] = seen[folder(item)] / sizes[folder(item)]
        seen[folder(item)] += 1
    return sorted(items, key=places.__getitem__)
