"""The model that every node serves, and what a failing test shows of them."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from tiny_model import write_model

from ..vllm.engines import SharedNode, reported


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of all engines to the report of a failed test."""
    report = yield
    if report.failed:
        for node in SharedNode.open:
            report.sections.extend(node.evidence())
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was measured but not asserted."""
    for line in reported:
        terminalreporter.write_line(line)
