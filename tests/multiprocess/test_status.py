"""``kvshm status`` and ``kvshm holders`` over a node whose processes and threads are stopped."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from kvshm._base.rundir import engine_socket, list_sockets
from kvshm.tools.node.whereabouts import pids_of

from . import toys
from .processes import Managed, Node, fresh_node, leave_socket, wait_until

SOON = ("--loop-seconds", "3", "--scheduler-seconds", "3")


class Stalled:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.coordinator = node.coordinator()
        patient = ("--requests", "0", "--loads", "0", "--imported", "0")
        self.healthy = toys.start(node, 1, "--loads", "0")
        self.stopped = toys.start(node, 2, *patient)
        self.client = self.hangs(3, "BEAT", *patient, nth=3)
        for engine in (self.healthy, self.stopped, self.client):
            toys.result(engine)
        # From here on no one reuses a block of an engine that others may lease from.
        self.scheduler = self.hangs(4, "LOAD_PLANNED")
        wait_until(lambda: self.kvshm("holders").stdout != "", "it holds leases")
        self.loads = self.hangs(5, "COPY_BEGINS")

    def hangs(self, seed: int, point: str, *options: str, nth: int = 1) -> Managed:
        at = f"{point}:hang:{nth}"
        return toys.start(self.node, seed, *options, KVSHM_TEST_SYNC_POINT=at)

    def kvshm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        place = ("--run-dir", str(self.node.run_dir), "--namespace", self.node.namespace)
        command = [sys.executable, "-m", "kvshm.tools.cli", *arguments, *place]
        return subprocess.run(command, capture_output=True, text=True)

    def status(self) -> dict[str, Any]:
        return json.loads(self.kvshm("status", "--json", *SOON).stdout)

    def reasons(self) -> dict[int, str]:
        (space,) = self.status()["namespaces"]
        return {engine["pid"]: "; ".join(engine["reasons"]) for engine in space["engines"]}

    def holders(self) -> list[dict[str, Any]]:
        return json.loads(self.kvshm("holders", "--json").stdout)

    def probe(self, what: str, engine: Managed) -> tuple[int, str]:
        done = self.kvshm("status", "--probe", what, "--engine", str(engine.pid), *SOON)
        return done.returncode, done.stderr


@pytest.fixture(scope="module")
def stalled() -> Iterator[Stalled]:
    with fresh_node() as node:
        yield Stalled(node)


def test_each_stalled_thread_is_distinguished(stalled: Stalled) -> None:
    begins = {
        stalled.healthy.pid: "",
        stalled.scheduler.pid: "scheduler stalled: it has not gone round for",
        stalled.client.pid: "client stalled: it has not gone round for",
        stalled.loads.pid: "loads of rank 0 stalled: it has not gone round for",
        stalled.stopped.pid: "",
    }
    found: dict[int, str] = {}

    def as_expected() -> bool:
        nonlocal found
        found = stalled.reasons()
        if found.keys() != begins.keys():
            return False  # one has not joined yet
        return all(found[pid].startswith(begin) for pid, begin in begins.items()) and (
            {pid for pid, why in found.items() if not why}
            == {stalled.healthy.pid, stalled.stopped.pid}
        )

    wait_until(as_expected, f"{begins}")
    assert "with 1 waiting" in found[stalled.scheduler.pid]
    assert "scheduler" not in found[stalled.loads.pid], "its load has not ended, but it polls"
    assert stalled.probe("progress", stalled.healthy) == (0, "")
    code, reported = stalled.probe("progress", stalled.loads)
    assert (code, "loads of rank 0 stalled" in reported) == (1, True)
    assert stalled.probe("ready", stalled.loads)[0] == 0
    assert stalled.probe("live", stalled.scheduler)[0] == 0
    assert stalled.probe("serving", stalled.loads)[0] == 0
    assert stalled.probe("serving", stalled.scheduler)[0] == 1


def test_holders_of_stuck_leases_are_named_with_their_age(stalled: Stalled) -> None:
    done = stalled.kvshm("holders", "--json")
    holders = {row["pid"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0
    assert {*holders} == {stalled.scheduler.pid, stalled.loads.pid}
    for row in holders.values():
        assert row["process"] == "alive"
        assert row["leases"] > 0
        assert row["seconds"] > 1
    name = holders[stalled.loads.pid]["holder"]
    assert name in stalled.kvshm("holders", "--engine", name).stdout


@contextmanager
def a_full_queue(node: Node, pid: int) -> Iterator[None]:
    """As many connections as a stopped engine's sockets take, as many looks at it leave them."""
    names = {found.path.name: found.path for found in list_sockets(node.run_dir, node.namespace)}
    (path,) = [
        names[name] for name, of in pids_of([*names]).items() if of == pid and "rank" not in name
    ]
    with ExitStack() as opened:
        with suppress(BlockingIOError):
            while True:
                kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
                opened.enter_context(socket.socket(socket.AF_UNIX, kind)).connect(str(path))
        yield


