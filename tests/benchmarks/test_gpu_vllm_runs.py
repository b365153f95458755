"""Runs of two engines: less than everything imported, hit or measured fails, by name; and what
they start ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import gpu_vllm_path
import pytest
from gpu_vllm_pair import FAULT, faulty
from gpu_vllm_tally import Tally, judged
from local_node import processes_of

ROOT = gpu_vllm_path.ROOT
RUNS = ROOT / "benchmarks" / "gpu_vllm_runs.py"


def started(code: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", ROOT / "benchmarks")))
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_whole_rounds_are_needed() -> None:
    tally = Tally()
    assert tally.faults("1024 tokens") == ["1024 tokens: 0 whole rounds, and 2 are needed"]
    assert tally.add(1008, 1008, 1008)
    assert tally.add(1008, 1024, 1008)
    assert not tally.faults("1024 tokens")


def test_one_token_of_many_is_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()
    assert not tally.add(1008, 1, 1008)
    assert not tally.add(1008, 1008, 992)
    assert [tally.add(1008, 1008, 1008) for _ in range(2)] == [True, True]
    faults = tally.faults("beside")
    assert faults == [
        "beside: 3025 of 4032 tokens were imported (1 times too few)",
        "beside: 4016 of 4032 tokens were hit locally (1 times too few)",
    ]
    assert not judged(faults)
    assert capsys.readouterr().out.count("FAILED: beside") == 2


def test_parts_of_vllm_are_imported_only_where_there_is_none(tmp_path: Path) -> None:
    own = [str(tmp_path), str(tmp_path / "examples")]
    assert gpu_vllm_path.folders(tmp_path, has_vllm=False) == own
    for name in ("gpu-vllm-site", "gpu-site"):
        (tmp_path / "dist" / name).mkdir(parents=True)
    sites = [str(tmp_path / "dist" / name) for name in ("gpu-vllm-site", "gpu-site")]
    assert gpu_vllm_path.folders(tmp_path, has_vllm=False) == own + sites
    assert gpu_vllm_path.folders(tmp_path, has_vllm=True) == own + sites[1:]


def test_a_fault_is_passed_on_to_one_engine_and_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = {"KVSHM_VERIFY": "1"}
    monkeypatch.delenv(FAULT, raising=False)
    assert faulty(checked) == (checked, {})
    monkeypatch.setenv(FAULT, "zero")
    assert faulty(checked) == ({"KVSHM_VERIFY": "0"}, {FAULT: "zero"})


def test_results_that_cannot_be_written_are_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, "KVSHM_GPU_RESULTS": str(tmp_path / "file" / "results")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(RUNS), "equal"], env=environment, cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("KVSHM_GPU_RESULTS cannot be written to: ")


def test_the_time_limit_ends_engines_and_the_run() -> None:
    code = """
import time
from types import SimpleNamespace
from gpu_vllm_limits import end_in_time
engine = SimpleNamespace(signal=lambda number: print("signal", int(number), flush=True))
end_in_time(0.2, [SimpleNamespace(engines=[engine])])
time.sleep(60)
"""
    out, err = started(code).communicate(timeout=60)
    assert out == f"signal {int(signal.SIGKILL)}\n"
    assert err == "FAILED: ended by the time limit of 0.2 s\n"


@pytest.mark.parametrize("in_order", [False, True])
def test_what_a_run_has_started_ends_with_it_unless_it_ends_in_order(in_order: bool) -> None:
    code = f"""
import os, signal, subprocess
from gpu_vllm_limits import Watcher
with Watcher() as watcher:
    other = subprocess.Popen(["sleep", "60"], process_group=0, stdout=subprocess.DEVNULL)
    watcher.add(other.pid)
    print(other.pid, flush=True)
    if not {in_order}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    with started(code) as run:
        assert run.stdout is not None
        group = int(run.stdout.readline())
        run.stdout.read()  # up to the watcher's end, which holds it open, too
        assert run.wait(60) == (0 if in_order else -signal.SIGKILL)
    left = processes_of(group)
    if left:
        os.killpg(group, signal.SIGKILL)
    assert bool(left) == in_order
