"""Short chaos runs: no wrong byte, no one ends who was not ended, nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvshm._base.syncpoints import SyncPoint

from .chaos_faults import SHM
from .chaos_node import ENGINE_POINTS, KEEPER_POINTS, RANK_POINTS
from .chaos_schedule import SEEDS, WEIGHTS, Fault, schedule
from .processes import PATIENCE_SECONDS, Managed, real_processes, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ENDS = (
    "coordinator-kill",
    "coordinator-term",
    "rank-kill",
    "engine-kill",
    "engine-term",
    "keeper-kill",
    "keeper-term",
    "keeper-stop",
    "drain",
    "truncate",
)


def chaos(*options: str) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, "-m", "tests.multiprocess.chaos", *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def each(kinds: Iterable[str], seed: int = SEEDS[0]) -> tuple[str, ...]:
    return "--seed", str(seed), "--each", "--only", ",".join(kinds)


def check_clean(status: int, found: dict[str, Any], kinds: Collection[str]) -> None:
    assert set(kinds).isdisjoint(found["missing"])
    assert found["imported"] > 100
    assert found["from_keepers"] > 10
    bad = ("bystanders", "violations", "leaks", "problems", "not_undone")
    assert {kind: found[kind] for kind in bad if found[kind]} == {}
    assert (status, found["wrong"]) == (0, 0)


def test_a_seed_stands_for_its_faults() -> None:
    def first(seed: int, *without: str) -> list[Fault]:
        return list(islice(schedule(seed, without=without), 1000))

    assert first(1) == first(1) != first(2)
    less = [fault for fault in first(1) if fault.kind != "engine-kill"]
    assert first(1, "engine-kill")[: len(less)] == less
    assert {fault.kind for fault in first(1)} == set(WEIGHTS)
    assert {*ENGINE_POINTS, *RANK_POINTS} == set(SyncPoint.__members__) >= {*KEEPER_POINTS}


def test_ends_of_processes_harm_no_one() -> None:
    """Two ranks each: one that ends takes its engine along.  The seed soon has all of these."""
    options = ("--seconds", "8", "--ranks", "2", "--keepers", "1")
    check_clean(*chaos(*options, *each(ENDS, SEEDS[5])), ENDS)


def test_deaths_and_stops_at_sync_points_harm_no_one() -> None:
    options = ("--seconds", "8", "--keepers", "1")
    check_clean(*chaos(*options, *each(["engine-point"])), ["engine-point"])


@pytest.mark.nightly  # those above, but all faults at once, and for a minute
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_only_a_killed_process_ends(seed: int) -> None:
    check_clean(*chaos("--seconds", "60", *each(WEIGHTS, seed)), WEIGHTS)


@pytest.mark.parametrize(
    "fault",
    [
        "shift",
        pytest.param("zero", marks=pytest.mark.long),
        pytest.param("wrong-block", marks=pytest.mark.long),
    ],
)
def test_a_wrong_copy_is_seen(fault: str) -> None:
    options = ("--seconds", "1", "--only", "engine-stop", "--keepers", "0")
    status, found = chaos(*options, "--fault", fault)
    assert status == 1
    assert found["wrong"] > 0


@pytest.mark.long
def test_a_wrong_copy_that_a_keeper_has_is_seen() -> None:
    """Engines copy rightly, and have wrong bytes from keepers only."""
    options = ("--seconds", "1", "--only", "engine-stop", "--faulty", "keeper")
    status, found = chaos(*options, "--fault", "shift")
    assert status == 1
    assert found["wrong"] > 0


def test_a_death_off_the_schedule_is_seen() -> None:
    status, found = chaos(
        "--seconds", "2", "--only", "engine-stop", "--keepers", "0", "--murder", "1"
    )
    assert status == 1
    assert [each["ended"] for each in found["bystanders"]] == ["SIGKILL"]


def planted(namespace: str) -> list[Path]:
    return [path for path in SHM.iterdir() if namespace in path.name]


def started_in(run_dir: str) -> list[int]:
    """The processes whose environment or command names a run directory."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            here = Path("/proc", pid)
            texts = [(here / name).read_bytes() for name in ("environ", "cmdline")]
            if any(run_dir.encode() in text for text in texts):
                found.append(int(pid))
    return found


def begun(run: Managed) -> tuple[str, str]:
    line = run.wait_out(lambda line: line.startswith("chaos in "))
    found = re.fullmatch(r"chaos in (\S+), namespace (\S+)", line)
    assert found is not None
    return found[1], found[2]


def test_a_run_that_is_killed_leaves_nothing() -> None:
    with real_processes() as processes:
        options = ("--seconds", "600", "--only", "foreign", "--engines", "2", "--keepers", "1")
        run = processes.python("chaos", "-m", "tests.multiprocess.chaos", *options)
        run_dir, namespace = begun(run)
        wait_until(lambda: bool(planted(namespace)), "something strange lies there")
        assert len(started_in(run_dir)) >= 4, "coordinator, engines, ranks, keeper"
        run.signal(signal.SIGKILL)
        wait_until(lambda: not started_in(run_dir), "all have ended", PATIENCE_SECONDS)
        wait_until(lambda: not planted(namespace), "what was planted is removed")
        wait_until(lambda: not Path(run_dir).exists(), "the run directory is removed")
