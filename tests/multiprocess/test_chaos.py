"""A short chaos run: no wrong byte, nobody ends who was not ended, nothing is left.

Long ones are started by hand (chaos.py).  That a run can fail is shown by a built-in wrong copy
and by a death that the schedule does not know of.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .chaos_schedule import SEEDS, WEIGHTS, schedule

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def chaos(*options: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report of a run."""
    argv = [sys.executable, "-m", "tests.multiprocess.chaos", *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_seed_stands_for_its_faults() -> None:
    assert list(schedule(1, 60)) == list(schedule(1, 60))
    assert list(schedule(1, 60)) != list(schedule(2, 60))
    less = [fault for fault in schedule(1, 60) if fault.kind != "engine-kill"]
    assert list(schedule(1, 60, without=("engine-kill",))) == less
    assert {fault.kind for fault in schedule(1, 600)} == set(WEIGHTS)


@pytest.mark.long
def test_nobody_ends_but_who_is_ended() -> None:
    status, found = chaos("--seconds", "25", "--seed", str(SEEDS[0]))
    assert status == 0
    assert (found["wrong"], found["bystanders"], found["leaks"]) == (0, [], [])
    assert found["imported"] > 100
    assert {"engine-kill", "engine-stop", "rank-kill", "coordinator-term"} <= set(found["faults"])


@pytest.mark.long
def test_a_wrong_copy_is_seen() -> None:
    status, found = chaos("--seconds", "2", "--only", "engine-stop", "--fault", "shift")
    assert status == 1
    assert found["wrong"] > 0


@pytest.mark.long
def test_a_death_off_the_schedule_is_seen() -> None:
    status, found = chaos("--seconds", "3", "--only", "engine-stop", "--murder", "1")
    assert status == 1
    assert [each["ended"] for each in found["bystanders"]] == ["SIGKILL"]
