"""Containers that share one directory and nothing else: no pid, no /dev/shm, not even its path."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm._node.leftovers import clear
from kvshm.tools.check import check

from .processes import Managed, Node, fresh_node, wait_until
from .sandbox import Command, skip_unless_permitted
from .toys import more, result, start

pytestmark = pytest.mark.multiprocess

APART = "unshare --pid --ipc --net --uts --mount --fork --kill-child --mount-proc"
INSIDE = """
mount -t tmpfs -o size=1m tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
mkdir /mnt/{place}
mount --bind {run_dir} /mnt/{place}
exec "$@"
"""


def container(run_dir: Path | str, place: str) -> Command:
    script = " && ".join(INSIDE.format(run_dir=run_dir, place=place).split("\n")[1:-1])
    return (*APART.split(), "sh", "-c", script, "sh")


@pytest.fixture
def node() -> Iterator[Node]:
    skip_unless_permitted([container("/tmp", "x")])
    with fresh_node() as node:
        yield node


def engine(node: Node, seed: int, *options: str, peers: int = 1) -> Managed:
    place = f"of-{seed}"
    python = (*container(node.run_dir, place), sys.executable)
    argv = ("--requests", "300", "--peers", str(peers), *options)
    return start(node, seed, *argv, python=python, KVSHM_RUN_DIR=f"/mnt/{place}")


def coordinator(node: Node) -> Managed:
    """In a container of its own, too."""
    python = (*container(node.run_dir, "coordinator"), sys.executable)
    started = node.start_coordinator("--run-dir", "/mnt/coordinator", python=python)
    started.wait_err("event=serving")
    return started


def inside(container: Managed) -> int:
    children = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text("ascii")
    return int(children.split()[0])


def test_engines_share_across_containers_and_a_death_in_one_is_seen(node: Node) -> None:
    serving = coordinator(node)
    first, second = (engine(node, seed, "--ranks", "2") for seed in (1, 2))
    for outcome in map(result, (first, second)):
        assert outcome["wrong"] == 0
        assert outcome["violations"] == []
        assert outcome["imported"] > 0
        assert outcome["pid"] <= 10, "its own pid namespace: all of them are about process 1"
    found = check(node.run_dir, node.namespace)
    assert (found.checked, found.suspects, found.warnings) == ({"slots": 2, "index": 2}, [], [])
    assert clear(node.run_dir, node.namespace).coordinator, "it is seen to run"
    assert len(node.sockets()) == 2
    first.kill()
    serving.wait_err("event=death")
    assert more(second)["wrong"] == 0


def test_a_death_in_a_container_is_seen_in_the_others_without_a_coordinator(node: Node) -> None:
    ending = coordinator(node)
    first, second, third = (engine(node, seed, peers=2) for seed in (1, 2, 3))
    for outcome in map(result, (first, second, third)):
        assert outcome["wrong"] == 0
    ending.signal(signal.SIGKILL)
    first.kill()
    second.wait_err("has died")
    third.wait_err("has died")
    assert more(second)["wrong"] == 0
    again = coordinator(node)
    again.wait_err("event=join", since=0)
    wait_until(lambda: str(again.err).count("event=join") == 2, "both that live to come back")
    assert more(third)["wrong"] == 0
