"""What engines and coordinators leave behind: nothing when they are ended, and after a crash
nothing that ``kvshm clean`` does not remove."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import ANY

import pytest

from kvshm._base.rundir import command_endpoint, lock_path
from kvshm._node.leftovers import clear
from kvshm._node.locks import cleanup_lock, take_lock

from .processes import Managed, Node, leave_socket, wait_until
from .sandbox import OWN_PIDS, skip_unless_permitted
from .toys import start, table_of

pytestmark = pytest.mark.multiprocess


def sharing(node: Node) -> tuple[Managed, list[Managed]]:
    coordinator = node.coordinator()
    engines = [start(node, seed) for seed in (1, 2)]
    for engine in engines:
        engine.wait_out(lambda line: line.startswith("{"))
    return coordinator, engines


def left(node: Node) -> set[str]:
    return set(os.listdir(node.run_dir))


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
    assert left(node) == set()


def test_a_crash_of_everything_is_cleaned_up_by_a_command(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, engines = sharing(node)
    coordinator.kill()  # first, or it would clear up
    for engine in engines:
        engine.kill()
    crashed = left(node)
    kinds = (".engine.", ".rank.", ".peers.", ".commands", ".events", ".tables.", ".lock")
    assert all(any(kind in name for name in crashed) for kind in kinds)
    said = clean(node, "--dry-run")
    assert said.returncode == 0
    assert len(said.stdout.splitlines()) == len(crashed) - 1  # a lock file is not worth a line
    assert left(node) == crashed
    monkeypatch.setenv("KVSHM_ROLE", "reader")  # a wrong setting of engines is no reason to refuse
    as_json = json.loads(clean(node, "--dry-run", "--json").stdout)
    would_remove = [f"would remove {path}" for path in as_json["removed"]]
    assert would_remove == said.stdout.splitlines()
    assert as_json == {"dry_run": True, "removed": ANY, "left": [], "coordinator": ""}
    assert clean(node).returncode == 0
    assert left(node) == set()
    assert clean(node).stdout == ""
    assert left(node) == set()
    clean(node, "--dry-run")
    assert left(node) == set()


def test_a_mistyped_directory_is_named_and_not_made(node: Node) -> None:
    mistyped = node.run_dir / "typo"
    reported = clean(node, "--dry-run", "--run-dir", str(mistyped))
    assert (reported.returncode, reported.stderr) == (
        0,
        f"nothing to do: there is no directory {mistyped}\n",
    )
    assert not mistyped.exists()


def names_of(engine: Managed, node: Node) -> set[str]:
    with closing(table_of(node, engine)) as table:
        epoch = f"{table.epoch:016x}"
    return {name for name in left(node) if epoch in name}


def test_what_belongs_to_the_living_stays(node: Node) -> None:
    coordinator, (dead, living) = sharing(node)
    assert "pid" in clean(node).stderr
    assert clean(node).returncode == 1, "the coordinator does that itself"
    of_dead, of_living = names_of(dead, node), names_of(living, node)
    ranks = {name for name in left(node) if ".rank." in name}
    assert [len(names) for names in (of_dead, of_living, ranks)] == [2, 2, 2]
    coordinator.kill()
    dead.kill()
    reported = clean(node)
    assert all(str(node.run_dir / name) in reported.stdout for name in of_dead)
    (rank,) = left(node) - of_living
    assert rank in ranks
    living.signal(signal.SIGTERM)
    assert living.wait() == 0
    assert left(node) == set(), "the last one clears up"


def test_who_serves_in_another_pid_namespace_is_alive(node: Node) -> None:
    """Nothing of one container is visible to another but the run directory."""
    skip_unless_permitted([OWN_PIDS])
    engine = start(node, 1, "--peers", "0", "--loads", "0")
    table_of(node, engine).close()
    before = left(node)
    script = (
        "import sys; from pathlib import Path; from kvshm._node.leftovers import clear\n"
        "print(clear(Path(sys.argv[1]), sys.argv[2]))"
    )
    command = [*OWN_PIDS, sys.executable, "-c", script, str(node.run_dir), node.namespace]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "removed=[], left=[]" in said
    assert left(node) == before


def test_a_coordinator_waits_for_an_engine_that_clears_up(node: Node) -> None:
    with cleanup_lock(node.run_dir) as held:
        assert held
        lock = take_lock(lock_path(node.run_dir, node.namespace))  # as ``clear`` does
        coordinator = node.start_coordinator()
        wait_until(lambda: _waits_for(coordinator, node.run_dir), "it waits for the lock")
        lock_path(node.run_dir, node.namespace).unlink()
        os.close(lock)
    coordinator.wait_err("event=serving")


def _waits_for(process: Managed, run_dir: Path) -> bool:
    try:
        fds = list(Path(f"/proc/{process.pid}/fd").iterdir())
        return str(run_dir) in {str(fd.readlink()) for fd in fds}
    except OSError:
        return False


def test_a_coordinator_that_has_lost_its_lock_file_keeps_its_place(node: Node) -> None:
    """A cleaning script has no other effect: not by who clears up, nor by a second coordinator."""
    coordinator, (leaving, _) = sharing(node)
    coordinator.signal(signal.SIGSTOP)  # it cannot mend it before the others have come
    wait_until(lambda: coordinator.is_stopped, "it stands still")
    lock = lock_path(node.run_dir, node.namespace)
    lock.unlink()
    leaving.signal(signal.SIGTERM)
    assert leaving.wait() == 0
    said = clean(node)
    assert (said.returncode, said.stdout) == (1, "")
    assert "another coordinator serves" in said.stderr
    second = node.start_coordinator()
    assert second.wait() == 3
    assert "another coordinator serves" in str(second.err)
    coordinator.signal(signal.SIGCONT)
    coordinator.wait_err("event=restored")
    third = node.start_coordinator()
    assert third.wait() == 3
    assert "holds" in str(third.err), "the lock that was taken again excludes it"
    start(node, 3, "--requests", "30").wait_out(lambda line: line.startswith("{"))


def test_who_loses_a_socket_to_another_coordinator_leaves_it_to_that_one(node: Node) -> None:
    coordinator = node.coordinator()
    path = Path(command_endpoint(node.run_dir, node.namespace).removeprefix("ipc://"))
    others = path.with_name("others")
    leave_socket(others)
    others.rename(path)
    assert coordinator.wait() == 1
    assert f"socket {path} was removed" in str(coordinator.err)
    assert path.exists()


def test_one_that_clears_up_gives_way_to_another(node: Node) -> None:
    with cleanup_lock(node.run_dir):
        assert clear(node.run_dir, node.namespace, patience=0.0).coordinator
