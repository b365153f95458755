"""The MPS daemon of benchmarks/gpu_mps.py ends with it, whatever it answers."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..waiting import is_running, until

ROOT = Path(__file__).parents[2]
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
    setsid sleep 600 >/dev/null 2>&1 &
    echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
    cp "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid" "$DAEMON"
else
    exec sleep 600
fi
"""
PROGRAM = """
import signal, sys, time
import gpu_mps
signal.signal(signal.SIGTERM, gpu_mps.hurry)
with gpu_mps.daemon(sys.argv[1]):
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.mark.multiprocess
def test_a_step_that_is_ended_ends_its_daemon_in_time(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    grace = importlib.import_module("gpu_suite").GRACE_S
    sys.path.pop(0)
    control, noted = tmp_path / "nvidia-cuda-mps-control", tmp_path / "daemon"
    control.write_text(CONTROL)
    control.chmod(0o755)
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "benchmarks", "examples"))
    environment = {
        **os.environ, "PYTHONPATH": paths, "DAEMON": str(noted),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    step = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, text=True,
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert step.stdout is not None
        assert step.stdout.readline() == "begun\n"
        daemon = int(noted.read_text())
        assert is_running(daemon)
        step.send_signal(signal.SIGTERM)
        step.wait(grace)
        until(lambda: not is_running(daemon))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(step.pid, signal.SIGKILL)
        step.communicate()
        if noted.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(noted.read_text()), signal.SIGKILL)
