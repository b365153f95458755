"""A pytest plugin for both runs of vLLM's own tests: which tests run, and what became of each."""

from __future__ import annotations

import functools
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from .selection import Selection


class BothRuns:
    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.caches = True
        """Whether the present test's engines get a prefix cache, although it asks for none."""

    def turn_caching_on(self) -> None:
        """Most of vLLM's tests make their scheduler without it, and kvshm leaves such engines
        alone: so that it is beside them, both runs turn it on."""
        original = VllmConfig.__post_init__

        @functools.wraps(original)
        def post_init(config: VllmConfig, *args: Any) -> None:
            if self.caches and config.model_config is not None:
                config.cache_config.enable_prefix_caching = True
            original(config, *args)

        VllmConfig.__post_init__ = post_init

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [item for item in items if self.selection.leaves_out(item.nodeid)]
        items[:] = [item for item in items if not self.selection.leaves_out(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        for item in items:  # else each test collects vLLM's and torch's modules as garbage
            item.add_marker("skip_global_cleanup")

    def pytest_collection_finish(self) -> None:
        """What was imported need not be looked at in each test's garbage collection."""
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.caches = not self.selection.runs_as_written(item.nodeid)


class Outcomes:
    """Written for compare.py."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tests: dict[str, dict[str, Any]] = {}
        self.left_out: list[str] = []

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += [item.nodeid for item in items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed"})
        if report.outcome != "passed" and test["outcome"] != "failed":
            test["outcome"] = report.outcome
        if report.when == "teardown":
            test.update(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        told = {"tests": self.tests, "left_out": self.left_out}
        self.path.write_text(json.dumps(told, indent=0))


def pytest_configure(config: pytest.Config) -> None:
    runs = BothRuns(Selection.read(os.environ["UPSTREAM_VERSION"]))
    runs.turn_caching_on()
    init_none_hash(
        sha256
    )  # as an engine does: not every test does so itself, and kvshm waits for it
    config.pluginmanager.register(runs)
    config.pluginmanager.register(Outcomes(Path(os.environ["UPSTREAM_OUTCOMES"])))
