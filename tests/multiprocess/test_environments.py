"""Where people run engines: pods, run directories that cannot be used, beside others."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from kvshm._base.ids import Rank
from kvshm._base.rundir import event_endpoint, list_sockets
from kvshm._node.protocol import EngineEvents, open_broadcast
from kvshm._shm.fds import is_served

from . import toys
from .engines import FakeEngine
from .processes import PATIENCE_SECONDS, Node, wait_until
from .sandbox import OWN_PIDS, beside, fresh_tmpfs, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

OWN_TMP = fresh_tmpfs(("/tmp", "1m"))


@pytest.fixture
def namespaces() -> None:
    skip_unless_permitted([OWN_TMP, OWN_PIDS])


# -- containers (those that share nothing but the run directory: test_containers.py)


@pytest.mark.usefixtures("namespaces")
def test_one_pid_namespace_apart_from_the_hosts_is_as_good(node: Node) -> None:
    """A pod whose containers share their pids, seen from within."""
    coordinator = node.coordinator(python=(*OWN_PIDS, sys.executable))
    children = Path(f"/proc/{coordinator.pid}/task/{coordinator.pid}/children").read_text()
    inside = ("nsenter", f"--target={children.split()[0]}", "--pid", "--mount", "--")
    a, b = (FakeEngine(node, name, python=(*inside, sys.executable)) for name in "ab")
    a.heard("engine_joined", name="b")
    a.do("publish", blocks=[1])
    b.knows(1)
    for engine in (a, b):
        engine.end()


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
def test_another_user_who_took_the_name_in_tmp_parts_nobody(node: Node) -> None:
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


def test_a_default_run_directory_too_long_for_a_socket_is_refused_too(node: Node) -> None:
    runtime = node.run_dir / ("x" * 100)
    runtime.mkdir(0o700)
    environ = {"XDG_RUNTIME_DIR": str(runtime), "KVSHM_NAMESPACE": node.namespace}
    command = (sys.executable, "-P", "-m", "kvshm.coordinator")
    coordinator = node.processes.start("coordinator", *command, environ=environ)
    assert coordinator.wait() == 4
    assert re.search(
        r"socket path .* has \d+ bytes, at most 107 are possible; set KVSHM_RUN_DIR to a shorter",
        str(coordinator.err),
    )


# -- several models, several namespaces


class Eavesdropper(NamedTuple):
    listens: Callable[[], bool]
    """Waits until it hears anything, and so will hear what comes next."""
    heard: Callable[[int], Iterator[tuple[bytes, EngineEvents]]]
    """Gives the next so many broadcasts of events, whatever their topic, and what came since."""


@contextmanager
def eavesdropper(node: Node) -> Iterator[Eavesdropper]:
    patience = int(PATIENCE_SECONDS * 1000)
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(event_endpoint(node.run_dir, node.namespace))

    def heard(count: int) -> Iterator[tuple[bytes, EngineEvents]]:
        while socket.poll(patience if count > 0 else 0):
            topic, messages = open_broadcast(socket.recv())
            for broadcast in messages:
                if isinstance(broadcast, EngineEvents):
                    count -= 1
                    yield topic, broadcast

    yield Eavesdropper(lambda: bool(socket.poll(patience)), heard)
    socket.close(linger=0)
    context.term()


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


def test_no_event_crosses_from_one_model_to_the_other(node: Node) -> None:
    """Each engine hears everything of its own model and nothing of the other, on the wire."""
    node.coordinator()
    with eavesdropper(node) as (listens, heard):
        pairs = [
            [FakeEngine(node, f"{model}{i}", "--fingerprint", model) for i in (1, 2)]
            for model in ("a", "b")
        ]
        for one, two in pairs:
            one.heard("engine_joined", name=two.name)
            two.heard("engine_joined", name=one.name)
        assert listens()
        for first, (one, two) in zip((10, 20), pairs, strict=True):
            one.do("publish", blocks=[first])
            two.do("publish", blocks=[first + 1])
            two.knows(first)
            one.knows(first + 1)
        epochs = [{engine.joined()["epoch"] for engine in pair} for pair in pairs]
        for own, pair in zip(epochs, pairs, strict=True):
            for engine in pair:
                told = engine.all_heard("engine_joined") + engine.all_heard("engine_events")
                assert {said["epoch"] for said in told} <= own
        topics = {b"a": epochs[0], b"b": epochs[1]}
        events = list(heard(4))
        assert len(events) == 4
        for topic, event in events:
            assert event.epoch in topics[topic.rstrip(b"\0")]


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


def test_a_restarted_engine_shares_again_and_its_old_life_is_swept(node: Node) -> None:
    coordinator = node.coordinator()
    staying, first = toys.start(node, 1), toys.start(node, 2)
    toys.result(first)
    table = toys.table_of(node, first)
    first.kill()
    coordinator.wait_err(f"event=death .*pid={first.pid} ")
    wait_until(lambda: table.epoch not in node.sockets(), "the old socket to go")
    assert table.owner_died
    table.close()
    again = toys.start(node, 3)
    results = toys.finish([staying, again])
    assert results[1]["imported"] > 0
    assert [result["wrong"] for result in results] == [0, 0]


def test_children_forked_after_the_join_neither_use_nor_end_what_is_the_parents(
    node: Node,
) -> None:
    coordinator = node.coordinator()
    forking, other = toys.start(node, 1, "--fork"), toys.start(node, 2)
    results = [toys.result(engine) for engine in (forking, other)]
    assert forking.out.matching(lambda line: "child" in line) == ["child ended with 0"] * 2
    table = toys.table_of(node, forking)
    assert table.life(Rank(0)) == table.epoch
    assert not table.retired
    table.close()
    assert len(node.sockets()) == 2
    sockets = list_sockets(node.run_dir, node.namespace)  # of two engines and their ranks
    assert [is_served(socket.path) for socket in sockets] == [True] * 4
    assert all(result["imported"] > 0 for result in results)
    assert [(result["wrong"], result["violations"]) for result in results] == [(0, [])] * 2
    assert not coordinator.err.matching(lambda line: "event=leave" in line)
    for engine in (forking, other):
        engine.say("")
        assert engine.wait() == 0
    assert not node.sockets()
