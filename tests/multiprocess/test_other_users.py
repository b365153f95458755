"""Another user of the machine: what he does in /dev/shm and with equal names has no effect."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .engines import FakeEngine
from .processes import Managed, Node, fresh_node
from .sandbox import Command, skip_unless_permitted
from .toys import finish, start

pytestmark = pytest.mark.multiprocess

NOBODY = 65534
AS_NOBODY: Command = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--",
)  # fmt: skip
FOREIGN_FILES = 20_000
SILENCE_SECONDS = 2.0
"""An engine gives a coordinator up after five."""
SPOIL = """
import fcntl, os, sys, time
base = sys.argv[1]
for kind in ("slots", "index", "leases"):
    os.mkfifo(f"{base}.{kind}.x.00000000000000aa", 0o666)
leased = os.open(f"{base}.slots.y.00000000000000bb", os.O_CREAT | os.O_RDWR, 0o666)
fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
for number in range(int(sys.argv[2])):
    os.close(os.open(f"{base}.slots.z.{number:016x}", os.O_CREAT | os.O_RDWR, 0o666))
print("spoilt", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node() -> Iterator[Node]:
    skip_unless_permitted([AS_NOBODY])
    with fresh_node() as node:
        yield node


@pytest.fixture
def others_files(node: Node) -> Iterator[Managed]:
    """What once hung the coordinator for ever, or for as long as it took to look through it."""
    base = f"/dev/shm/kvshm.{node.namespace}"
    argv = (*AS_NOBODY, sys.executable, "-c", SPOIL, base, str(FOREIGN_FILES))
    spoiler = node.processes.start("spoiler", *argv)
    spoiler.wait_out(lambda line: line == "spoilt")
    yield spoiler
    spoiler.kill()
    for path in Path("/dev/shm").glob(f"kvshm.{node.namespace}.*"):
        path.unlink()


def test_files_of_another_user_silence_no_one(node: Node, others_files: Managed) -> None:
    coordinator = node.coordinator()
    dying, living = FakeEngine(node, "dying"), FakeEngine(node, "living")
    for engine in (dying, living):
        engine.joined()
    lines = len(coordinator.err)
    dying.process.kill()
    begin = time.monotonic()
    coordinator.wait_err("event=death", since=lines)
    newcomer = FakeEngine(node, "newcomer")
    newcomer.joined()
    assert time.monotonic() - begin < SILENCE_SECONDS + 5, "a start of Python, not a scan"
    assert len(coordinator.err) - lines < 10
    for command in ("dump-index", "clean"):
        place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
        argv = (sys.executable, "-m", "kvshm.tools.cli", command, *place)
        asked = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        assert "Traceback" not in asked.stderr
    assert coordinator.terminate() == 0


def test_two_users_with_one_namespace_both_serve(node: Node) -> None:
    theirs = node.run_dir.with_name(f"{node.run_dir.name}-nobody")
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    try:
        node.coordinator()
        python = (*AS_NOBODY, sys.executable)
        other = node.start_coordinator("--run-dir", str(theirs), python=python)
        other.wait_err("event=serving")
        ours = [start(node, seed, "--requests", "100") for seed in (1, 2)]
        others = [
            start(node, seed, "--requests", "100", python=python, KVSHM_RUN_DIR=str(theirs))
            for seed in (3, 4)
        ]
        for outcome in finish(ours + others):
            assert outcome["wrong"] == 0
            assert outcome["imported"] > 0
        assert other.terminate() == 0
        assert not list(theirs.iterdir())
    finally:
        theirs.rmdir()