def test_a_stopped_engine_without_a_coordinator_is_found_by_its_pid(node: Node) -> None:
    engine = toys.start(
        node, 1, "--requests", "0", "--loads", "0", "--imported", "0", "--peers", "0"
    )
    engine.wait_out(lambda line: line == "go")
    engine.signal(signal.SIGSTOP)
    wait_until(lambda: engine.is_stopped, "it stops")
    expected = {
        "--here --probe serving": 1,
        "--here --probe live": 1,
        "--here": 3,
        f"--engine {engine.pid}": 3,
        f"--probe serving --engine {engine.pid}": 1,
    }

    def ask(arguments: str) -> subprocess.CompletedProcess[str]:
        place = ("--run-dir", str(node.run_dir))
        command = [sys.executable, "-m", "kvshm.tools.cli", "status", *arguments.split(), *place]
        return subprocess.run(command, capture_output=True, text=True)

    with ThreadPoolExecutor() as pool:  # each waits for an answer for some seconds
        done = dict(zip(expected, pool.map(ask, expected), strict=True))
    assert {arguments: each.returncode for arguments, each in done.items()} == expected
    for each in done.values():
        assert "no answer within" in each.stdout + each.stderr


def test_a_stopped_engine_is_down_and_a_dead_one_has_ended(stalled: Stalled) -> None:
    stalled.stopped.signal(signal.SIGSTOP)
    wait_until(lambda: stalled.stopped.is_stopped, "it stops")
    code, reported = stalled.probe("live", stalled.stopped)
    assert (code, "it does not answer: stopped" in reported) == (1, True)
    assert stalled.kvshm("status", *SOON).returncode == 3
    with a_full_queue(stalled.node, stalled.stopped.pid):
        done = stalled.kvshm("status", "--here", "--probe", "serving", *SOON)
        assert (done.returncode, f"pid {stalled.stopped.pid}" in done.stderr) == (1, True)
    stalled.stopped.kill()
    wait_until(lambda: stalled.stopped.pid not in stalled.reasons(), "the coordinator clears up")
    missing = stalled.kvshm("status", "--probe", "live", "--engine", str(stalled.stopped.pid))
    assert (missing.returncode, "no engine is called" in missing.stderr) == (1, True)


def test_a_stopped_coordinator_is_stalled_and_a_dead_one_missing(stalled: Stalled) -> None:
    def probe() -> tuple[int, str]:
        done = stalled.kvshm("status", "--probe", "coordinator", *SOON)
        return done.returncode, done.stderr.partition(": ")[2]

    assert probe() == (0, "")
    stalled.coordinator.signal(signal.SIGSTOP)
    wait_until(lambda: probe()[0] == 1, "nobody goes round")
    assert probe()[1].startswith("coordinator stalled: ")
    stalled.coordinator.signal(signal.SIGCONT)
    wait_until(lambda: probe() == (0, ""), "it goes round again")
    stalled.coordinator.kill()
    assert probe() == (1, "no coordinator runs: engines hear of no new engine\n")
    assert stalled.reasons()[stalled.healthy.pid] == "", "engines serve on"


def test_a_dead_holder_is_named_also_where_no_coordinator_clears_up(stalled: Stalled) -> None:
    """Nothing of it is left but what other engines know: its table went with it."""
    dead = stalled.loads
    (before,) = [row for row in stalled.holders() if row["pid"] == dead.pid]
    dead.kill()
    (after,) = [row for row in stalled.holders() if row["holder"] == before["holder"]]
    assert (after["process"], after["epoch"]) == ("ended", before["epoch"])
    assert (after["exporter"], after["leases"]) == (before["exporter"], before["leases"])
    (space,) = stalled.status()["namespaces"]
    assert before["holder"] in [engine["engine"] for engine in space["ended"]]


def test_nothing_is_down_and_a_probe_of_nothing_fails(node: Node) -> None:
    place = ("--run-dir", str(node.run_dir))
    for arguments, code, reported in (
        ((), 3, "nothing of kvshm runs in"),
        (("--probe", "ready"), 1, "there is no engine"),
        (("--probe", "coordinator"), 1, "there is no coordinator"),
        (("--here", "--probe", "live"), 1, "there is no engine"),
        (("--here", "--probe", "serving"), 0, ""),
        (("--loop-seconds", "0"), 2, "'0' is not a number of more than 0"),
    ):
        command = [sys.executable, "-m", "kvshm.tools.cli", "status", *arguments, *place]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (code, "")
        assert reported in done.stderr


def test_long_lists_of_what_is_left_are_cut(node: Node) -> None:
    for number in range(1, 31):
        leave_socket(engine_socket(node.run_dir, node.namespace, number))
    command = [sys.executable, "-m", "kvshm.tools.cli", "status", "--run-dir", str(node.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert len(done.stdout.splitlines()) == 22
    assert "(epoch 0000000000000001): its process has ended; run `kvshm clean`" in done.stdout
    assert done.stdout.endswith("    and 10 more (--json lists all)\n")
