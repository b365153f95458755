"""The bench of the console: its arithmetic, and that a turn counts what runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bench_console
import pytest

from ..multiprocess import toys
from ..multiprocess.consoles import Console
from ..multiprocess.processes import Managed, fresh_node
from ..sources import ROOT


@pytest.mark.parametrize("options", [["--rounds", "1"], ["--engines", "1"]])
def test_what_would_fail_after_minutes_is_refused(options: list[str]) -> None:
    argv = [sys.executable, str(bench_console.__file__), *options]
    path = {**os.environ, "PYTHONPATH": f"{ROOT}/examples:{ROOT}"}  # as benchmarks/suite.py has it
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=path)
    assert ended.returncode == 2, ended.stderr
    assert "at least 2 rounds and 2 engines" in ended.stderr
    assert not ended.stdout


def test_seconds_that_threads_ran_become_shares_of_a_core() -> None:
    found = bench_console.percent({"a": 1.0, "b": 2.0}, {"a": 1.5, "b": 2.0, "c": 9.0}, 10.0)
    assert found == {"a": 5.0, "b": 0.0}


def test_values_of_an_arm_are_summed_up_apart() -> None:
    turns = {"x": [{"engine": 1.0}, {"engine": 3.0}], "y": [{"console": 2.0}, {"console": 2.0}]}
    found = bench_console.summed_up(turns)
    assert {arm: {name: one["p50"] for name, one in of.items()} for arm, of in found.items()} == {
        "x": {"engine": 2.0},
        "y": {"console": 2.0},
    }
    assert found["x"]["engine"]["max"] == 3.0


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_each_turn_counts_what_runs_and_has_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has the console look again and again, and its pages are gone with the turn."""
    seen: list[int] = []
    work = bench_console.work

    def watching(engines: Sequence[Managed], seconds: float) -> float:
        seen.append(sum(held.process.status is None for held in consoles))
        return work(engines, seconds)

    class Noted(Console):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]  # as the bench gives them
            consoles.append(self)

    consoles: list[Noted] = []
    monkeypatch.setattr(bench_console, "work", watching)
    monkeypatch.setattr(bench_console, "Console", Noted)
    with fresh_node() as node:
        coordinator = node.coordinator()
        engines = [toys.start(node, seed, "--requests", "3") for seed in range(2)]
        for engine in engines:
            toys.result(engine)
        found = {
            arm: bench_console.turn(node, engines, coordinator, pages, 4.0)
            for arm, pages in bench_console.ARMS.items()
        }
        assert all(len(toys.more(engine)["counters"]) for engine in engines)
    assert seen == [0, 1, 1, 1]
    assert "console" not in found["none"]
    assert "rss_mb" not in found["none"]
    assert found["a page"]["console"] > found["no page"]["console"] >= 0
    assert found["8 pages"]["rss_mb"] > 10
    assert all(of["engine"] > 0 for of in found.values())
    assert not Path(f"/proc/{consoles[-1].process.pid}").exists()
