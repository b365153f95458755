"""A namespace with one engine for each lease bit, and one more, which imports without leases."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvshm import LoadState
from kvshm._base.ids import NO_LEASE_BIT
from kvshm._shm.layout import NUM_LEASE_BITS
from kvshm._shm.statistics import LEASES_TAKEN, RECHECK_FAILED

from .joined import Toy, ended
from .many_toys import KIND, import_all, prompt_of, publish
from .processes import PATIENCE_SECONDS, Managed, Node, fresh_node

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

TOGETHER = 7
"""Engines of one process, which may hold 8."""


class Full:
    """A node whose lease bits are all taken."""

    def __init__(self, node: Node) -> None:
        self.node, self.coordinator = node, node.coordinator()
        firsts = range(0, NUM_LEASE_BITS, TOGETHER)
        self.processes = [self.start(first) for first in firsts]
        self.bits = [bit for each in self.processes for bit in heard(each)]

    def start(self, first: int) -> Managed:
        place = (str(self.node.run_dir), self.node.namespace)
        module = ("-m", "tests.multiprocess.many_toys")
        numbers = (str(first), str(TOGETHER))
        return self.node.processes.python(f"toys-{first}", *module, *place, *numbers)

    def import_all(self, engines: int) -> list[dict[str, list[int]]]:
        """Have each engine import what so many engines have; returns what was wrong."""
        since = [len(each.out) for each in self.processes]
        for each in self.processes:
            each.say(str(engines))
        return [heard(*each) for each in zip(self.processes, since, strict=True)]

    def kvshm(self, *arguments: str) -> str:
        place = ("--run-dir", str(self.node.run_dir), "--namespace", self.node.namespace)
        command = [sys.executable, "-m", "kvshm.tools.cli", *arguments, *place]
        return subprocess.run(command, capture_output=True, text=True).stdout


def heard(process: Managed, since: int = 0):  # type: ignore[no-untyped-def]  # as JSON has it
    return json.loads(process.wait_out(lambda line: True, since))


@pytest.fixture(scope="module")
def full() -> Iterator[Full]:
    with fresh_node() as node:
        yield Full(node)


@pytest.fixture(scope="module")
def late(full: Full) -> Iterator[Toy]:
    """It joins when no bit is free."""
    with closing(Toy(full.node, "late", KIND, wait=PATIENCE_SECONDS)) as toy:
        publish(toy, NUM_LEASE_BITS)
        yield toy


def test_as_many_engines_as_lease_bits_share_with_each_other(full: Full) -> None:
    assert sorted(full.bits) == list(range(NUM_LEASE_BITS))
    assert full.import_all(NUM_LEASE_BITS) == [{}] * len(full.processes)


def test_one_more_shares_without_leases_and_is_named(full: Full, late: Toy) -> None:
    assert late.table.lease_bit == NO_LEASE_BIT
    full.coordinator.wait_err(r"event=no-lease-bit .*engine=late")
    (space,) = json.loads(full.kvshm("status", "--json"))["namespaces"]
    (named,) = [engine for engine in space["engines"] if engine["engine"] == "late"]
    assert "no lease bit is free" in "; ".join(named["reasons"])
    assert import_all(late, range(NUM_LEASE_BITS)) == []
    assert late.table.counters.read(LEASES_TAKEN) == 0
    assert full.import_all(NUM_LEASE_BITS + 1) == [{}] * len(full.processes)


def test_what_is_reused_under_a_copy_without_leases_is_discarded(full: Full, late: Toy) -> None:
    """For an engine with a bit the exporter would have waited."""
    with closing(Toy(full.node, "exporter", KIND, wait=PATIENCE_SECONDS)) as exporter:
        keys = prompt_of(exporter, NUM_LEASE_BITS + 1)
        exporter.compute(keys, [0])
        found = late.node.wait_for(keys, PATIENCE_SECONDS)
        with late.copies_held_up():
            load = late.node.load(found, [30])
            late.wait_until_copying()
            assert exporter.leases() == 0
            exporter.node.retract([0])
            exporter.write(0, b"others")
        assert (ended(load).state, load.failed) == (LoadState.FAILED, (30,))
    assert late.table.counters.read(RECHECK_FAILED) == 1
