"""Engines, coordinator and commands in time namespaces of their own, as restored containers have
them: CLOCK_MONOTONIC differs by minutes or hours, and no one is taken for stalled, or for healthy,
because of that."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from . import toys
from .engines import FakeEngine
from .processes import Managed, Node, fresh_node, wait_until
from .sandbox import fresh_tmpfs, own_clock, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

SINCE_BOOT = int(time.monotonic())
BEHIND = (*own_clock(-min(200, SINCE_BOOT // 2)), sys.executable)
AHEAD = (*own_clock(40_000), sys.executable)
HERE = (sys.executable,)
WITHOUT_PROC = (*fresh_tmpfs(("/proc", "1m")), sys.executable)
SOON = ("--loop-seconds", "3", "--scheduler-seconds", "3")


def kvshm(
    node: Node, *arguments: str, python: Sequence[str] = HERE
) -> subprocess.CompletedProcess[str]:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = [*python, "-m", "kvshm.tools.cli", *arguments, *place]
    return subprocess.run(command, capture_output=True, text=True)


def status(node: Node, python: Sequence[str]) -> dict[str, Any]:
    (space,) = json.loads(kvshm(node, "status", "--json", *SOON, python=python).stdout)[
        "namespaces"
    ]
    return space


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    skip_unless_permitted([BEHIND[:-1], AHEAD[:-1], WITHOUT_PROC[:-1]])
    with fresh_node() as node:
        yield node


@pytest.fixture(scope="module")
def engines(node: Node) -> dict[str, Managed]:
    node.coordinator(python=AHEAD)
    quiet = ("--requests", "0", "--loads", "0", "--imported", "0")
    hangs = {"KVSHM_TEST_SYNC_POINT": "BEAT:hang:3"}
    started = {
        "well": toys.start(node, 1, "--loads", "0", python=BEHIND),
        "behind": toys.start(node, 2, *quiet, python=BEHIND, **hangs),
        "ahead": toys.start(node, 3, *quiet, python=AHEAD, **hangs),
    }
    for engine in started.values():
        toys.result(engine)
    copies = {"KVSHM_TEST_SYNC_POINT": "COPY_BEGINS:hang:1"}
    started["loads"] = toys.start(node, 4, python=AHEAD, **copies)
    wait_until(lambda: kvshm(node, "holders").stdout != "", "it holds leases")
    return started


@pytest.mark.parametrize("python", [HERE, BEHIND, AHEAD], ids=["here", "behind", "ahead"])
def test_who_stalls_is_reported_across_time_namespaces(
    node: Node, engines: dict[str, Managed], python: Sequence[str]
) -> None:
    found: dict[str, list[str]] = {}

    def all_are_reported() -> bool:
        nonlocal found
        by_pid = {e["pid"]: e["reasons"] for e in status(node, python)["engines"]}
        found = {name: by_pid[engine.pid] for name, engine in engines.items()}
        return all(found[name] for name in ("behind", "ahead", "loads"))

    wait_until(all_are_reported, "three of them have stalled")
    assert found["well"] == []
    for name in ("behind", "ahead"):
        (reported,) = found[name]
        assert reported.startswith("client stalled: it has not gone round for ")
        assert 3 <= int(reported.removesuffix(" s").rpartition(" ")[2]) < SINCE_BOOT // 2 + 3
    assert found["loads"][0].startswith("loads of rank 0 stalled: ")
    assert status(node, python)["coordinator"] == {"state": "healthy", "reason": "", "code": None}


@pytest.mark.parametrize("python", [HERE, BEHIND], ids=["here", "behind"])
def test_since_when_leases_are_held_is_reported_across_time_namespaces(
    node: Node, engines: dict[str, Managed], python: Sequence[str]
) -> None:
    began = time.monotonic()
    rows = json.loads(kvshm(node, "holders", "--json", python=python).stdout)
    (row,) = [row for row in rows if row["pid"] == engines["loads"].pid]
    assert 0 <= row["seconds"] < began, "not the age of the machine, nor hours"


def test_a_command_that_does_not_know_its_own_clock_says_so(
    node: Node, engines: dict[str, Managed]
) -> None:
    cannot = "whether its loops go round is not known"
    found: dict[int, dict[str, Any]] = {}

    def is_reported_of_none() -> bool:
        """A loop that has not gone round yet has not stalled."""
        found.update({e["pid"]: e for e in status(node, WITHOUT_PROC)["engines"]})
        return all(found[engine.pid]["progress"] is None for engine in engines.values())

    wait_until(is_reported_of_none, "all loops have gone round")
    for engine in engines.values():
        assert found[engine.pid]["reasons"][-1].startswith(cannot)
    assert "is not known" in status(node, WITHOUT_PROC)["coordinator"]["reason"]
    for probe in ("progress", "serving"):
        asked = ("status", "--probe", probe, "--engine", str(engines["ahead"].pid))
        done = kvshm(node, *asked, python=WITHOUT_PROC)
        assert (done.returncode, cannot in done.stderr) == (0, True)
    (row,) = json.loads(kvshm(node, "holders", "--json", python=WITHOUT_PROC).stdout)
    assert row["seconds"] is None


CREATES = """
from kvshm._base.ids import Epoch, Fingerprint
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
table = OwnSlotTable.create(TableSpec("n", "e", 1, 16, 1, Fingerprint(bytes(32))), Epoch(1))
print(table.progress()[0].clock_offset_ns)
"""


def test_a_table_has_its_schedulers_offset_before_any_time(node: Node) -> None:
    done = subprocess.run([*AHEAD, "-c", CREATES], capture_output=True, text=True)
    assert done.stdout.strip() == str(40_000 * 10**9), done.stderr


def test_engines_whose_clocks_differ_by_hours_share(node: Node) -> None:
    other = node.with_other_namespace()
    other.coordinator(python=BEHIND)
    exporter = FakeEngine(other, "exporter", python=AHEAD)
    exporter.joined()
    exporter.do("publish", blocks=[1, 2])
    importer = FakeEngine(other, "importer", python=BEHIND)
    assert importer.heard("engine_joined", name="exporter")["blocks"] == [1, 2]
    assert importer.do("lease", epoch=exporter.started["epoch"])["blocks"] == 2
    table = exporter.table()
    wait_until(lambda: table.heartbeat > 2, "the engine goes on")
    assert status(other, HERE)["coordinator"]["state"] == "healthy"
    table.close()
