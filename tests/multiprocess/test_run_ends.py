"""What a test run has started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from .processes import PATIENCE_SECONDS, has_ended, wait_until

pytestmark = pytest.mark.multiprocess

PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))
"""
"""Runs pytest as from a terminal: a shell that starts this run with ``&`` has it, and what it
starts, ignore SIGINT."""
NEVER_ENDS = str(Path(__file__).with_name("never_ends.py"))
GOES_WRONG = str(Path(__file__).with_name("goes_wrong.py"))


def mapping(file: str) -> list[int]:
    maps = ((pid, Path(f"/proc/{pid}/maps")) for pid in os.listdir("/proc") if pid.isdigit())
    found = []
    for pid, path in maps:
        with suppress(OSError):
            if file in path.read_text():
                found.append(int(pid))
    return found


@pytest.mark.parametrize(
    ("reported", "number", "side_by_side"),
    [
        ("run", signal.SIGTERM, False),
        ("run", signal.SIGINT, False),
        ("run", signal.SIGINT, True),
        ("run", signal.SIGKILL, False),
        ("run", signal.SIGKILL, True),
        ("worker", signal.SIGKILL, True),
    ],
    ids=[
        "terminated",
        "interrupted",
        "controller interrupted",
        "killed",
        "controller killed",
        "worker killed",
    ],
)
def test_nothing_of_it_stays(
    reported: str, number: signal.Signals, side_by_side: bool, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    arguments = (
        "-p",
        "no:cacheprovider",
        *(("-n", "1", "--max-worker-restart=0") if side_by_side else ("-p", "no:xdist")),
    )
    run = subprocess.Popen(
        [sys.executable, "-c", PYTEST, *arguments, NEVER_ENDS],
        env={**os.environ, "SAYS_WHO_RUNS": str(said)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pidfds = []
    try:
        wait_until(lambda: said.exists() or run.poll() is not None, "its processes run")
        run_dir, file, worker, *pids = said.read_text().split()
        pidfds = [os.pidfd_open(pid) for pid in (*map(int, pids), *mapping(file))]
        assert len(pidfds) == 6
        os.kill(run.pid if reported == "run" else int(worker), number)
        wait_until(lambda: all(map(has_ended, pidfds)), "all have ended")
        left = [Path(run_dir), Path(file)]
        wait_until(lambda: not any(path.exists() for path in left), "what they left is removed")
    finally:
        for pidfd in pidfds:
            if not has_ended(pidfd):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        run.terminate()
        run.wait(PATIENCE_SECONDS)


def outcome(*arguments: str, **environ: str) -> str:
    """What a run of goes_wrong.py says."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, GOES_WRONG],
        env={**os.environ, **environ},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return run.stdout


@pytest.mark.parametrize(("workers", "killed"), [(2, 0), (1, 11), (2, 23)])
def test_a_worker_that_dies_fails_one_test_and_all_others_run_once(
    workers: int, killed: int, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    environ = {"SAYS_WHO_RUNS": str(said), "KILLED": str(killed)}
    written = outcome("-n", str(workers), "-k", "runs_once", **environ)
    assert "1 failed, 23 passed in" in written
    assert sorted(map(int, said.read_text().split())) == list(range(24))


@pytest.mark.parametrize("hangs", ["test", "clean-up"])
def test_a_test_that_its_time_limit_does_not_end_ends_the_run(hangs: str, tmp_path: Path) -> None:
    written = outcome("-p", "no:xdist", SAYS_WHO_RUNS=str(tmp_path / "said"), HANGS=hangs)
    assert "Timeout (" in written
    assert "in hang" in written
    assert "passed" not in written


def test_a_worker_with_such_a_test_is_replaced(tmp_path: Path) -> None:
    said = tmp_path / "said"
    written = outcome("-n", "2", SAYS_WHO_RUNS=str(said), HANGS="test")
    assert "1 failed, 24 passed" in written
    assert "in hang" in written
