"""What holds for every test: the order, and that what it starts ends with the run."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reaper

from kvshm._base.log import LINE_LIMIT

from . import side_by_side
from .model.run_models import NOT_CHECKED
from .model.search import spin_is_missing
from .multiprocess.terminals import tmux_is_missing
from .played_cuda import library
from .watchdog import Watchdog

ROOT = Path(__file__).parent
CHEAP = ("unit", "core", "conformance", "model", "benchmarks", "multiprocess", "packaging", "gpu")
ORDER = (*CHEAP, "transformers", "vllm")
"""Folders by what their tests cost; single files of tests/ come before the last one."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let no process outlive the run, or the worker of pytest-xdist, that has started it, and no
    test hang for ever."""
    reaper.start()
    config.pluginmanager.register(Watchdog(config))


def _folder(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT).parts[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER) - 1


def _cost(item: pytest.Item) -> tuple[int, bool, bool]:
    starts_engines, is_long = (item.get_closest_marker(name) for name in ("vllm", "long"))
    return _folder(item), starts_engines is not None, is_long is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """What only make test-nightly runs is not for make test either."""
    if item.get_closest_marker("nightly"):
        item.add_marker(pytest.mark.long)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run cheap tests first, so that a mistake shows before minutes of engines."""
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.alone)
    items.sort(key=_cost)
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist
        items[:] = side_by_side.spread(items, _folder)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of garbage collections: with vLLM among it each
    takes a second, and many tests ask for some."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Modules in C complain at the end of what is then not collected."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return side_by_side.scheduler(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many models were searched, and how many were searched before as they stand."""
    passed = terminalreporter.stats.get("passed", [])
    made = Counter(value for r in passed for name, value in r.user_properties if name == "search")
    if made:
        terminalreporter.section("searches of models")
        terminalreporter.write_line(
            f"{made['now']} made now; {made['earlier']} made before with the same files and tools "
            "(.cache/model, which make clean removes)"
        )


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say last of all, below pytest's own summary, what could not be checked without a tool."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    skipped = [report.nodeid for report in reporter.stats.get("skipped", [])]
    if spin_is_missing() and any("tests/model/" in nodeid for nodeid in skipped):
        print(f"{NOT_CHECKED}: spin is not installed")
    if tmux_is_missing() and any("multiprocess/test_top.py" in nodeid for nodeid in skipped):
        print("KVSHM TOP NOT CHECKED IN A TERMINAL: tmux is not installed")


@pytest.fixture(autouse=True)
def own_line_limit() -> None:
    """Lines that an earlier test logged in this process must not silence those of this one."""
    LINE_LIMIT.reset()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory with a short path, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def played_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver library played in host memory, for the real cuda-bindings to call."""
    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    return library.build(tmp_path_factory.mktemp("cuda"))
