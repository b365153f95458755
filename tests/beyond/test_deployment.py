"""The scripts of deploy/beyond-one-machine, as they stand: what they start ends together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from local_node import free_port

from ..multiprocess.joined import Toys
from ..multiprocess.keepers import imports, kvshm, prompt
from ..multiprocess.processes import Managed, Node, fresh_node, wait_until
from ..multiprocess.store_world import Engine
from .store import MOONCAKE

pytestmark = [pytest.mark.beyond, pytest.mark.timeout(600)]

DEPLOY = Path(__file__).parents[2] / "deploy/beyond-one-machine"
MEMORY = 4 << 20
ENDED_SECONDS = 30.0
"""A third of what Mooncake's library takes to give up."""


class Scripts:
    """A store and a node on this machine."""

    def __init__(self, node: Node) -> None:
        self.node, self.port = node, free_port()
        self._started: list[Managed] = []
        path = (str(MOONCAKE / "mooncake"), str(Path(sys.executable).parent), os.environ["PATH"])
        self._environ = {
            "PATH": ":".join(path),
            "PYTHONPATH": ":".join((str(MOONCAKE), os.environ.get("PYTHONPATH", ""))),
            "KVSHM_RUN_DIR": str(node.run_dir),
            "KVSHM_NAMESPACE": node.namespace,
            "MASTER_PORT": str(self.port),
            "METRICS_PORT": str(free_port()),
            "MEMORY_PORT": str(free_port()),
        }

    def _start(self, script: str, *arguments: str) -> Managed:
        command = str(DEPLOY / script)
        started = self.node.processes.start(script, command, *arguments, environ=self._environ)
        self._started.append(started)
        return started

    def close(self) -> None:
        """A script that is killed leaves what it has started."""
        for each in reversed(self._started):
            each.terminate()

    def store(self) -> Managed:
        store = self._start("store.sh", "127.0.0.1", "64MB")
        store.wait_out(lambda line: line == f"store at 127.0.0.1:{self.port}")
        return store

    def kvshm(self, says: str = "connected to the store") -> Managed:
        started = self._start("node.sh", f"127.0.0.1:{self.port}", str(MEMORY))
        started.wait_out(lambda line: line.startswith(says))
        return started


@pytest.fixture
def scripts() -> Iterator[Scripts]:
    with fresh_node() as node, closing(Scripts(node)) as scripts:
        yield scripts


def children(process: Managed) -> list[int]:
    """In the order in which they were started."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


def test_what_the_keeper_of_a_node_has_written_comes_back_to_the_next(scripts: Scripts) -> None:
    scripts.store()
    node = scripts.kvshm()
    with closing(Toys(scripts.node, "k")) as toys, closing(Engine(toys.join("a"))) as a:
        keys = prompt(a.toy, b"1")
        a.toy.compute(keys, range(6))
        wait_until(lambda: counted(scripts.node, "store_written_blocks") == 6, "they are written")
        a.toy.node.retract(range(6))
        node.terminate()
        scripts.kvshm()
        a.wait_until_served()
        assert a.length(keys) == 6
        imports(a.toy, keys)


@pytest.mark.parametrize("fault", ["missing", "stopped"])
def test_a_keeper_goes_on_without_a_store_and_uses_it_when_it_is_there(
    scripts: Scripts, fault: str
) -> None:
    """Mooncake's library has all threads of its process stand still while it tries for minutes."""
    master: list[int] = []
    if fault == "stopped":
        master = children(scripts.store())[:1]
        os.kill(master[0], signal.SIGSTOP)
    try:
        node = scripts.kvshm("the store does not answer")
        with closing(Toys(scripts.node, "k")) as toys, closing(Engine(toys.join("a"))) as a:
            keys = prompt(a.toy, b"1")
            a.toy.compute(keys, range(6))
            node.wait_out(lambda line: line.startswith("keeping blocks"))
            imports(a.toy, keys)
            if fault == "missing":
                scripts.store()
            else:
                os.kill(master[0], signal.SIGCONT)
            node.wait_out(lambda line: line == "connected to the store")
            wait_until(lambda: counted(scripts.node, "store_written_blocks") == 6, "all is written")
    finally:
        for pid in master:
            os.kill(pid, signal.SIGCONT)


def test_a_keeper_ends_while_it_waits_for_a_store(scripts: Scripts) -> None:
    node = scripts.kvshm("the store does not answer")
    begun = time.monotonic()
    node.terminate()
    assert time.monotonic() - begun < ENDED_SECONDS


@pytest.mark.parametrize("script", ["store", "kvshm"])
@pytest.mark.parametrize("lost", [0, 1])
def test_one_that_is_lost_takes_the_other_with_it(scripts: Scripts, script: str, lost: int) -> None:
    store = scripts.store()
    process = store if script == "store" else scripts.kvshm()
    pids = children(process)
    assert len(pids) == 2
    os.kill(pids[lost], signal.SIGKILL)
    assert process.wait() > 0
    assert not any(map(lives, pids))


@pytest.mark.parametrize("script", ["store", "kvshm"])
def test_both_end_with_the_script(scripts: Scripts, script: str) -> None:
    store = scripts.store()
    process = store if script == "store" else scripts.kvshm()
    pids = children(process)
    process.terminate()
    assert not any(map(lives, pids))


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def counted(node: Node, name: str) -> int:
    page = kvshm(node, "metrics").stdout.splitlines()
    found = [line for line in page if line.startswith(f"kvshm_{name}_total{{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in found)
