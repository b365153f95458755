"""Engines and coordinator in pid namespaces of their own, as containers have them, share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm._base.ids import Rank

from .engines import FakeEngine, hear_everything
from .processes import Managed, Node, fresh_node, lease_bits, wait_until
from .sandbox import OWN_PIDS, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

APART = (*OWN_PIDS, sys.executable)


@pytest.fixture
def node() -> Iterator[Node]:
    skip_unless_permitted([OWN_PIDS])
    with fresh_node() as node:
        yield node


def inside(outside: Managed) -> int:
    children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text("ascii")
    return int(children.split()[0])


def three(node: Node, apart: bool) -> list[FakeEngine]:
    python = APART if apart else (sys.executable,)
    exporter = FakeEngine(node, "exporter", python=python)
    exporter.joined()
    exporter.do("publish", blocks=[1, 2])
    importers = [FakeEngine(node, name, python=python) for name in ("dying", "living")]
    for importer in importers:
        assert importer.heard("engine_joined", name="exporter")["blocks"] == [1, 2]
        assert importer.do("lease", epoch=exporter.started["epoch"])["blocks"] == 2
    hear_everything(node, exporter, *importers)
    return [exporter, *importers]


def only_the_dead_is_gone(exporter: FakeEngine, dying: FakeEngine, living: FakeEngine) -> None:
    """A death of one of two that have the same number is that of one."""
    held, ended = exporter.table(), dying.table()
    bits = {engine.name: engine.joined()["bit"] for engine in (exporter, dying, living)}
    assert len({*bits.values(), -1}) == 4
    assert lease_bits(held) == 1 << bits["dying"] | 1 << bits["living"]
    dying.process.kill()
    wait_until(lambda: not ended.is_alive(Rank(0)), "the kernel has marked it")
    for engine in (exporter, living):
        gone = engine.heard("engine_gone", epoch=dying.started["epoch"])
        assert gone["reason"].endswith("died")
    wait_until(lambda: lease_bits(held) == 1 << bits["living"], "the leases of the dead are swept")
    living.do("publish", blocks=[3])
    exporter.heard("engine_events", epoch=living.started["epoch"], blocks=[3])
    for engine in (exporter, living):
        reported = [said["epoch"] for said in engine.all_heard("engine_gone")]
        assert not {exporter.started["epoch"], living.started["epoch"]} & set(reported)
    held.close()
    ended.close()


def test_a_coordinator_that_sees_no_engine_tells_them_apart(node: Node) -> None:
    """To it all of them are process 0."""
    coordinator = node.coordinator(python=APART)
    exporter, dying, living = three(node, apart=False)
    only_the_dead_is_gone(exporter, dying, living)
    mark, epoch = living.mark(), living.started["epoch"]
    living.do("new-epoch")
    again = living.joined(mark)
    exporter.heard("engine_gone", epoch=epoch, reason="left")
    assert again["bit"] not in (-1, exporter.joined()["bit"])
    os.kill(inside(coordinator), signal.SIGTERM)
    assert coordinator.wait() == 0


def test_a_coordinator_restarted_in_another_namespace_gives_everybody_his_bit(node: Node) -> None:
    first = node.coordinator()
    engines = three(node, apart=True)
    bits = [engine.joined()["bit"] for engine in engines]
    marks = [engine.mark() for engine in engines]
    held = engines[0].table()
    before = lease_bits(held)
    first.kill()
    second = node.coordinator(python=APART)
    again = [engine.joined(mark)["bit"] for engine, mark in zip(engines, marks, strict=True)]
    assert again == bits
    assert lease_bits(held) == before
    held.close()
    os.kill(inside(second), signal.SIGTERM)
    assert second.wait() == 0
