"""A coordinator that begins where another was: what it takes over, what it leaves alone."""

from __future__ import annotations

import pytest

from kvshm._base.ids import Rank
from kvshm._base.rundir import engine_socket

from .engines import FakeEngine
from .processes import Node, wait_until

pytestmark = pytest.mark.multiprocess


@pytest.mark.usefixtures("hurried")
def test_restart_keeps_bits_and_sweeps_those_of_engines_that_died_meanwhile(node: Node) -> None:
    first = node.coordinator()
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    bits = {engine.name: engine.joined()["bit"] for engine in (a, b)}
    assert bits["a"] != bits["b"]
    a.do("publish", blocks=[1, 2])
    b.heard("engine_joined", name="a")
    b.do("lease", epoch=a.started["epoch"])
    table, left = a.table(), engine_socket(node.run_dir, node.namespace, b.started["epoch"])
    mark = a.mark()
    first.kill()
    b.process.kill()

    second = node.coordinator()

    a.heard("coordinator_lost", mark)
    assert a.joined(mark)["bit"] == bits["a"]
    assert FakeEngine(node, "newcomer").joined()["bit"] != bits["a"]
    second.wait_err(f"event=removed path={left}")
    wait_until(
        lambda: not any(slot.leases for slot in table.slots()),
        "the dead importer's leases are swept",
    )
    a.heard("engine_gone", mark, epoch=b.joined()["epoch"])


def test_clean_end_leaves_living_engines_alone(node: Node) -> None:
    coordinator = node.coordinator()
    living, dead = FakeEngine(node, "living"), FakeEngine(node, "dead")
    living.joined()
    dead.joined()
    epochs = {engine.started["epoch"] for engine in (living, dead)}
    assert coordinator.terminate() == 0
    assert set(node.sockets()) == epochs
    dead.process.kill()
    assert node.coordinator().terminate() == 0
    assert node.sockets() == [living.started["epoch"]]
    assert living.table().is_alive(Rank(0))
