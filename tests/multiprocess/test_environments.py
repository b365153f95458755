"""Where people run engines: pods, run directories that cannot be used, beside others."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile

import pytest

from . import toys
from .engines import FakeEngine
from .processes import Node, wait_until
from .sandbox import OWN_PIDS, beside, fresh_tmpfs, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

OWN_TMP = fresh_tmpfs(("/tmp", "1m"))


@pytest.fixture
def namespaces() -> None:
    skip_unless_permitted([OWN_TMP, OWN_PIDS])


# -- containers (those that share nothing but the run directory: test_containers.py)


def test_one_namespace_in_two_run_directories_is_two(node: Node) -> None:
    other = node.with_other_run_dir()
    first, second = node.coordinator(), other.coordinator()
    here, there = FakeEngine(node, "a"), FakeEngine(other, "a")
    assert here.joined()["roster"] == there.joined()["roster"] == []
    there.process.kill()
    second.wait_err("event=death engine=a")
    assert node.sockets() == [here.started["epoch"]]
    assert (first.terminate(), second.terminate()) == (0, 0)


# -- run directories


@pytest.mark.skipif(sys.prefix.startswith("/tmp/"), reason="this Python lies in /tmp itself")
@pytest.mark.usefixtures("namespaces")
def test_without_xdg_runtime_dir_all_meet_in_tmp(node: Node) -> None:
    unset = ("env", "-u", "XDG_RUNTIME_DIR", "-u", "KVSHM_RUN_DIR", "-u", "KVSHM_NAMESPACE")
    own_tmp = (*OWN_TMP, *unset, sys.executable, "-P", "-m")
    coordinator = node.processes.start("coordinator", *own_tmp, "kvshm.coordinator")
    coordinator.wait_err(f"event=serving .*run_dir=/tmp/kvshm-{os.geteuid()} namespace=default")
    second = node.processes.start(
        "second", *beside(coordinator.pid), *unset, sys.executable, "-P", "-m", "kvshm.coordinator"
    )
    assert second.wait() == 3
    assert f"pid {coordinator.pid}" in str(second.err)
    assert coordinator.terminate() == 0


@pytest.mark.skipif(sys.prefix.startswith("/tmp/"), reason="this Python lies in /tmp itself")
@pytest.mark.usefixtures("namespaces")
def test_a_name_that_another_user_took_in_tmp_parts_no_engines(node: Node) -> None:
    name = f"/tmp/kvshm-{os.geteuid()}"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        unset = ("env", "-u", "XDG_RUNTIME_DIR", "-u", "KVSHM_RUN_DIR", f"HOME={home}")
        serve = (*unset, sys.executable, "-P", "-m", "kvshm.coordinator")
        taken = ("sh", "-c", f'mkdir {name}; chown 65534 {name}; exec "$@"', "sh")
        coordinator = node.processes.start("coordinator", *OWN_TMP, *taken, *serve)
        coordinator.wait_err(f"event=serving .*run_dir={home}/.kvshm-")
        given_up = (*beside(coordinator.pid), "sh", "-c", f'rmdir {name}; exec "$@"', "sh")
        second = node.processes.start("second", *given_up, *serve)
        assert second.wait() == 3
        assert f"pid {coordinator.pid}" in str(second.err)
        assert coordinator.terminate() == 0


# -- several models, several namespaces


def test_two_models_of_two_engines_share_within_each_and_the_dump_groups_them(node: Node) -> None:
    coordinator = node.coordinator()
    engines = [toys.start(node, seed, "--model", model) for seed, model in enumerate("abab")]
    results = [toys.result(engine) for engine in engines]
    assert all(result["imported"] > 0 for result in results)
    assert [result["wrong"] for result in results] == [0, 0, 0, 0]
    coordinator.wait_err("event=cannot-share .* differs=weights")
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    dump = node.processes.python("dump", "-m", "kvshm.tools.dump_index", "--json", *place)
    assert dump.wait() == 0
    (space,) = json.loads(str(dump.out))["namespaces"]
    assert [engine["model"] for engine in space["engines"]] in (list("aabb"), list("bbaa"))
    text = node.processes.python("text", "-m", "kvshm.tools.dump_index", *place)
    assert text.wait() == 0
    groups = [set(re.findall(r" ([ab])  ", part)) for part in str(text.out).split("fingerprint ")]
    assert {"a"} in groups
    assert {"b"} in groups
    of_model = {engine["epoch"]: engine["model"] for engine in space["engines"]}
    for replica in space["replicas"]:
        known = {of_model[row["epoch"]] for row in replica["rows"]}
        assert known == {of_model[replica["epoch"]]}
    for engine in engines:
        engine.say("")
        assert engine.wait() == 0


def test_namespaces_in_one_run_directory_know_nothing_of_each_other(node: Node) -> None:
    other = node.with_other_namespace()
    coordinators = [node.coordinator(), other.coordinator()]
    here = [FakeEngine(node, name) for name in ("a", "b")]
    there = FakeEngine(other, "a")
    here[0].heard("engine_joined", name="b")
    assert there.joined()["roster"] == []
    here[1].process.kill()
    here[0].heard("engine_gone")
    wait_until(lambda: len(node.sockets()) == 1, "the dead engine's socket to go")
    coordinators[0].kill()  # what it and its engine leave is not the other's to sweep
    here[0].process.kill()
    there.process.kill()
    coordinators[1].wait_err("event=death engine=a")
    wait_until(lambda: other.sockets() == [], "the dead engine's socket to go")
    assert node.sockets() == [here[0].started["epoch"]]
    assert coordinators[1].terminate() == 0
    left = {name.partition(".")[0] for name in os.listdir(node.run_dir)}
    assert left == {node.namespace}


# -- an engine from start to end
