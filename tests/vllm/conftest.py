"""Engines that several test files share, and what a failing test shows of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from local_node import Engine, EngineSpec
from tiny_model import write_model

from .engines import SharedNode, reported


class Pair(NamedTuple):
    """Two engines of one model that share, on a node with a coordinator."""

    node: SharedNode
    a: Engine
    b: Engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama that every engine serves unless a test says otherwise."""
    pytest.importorskip("vllm")
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def pair(model: Path) -> Iterator[Pair]:
    """The two engines most tests ask."""
    with SharedNode() as node:
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("a", model, core=0, num_blocks=1024),
            EngineSpec("b", model, core=1, num_blocks=1024),
        )
        node.wait_joined(a, b)
        yield Pair(node, a, b)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of all engines and the index dump to the report of a failed test."""
    report = yield
    if report.failed:
        for node in SharedNode.open:
            report.sections.extend(node.evidence())
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many engines were started, and what was measured but not asserted."""
    if SharedNode.starts:
        terminalreporter.section("vLLM engines")
        starts = SharedNode.starts
        terminalreporter.write_line(f"{len(starts)} engines started: {', '.join(starts)}")
        for line in reported:
            terminalreporter.write_line(line)
