"""One /dev/shm, two pid namespaces: what the other's pids say is nothing, not death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvshm.coordinator.reaper import Reaper

from kvshm.coordinator.actions import Process
from kvshm.segment import TABLE_KIND, identity_of, is_alive, is_dead, owner_of
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import Epoch, Rank

from .engines import FakeEngine
from .processes import Node, fresh_node
from .sandbox import OWN_PIDS, skip_unless_permitted

pytestmark = pytest.mark.multiprocess

MAKE_TABLE = """
import sys
from kvshm.segment import identity_of
from kvshm.slots import SlotTable, TableSpec
table = SlotTable.create(TableSpec(sys.argv[1], "e", 8, 16, 1, bytes(32)), 77, identity_of())
table.set_life(0)
"""
SWEEP = """
import sys
from pathlib import Path
from kvshm.coordinator.reaper import Reaper
Reaper(Path(sys.argv[2]), sys.argv[1]).sweep_leftovers()
"""


@pytest.fixture
def node() -> Iterator[Node]:
    skip_unless_permitted([OWN_PIDS])
    with fresh_node() as node:
        yield node


def run_apart(node: Node, script: str) -> None:
    command = [*OWN_PIDS, sys.executable, "-c", script, node.namespace, str(node.run_dir)]
    subprocess.run(command, check=True, timeout=200)


def test_a_living_engines_table_is_not_swept_from_another_pid_namespace(node: Node) -> None:
    spec = TableSpec(node.namespace, "e", 8, 16, 1, bytes(32))
    table = SlotTable.create(spec, Epoch(77), identity_of())
    table.set_life(Rank(0))
    run_apart(node, SWEEP)
    assert node.segments(TABLE_KIND) == [table.name]
    assert table.life(Rank(0)) == table.epoch
    table.unlink()
    table.close()


def test_what_another_pid_namespace_made_outlives_every_sweep_here(node: Node) -> None:
    """Its process is dead by now, but that cannot be seen from here."""
    run_apart(node, MAKE_TABLE)
    [name] = node.segments(TABLE_KIND)
    owner = owner_of(name)
    assert not is_alive(owner)
    assert not is_dead(owner)
    reaper = Reaper(Path(node.run_dir), node.namespace)
    reaper.sweep_leftovers()
    reaper.sweep_process(Process(owner.pid, owner.start_time))  # of equal numbers, here
    assert node.segments(TABLE_KIND) == [name]
    table = SlotTable.open(name)
    assert table.life(Rank(0)) == table.epoch
    table.unlink()
    table.close()


def test_a_bit_of_another_pid_namespace_is_neither_swept_nor_handed_on(node: Node) -> None:
    first = node.coordinator()
    engine = FakeEngine(node, "living")
    engine.joined()
    first.kill()
    second = node.coordinator(python=(*OWN_PIDS, sys.executable))
    second.wait_err("event=bits-unknown .*bits=1 ")
    table = SlotTable.open(engine.started["table"], writable=False)
    assert table.life(Rank(0)) == table.epoch
    table.close()
    inside = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()[0]
    os.kill(int(inside), signal.SIGTERM)
    assert second.wait() == 0
    assert node.lease_table(), "for the engine that still holds its bit"
    third = node.coordinator()
    third.wait_err("event=serving .*bits_kept=1 bits_of_dead=0")
    engine.end()
    assert third.terminate() == 0
