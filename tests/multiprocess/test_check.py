"""dump_index --check beside engines that publish, lease and reuse all the time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm.counters import LEASES_TAKEN, PUBLISHED, RETRACTED
from kvshm.records import TICKETS_OFFSET
from kvshm.segment import TABLE_KIND
from kvshm.slots import SlotTable
from kvshm.tools.check import check

from .processes import Managed, Node, fresh_node, wait_until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

TOY = str(Path(__file__).with_name("toy_engine.py"))
CHECKS = 100
COUNTED = (PUBLISHED, RETRACTED, LEASES_TAKEN)


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        node.coordinator()
        yield node


def start(node: Node, seed: int) -> Managed:
    """A toy engine that churns until it is killed."""
    environ = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    options = ("--requests", "1000000000", "--peers", "2", "--region-bytes", "4096")
    argv = (sys.executable, TOY, "--seed", str(seed), *options)
    return node.processes.start(f"toy-{seed}", *argv, environ=environ)


def totals(node: Node) -> list[int]:
    """What all engines have published, retracted and leased so far."""
    tables = [SlotTable.open(name, writable=False) for name in node.segments(TABLE_KIND)]
    counts = [sum(table.counters.read(counter) for table in tables) for counter in COUNTED]
    for table in tables:
        table.close()
    return counts


def command_line(node: Node) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "kvshm.tools.dump_index", "--check"]
    argv += ["--namespace", node.namespace]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_a_hundred_checks_of_a_churn_give_no_false_alarm(node: Node) -> None:
    engines = [start(node, seed) for seed in (1, 2, 3)]
    wait_until(lambda: all(totals(node)), "three engines share")
    before = totals(node)
    for number in range(CHECKS):
        if number == CHECKS // 2:
            engines[2].kill()  # a death in the middle is swept, not reported
        found = check(node.namespace)
        assert found.suspects == []
        assert found.checked[TABLE_KIND] >= 2
    assert all(now > then for now, then in zip(totals(node), before, strict=True))
    assert command_line(node).stdout.startswith("sound: ")


def test_in_a_churn_a_corruption_is_found_all_the_same(node: Node) -> None:
    for seed in (1, 2, 3):
        start(node, seed)
    wait_until(lambda: all(totals(node)), "three engines share")
    name = node.segments(TABLE_KIND)[0]
    table = SlotTable.open(name)
    table._segment.buffer[TICKETS_OFFSET + 8 * 255] = 0xFF  # loads have 64 ranks at most
    found = command_line(node)
    table.close()
    assert found.returncode == 3
    assert found.stdout == f"{name}: header: ticket 255 waits for 255 ranks\n"
