"""dump_index --check beside engines that publish, lease and reuse all the time."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshm._shm.layout import TICKETS_OFFSET
from kvshm._shm.segment import TABLE_KIND
from kvshm._shm.slot_table import SlotTableView
from kvshm._shm.statistics import LEASES_TAKEN, PUBLISHED, RETRACTED
from kvshm.tools.check import check

from .processes import Managed, Node, fresh_node, wait_until
from .toys import table_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

TOY = str(Path(__file__).with_name("toy_engine.py"))
CHECKS = 100
COUNTED = (PUBLISHED, RETRACTED, LEASES_TAKEN)


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        node.coordinator()
        yield node


def start(node: Node, seed: int) -> Managed:
    environ = {"KVSHM_RUN_DIR": str(node.run_dir), "KVSHM_NAMESPACE": node.namespace}
    options = ("--requests", "1000000000", "--peers", "2", "--region-bytes", "4096")
    argv = (sys.executable, TOY, "--seed", str(seed), *options)
    return node.processes.start(f"toy-{seed}", *argv, environ=environ)


def totals(tables: list[SlotTableView]) -> list[int]:
    return [sum(table.counters.read(counter) for table in tables) for counter in COUNTED]


def sharing(node: Node) -> tuple[list[Managed], list[SlotTableView]]:
    engines = [start(node, seed) for seed in (1, 2, 3)]
    tables = [table_of(node, engine) for engine in engines]
    wait_until(lambda: all(totals(tables)), "three engines share")
    return engines, tables


def command_line(node: Node) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "kvshm.tools.dump_index", "--check"]
    argv += ["--run-dir", str(node.run_dir), "--namespace", node.namespace]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_a_hundred_checks_of_a_churn_give_no_false_alarm(node: Node) -> None:
    engines, tables = sharing(node)
    done, before = 0, totals(tables[:2])
    # A churn that stands still for want of a core is checked on until it has gone on.
    while done < CHECKS or not all(map(operator.gt, totals(tables[:2]), before)):
        if done == CHECKS // 2:
            engines[2].kill()  # a death in the middle is swept, not reported
        found = check(node.run_dir, node.namespace)
        assert found.suspects == []
        assert found.checked[TABLE_KIND] >= 2
        done += 1
    assert command_line(node).stdout.startswith("sound: ")


def test_in_a_churn_a_corruption_is_found_all_the_same(node: Node) -> None:
    _, tables = sharing(node)
    with closing(node.segments.peer_table(tables[0].epoch)) as table:
        table._segment.buffer[TICKETS_OFFSET + 8 * 255] = 0xFF  # loads have 64 ranks at most
        found = command_line(node)
        name = f"kvshm.{node.namespace}.slots.{table.engine}.{table.epoch:016x}"
    assert found.returncode == 3
    assert found.stdout == f"{name}: header: ticket 255 waits for 255 ranks\n"
