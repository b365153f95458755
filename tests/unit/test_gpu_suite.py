"""The runner of the GPU suite: goes on after a failure, keeps its limits, writes what it saw."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
FORKING = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("KVSHM_GPU_RESULTS", str(tmp_path))
    return importlib.import_module("gpu_suite")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_every_step_runs_whatever_the_others_do(suite: ModuleType, tmp_path: Path) -> None:
    """One that fails, one that hangs with a process of its own, and one that measures."""
    step = suite.Step
    measured = json.dumps({"benchmark": "x", "value": 3})
    steps = [
        step("fails", 20, ("-c", "import sys; print('why', file=sys.stderr); sys.exit(3)")),
        step("hangs", 2, ("-c", FORKING)),
        step("measures", 20, ("-c", f"print({measured!r})")),
    ]
    assert not suite.run_part("x", steps, first=step("ready", 20, ("-c", "")))
    found = lines(tmp_path / "gpu-x.jsonl")
    ended = {line["name"]: line["ended"] for line in found if line["benchmark"] == "gpu step"}
    assert ended == {
        "ready": "ok", "fails": "failed with status 3", "hangs": "stopped after 2 s",
        "measures": "ok",
    }  # fmt: skip
    assert {"benchmark": "x", "value": 3, "step": "measures"} in found
    text = (tmp_path / "gpu-x.txt").read_text()
    assert "\nwhy\n" in text
    sleeper = next(int(line) for line in text.splitlines() if line.isdigit())
    assert not is_running(sleeper)


def test_the_first_lines_name_kernel_and_card(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gVisor nothing follows from a result, and the output says so."""
    monkeypatch.setattr(suite.platform, "release", lambda: suite.GVISOR)
    monkeypatch.setattr(suite, "CARD", (sys.executable, "-c", "print('a card, a driver')"))
    assert suite.run_part("x", [], first=suite.Step("ready", 20, ("-c", "")))
    first, second, third, *_ = (tmp_path / "gpu-x.txt").read_text().splitlines()
    assert (first, third) == ("uname -r: 4.4.0", "nvidia-smi: a card, a driver")
    assert "nothing about CUDA IPC follows" in second


def test_nothing_runs_where_the_machine_is_not_ready(suite: ModuleType, tmp_path: Path) -> None:
    step = suite.Step
    unready = step("ready", 20, ("-c", "import sys; sys.exit('no GPU')"))
    assert not suite.run_part("x", [step("never", 20, ("-c", "print('ran')"))], first=unready)
    text = (tmp_path / "gpu-x.txt").read_text()
    assert "no GPU" in text
    assert "never: not run" in text
    assert "\nran\n" not in text


def test_each_part_fits_its_time_and_runs_files_that_exist(suite: ModuleType) -> None:
    limit = importlib.import_module("gpu_steps").PART_LIMIT_S
    for steps in suite.PARTS.values():
        assert sum(step.limit for step in (suite.READY, *steps)) <= limit
        for step in steps:
            named = [word for word in step.command if word.endswith(".py")]
            assert all((ROOT / path).is_file() for path in named), step


def test_steps_that_are_named_share_one_part(suite: ModuleType) -> None:
    """And so one pair of files: not many come back from a machine that is lent."""
    parts = suite.chosen(["demo", "c", "stalls"])
    assert [(name, [step.name for step in steps]) for name, steps in parts] == [
        ("c", ["copy-rates", "copy-ways"]),
        ("steps", ["demo", "stalls"]),
    ]
