"""``kvshm up`` becomes the coordinator that engines find, unless there is one."""

from __future__ import annotations

import shlex
import signal
import sys

import pytest

from . import toys
from .processes import Managed, Node, fresh_node

pytestmark = pytest.mark.multiprocess
UP = ("-P", "-m", "kvshm.tools.cli", "up", "a-model")


def up(node: Node, *options: str) -> Managed:
    where = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    return node.processes.python("up", *UP, *options, *where)


def test_the_first_one_serves_engines_and_the_next_one_only_prints() -> None:
    with fresh_node() as node:
        first = up(node)
        lines = [first.wait_out(lambda line, n=n: f"--port 800{n}" in line) for n in (1, 2)]
        for line in lines:
            variables = dict(w.split("=", 1) for w in shlex.split(line) if w.startswith("KVSHM"))
            assert variables == {
                "KVSHM_ENABLE": "1",
                "KVSHM_RUN_DIR": str(node.run_dir),
                "KVSHM_NAMESPACE": node.namespace,
            }
        engines = [toys.start(node, seed, "--peers", "1") for seed in (1, 2)]
        results = [toys.result(engine) for engine in engines]
        assert sum(result["imported"] for result in results) > 0
        second = up(node)
        assert second.wait() == 0
        second.wait_err("runs already")
        assert str(second.out) == str(first.out)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0


@pytest.mark.parametrize("form", ["systemd", "compose"])
def test_services_are_printed_and_nothing_is_started(form: str) -> None:
    with fresh_node() as node:
        printed = up(node, "--as", form)
        assert printed.wait() == 0
        assert "kvshm-coordinator" in str(printed.out)
        assert not node.sockets()


def test_a_place_of_the_environment_is_printed_too() -> None:
    with fresh_node() as node:
        place = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
        first = node.processes.start("up", sys.executable, *UP, environ=place)
        line = first.wait_out(lambda each: "--port 8001" in each)
        assert place.items() <= dict(word.split("=", 1) for word in line.split()[:4]).items()
        first.wait_err("event=serving")
        assert first.terminate() == 0
        other = node.processes.start("up", sys.executable, *UP, "--as", "compose", environ=place)
        assert other.wait() == 0
        assert str(other.out).count(node.namespace) == 3
        assert str(other.out).count(f'KVSHM_RUN_DIR: "{node.run_dir}"') == 3


@pytest.mark.parametrize("place", ["/etc/passwd", "/proc/none", "relative"])
def test_nothing_is_printed_where_no_coordinator_can_run(node: Node, place: str) -> None:
    refused = node.processes.python("up", *UP, "--run-dir", place)
    assert refused.wait() == 2
    assert str(refused.out) == ""
    refused.wait_err(place)
