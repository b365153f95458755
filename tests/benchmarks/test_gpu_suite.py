"""The runner of the GPU suite: goes on after a failure, keeps its limits, writes what it saw."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..waiting import is_running

ROOT = Path(__file__).parents[2]
FORKING = "import subprocess; subprocess.run(['sh', '-c', 'echo $$; exec sleep 300'])"
HANGS_SECONDS = 10
"""Long enough for a program to begin on a busy machine."""


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = importlib.import_module("gpu_suite")
    found.card.cache_clear()
    monkeypatch.setattr(found, "CARD", (sys.executable, "-c", "print('a card, a driver')"))
    return found


def run_part(suite: ModuleType, folder: Path, steps: list, first: Any = None) -> bool:
    results = suite.Results("x", str(folder))
    return suite.run_part("x", steps, results, first or suite.Step("ready", 20, ("-c", "")))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_step_runs_whatever_the_others_do(suite: ModuleType, tmp_path: Path) -> None:
    step = suite.Step
    measured = json.dumps({"benchmark": "x", "value": 3})
    steps = [
        step("fails", 20, ("-c", "import sys; print('why', file=sys.stderr); sys.exit(3)")),
        step("hangs", HANGS_SECONDS, ("-c", FORKING)),
        step("measures", 20, ("-c", f"print({measured!r})")),
    ]
    assert not run_part(suite, tmp_path, steps)
    found = lines(tmp_path / "gpu-x.jsonl")
    ended = {line["name"]: line["ended"] for line in found if line["benchmark"] == "gpu step"}
    assert ended == {
        "ready": "ok", "fails": "failed with status 3", "hangs": f"stopped after {HANGS_SECONDS} s",
        "measures": "ok",
    }  # fmt: skip
    (kept,) = (line for line in found if line["benchmark"] == "x")
    assert (kept["value"], kept["step"], kept["card"]) == (3, "measures", "a card, a driver")
    assert abs(datetime.fromisoformat(kept["utc"]).timestamp() - time.time()) < 100
    text = (tmp_path / "gpu-x.txt").read_text()
    assert "\nwhy\n" in text
    sleeper = next(int(line) for line in text.splitlines() if line.isdigit())
    assert not is_running(sleeper)


def test_the_first_lines_name_kernel_and_card(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gVisor nothing follows from a result, and the output says so."""
    monkeypatch.setattr(suite.platform, "release", lambda: suite.GVISOR)
    assert run_part(suite, tmp_path, [])
    _, first, second, third, *_ = (tmp_path / "gpu-x.txt").read_text().splitlines()
    assert (first, third) == ("uname -r: 4.4.0", "nvidia-smi: a card, a driver")
    assert "nothing about CUDA IPC follows" in second


def test_nothing_runs_where_the_machine_is_not_ready(suite: ModuleType, tmp_path: Path) -> None:
    step = suite.Step
    unready = step("ready", 20, ("-c", "import sys; sys.exit('no GPU')"))
    assert not run_part(suite, tmp_path, [step("never", 20, ("-c", "print('ran')"))], unready)
    last = lines(tmp_path / "gpu-x.jsonl")[-1]
    assert (last["name"], last["ended"]) == ("never", "not run")
    text = (tmp_path / "gpu-x.txt").read_text()
    assert "no GPU" in text
    assert "never: not run" in text
    assert "\nran\n" not in text


def test_each_part_fits_its_time_and_runs_files_that_exist(suite: ModuleType) -> None:
    known = importlib.import_module("gpu_steps")
    for steps in suite.PARTS.values():
        limits = [step.limit for step in (suite.READY, *steps)]
        assert sum(limits) + known.CARD_LIMIT_S <= known.PART_LIMIT_S
        for step in steps:
            named = [word for word in step.command if word.endswith(".py")]
            assert all((ROOT / path).is_file() for path in named), step


def test_a_part_that_runs_again_keeps_what_it_saw_before(suite: ModuleType, tmp_path: Path) -> None:
    for value in (1, 2):
        measured = json.dumps({"benchmark": "x", "value": value})
        run_part(suite, tmp_path, [suite.Step("measures", 20, ("-c", f"print({measured!r})"))])
    found = [line["value"] for line in lines(tmp_path / "gpu-x.jsonl") if line["benchmark"] == "x"]
    assert found == [1, 2]
    assert (tmp_path / "gpu-x.txt").read_text().count("=== part x") == 2


def started(folder: Path, *names: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_suite.py"), *names], text=True,
        env={**os.environ, "KVSHM_GPU_RESULTS": str(folder)}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.multiprocess
def test_results_that_cannot_be_written_are_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "odd" / "gpu-steps.jsonl").mkdir(parents=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "odd"):
        suite = started(folder, "demo", "mps")
        said = suite.communicate(timeout=60)[0]
        assert suite.returncode == 2, said
        assert said.startswith(f"KVSHM_GPU_RESULTS={folder}: no results can be written there: ")
        assert said.count("\n") == 1


def test_a_suite_that_is_ended_says_what_it_did_not_run(suite: ModuleType, tmp_path: Path) -> None:
    def end(*_: object) -> None:
        sys.exit(1)

    before = signal.signal(signal.SIGTERM, end)
    step = suite.Step
    ends = step("ends", 20, ("-c", f"import os, time; os.kill({os.getpid()}, 15); time.sleep(99)"))
    try:
        with pytest.raises(SystemExit):
            run_part(suite, tmp_path, [ends, step("never", 20, ("-c", ""))])
    finally:
        signal.signal(signal.SIGTERM, before)
    ended = {line["name"]: line["ended"] for line in lines(tmp_path / "gpu-x.jsonl")[2:]}
    assert ended == {"ends": "ended with the suite", "never": "not run"}
