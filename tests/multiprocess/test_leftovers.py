"""What engines and coordinators leave behind: nothing when they are ended, and after a crash
nothing that ``kvshm clean`` does not remove."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvshm.coordinator.lease_table import LeaseTable

from kvshm import leftovers
from kvshm.leftovers import clear
from kvshm.locks import clearing, take_lock
from kvshm.rundir import lock_path
from kvshm.segment import TABLE_KIND, identity_of, list_segments
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import Epoch, Fingerprint

from .processes import Managed, Node, fresh_node, wait_until
from .sandbox import OWN_PIDS, skip_unless_permitted
from .toys import start

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        yield node


def sharing(node: Node) -> tuple[Managed, list[Managed]]:
    """A coordinator and two engines that have imported from each other."""
    coordinator = node.coordinator()
    engines = [start(node, seed) for seed in (1, 2)]
    for engine in engines:
        engine.wait_out(lambda line: line.startswith("{"))
    return coordinator, engines


def left(node: Node) -> list[str]:
    """All that there is of a node: segments and files."""
    return [*map(str, list_segments(node.namespace)), *(p.name for p in node.run_dir.iterdir())]


def clean(node: Node, *options: str) -> subprocess.CompletedProcess[str]:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = [sys.executable, "-m", "kvshm.tools.cli", "clean", *place, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("last", ["all at once", "coordinator", "engine"])
def test_who_is_ended_leaves_nothing(node: Node, last: str) -> None:
    coordinator, engines = sharing(node)
    everybody = [coordinator, *engines] if last != "coordinator" else [*engines, coordinator]
    for process in everybody:
        process.signal(signal.SIGTERM)
        if last != "all at once":
            assert process.wait() == 0
    for process in everybody:
        assert process.wait() == 0
    assert left(node) == []


def test_a_crash_of_everything_is_cleaned_up_by_a_command(node: Node) -> None:
    coordinator, engines = sharing(node)
    coordinator.kill()  # first, or it would clear up
    for engine in engines:
        engine.kill()
    crashed = left(node)
    kinds = (".slots.", ".index", ".leases.", ".rank.", ".peers.", ".commands", ".events", ".lock")
    assert all(any(kind in name for name in crashed) for kind in kinds)
    said = clean(node, "--dry-run")
    assert said.returncode == 0
    assert len(said.stdout.splitlines()) == len(crashed) - 1  # a lock file is not worth a line
    assert set(crashed) - set(left(node)) <= {f"{node.namespace}.lock"}
    assert clean(node).returncode == 0
    assert left(node) == []
    assert clean(node).stdout == ""


def test_what_belongs_to_the_living_stays(node: Node) -> None:
    coordinator, (dead, living) = sharing(node)
    assert "pid" in clean(node).stderr
    assert clean(node).returncode == 1, "the coordinator does that itself"
    coordinator.kill()
    dead.kill()
    told = clean(node)
    assert f".toy-{dead.pid}." in told.stdout
    assert not [name for name in left(node) if f".toy-{dead.pid}." in name]
    names = left(node)
    assert [n for n in names if f"toy-{living.pid}" in n and f".{TABLE_KIND}." in n]
    assert [n for n in names if f".rank.{living.pid}." in n]
    assert node.lease_table(), "for the bit of the living engine"
    living.signal(signal.SIGTERM)
    assert living.wait() == 0
    assert left(node) == [], "the last one clears up"


def test_what_may_live_in_another_pid_namespace_stays_and_is_named(node: Node) -> None:
    skip_unless_permitted([OWN_PIDS])
    spec = TableSpec(node.namespace, "e", 8, 16, 1, Fingerprint(bytes(32)))
    table = SlotTable.create(spec, Epoch(77), identity_of())
    script = (
        "import sys; from pathlib import Path; from kvshm.leftovers import clear\n"
        "print(*clear(Path(sys.argv[1]), sys.argv[2]).left)"
    )
    command = [*OWN_PIDS, sys.executable, "-c", script, str(node.run_dir), node.namespace]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "may live" in said
    assert node.segments(TABLE_KIND) == [table.name]
    table.unlink()
    table.close()


def test_a_coordinator_waits_for_who_clears_up(node: Node) -> None:
    with clearing(node.run_dir) as held:
        assert held
        lock = take_lock(lock_path(node.run_dir, node.namespace))  # as ``clear`` does
        coordinator = node.start_coordinator()
        wait_until(lambda: _waits_for(coordinator, node.run_dir), "it waits for the lock")
        lock_path(node.run_dir, node.namespace).unlink()
        os.close(lock)
    coordinator.wait_err("event=serving")


def _waits_for(process: Managed, run_dir: Path) -> bool:
    """Whether it has the run directory open."""
    try:
        fds = list(Path(f"/proc/{process.pid}/fd").iterdir())
        return str(run_dir) in {str(fd.readlink()) for fd in fds}
    except OSError:
        return False


def test_the_lease_table_of_a_coordinator_that_has_just_started_elsewhere_stays(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = leftovers.owned_segments
    elsewhere: list[LeaseTable] = []

    def start_meanwhile(*given: Any) -> Iterator[Any]:
        yield from look(*given)
        elsewhere.append(LeaseTable.open(node.namespace, identity_of()))

    monkeypatch.setattr(leftovers, "owned_segments", start_meanwhile)
    assert clear(node.run_dir, node.namespace).removed == []
    assert node.lease_table(), "of the coordinator of another run directory"
    elsewhere[0].close()
    monkeypatch.undo()
    assert clear(node.run_dir, node.namespace).removed
    assert left(node) == []


def test_one_that_clears_up_gives_way_to_another(node: Node) -> None:
    with clearing(node.run_dir):
        assert clear(node.run_dir, node.namespace, patience=0.0).coordinator
