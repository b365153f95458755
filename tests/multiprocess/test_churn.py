"""Toy engines that reuse their few blocks all the time, on a real node: no wrong byte, ever.

Each request's imported blocks are compared byte for byte with what their hash says they
hold.  That the comparison can fail is shown by the built-in faults.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from .processes import Node, fresh_node, wait_until
from .toys import all_more, finish, more, result, start, table_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        node.coordinator()
        yield node


def raced(results: list[dict[str, Any]]) -> bool:
    """Whether blocks were reused while somebody copied them, and everybody compared some."""
    counted = [r["counters"] for r in results]
    reused = sum(counters.get("recheck_failed", 0) for counters in counted)
    imported = sum(r["imported"] for r in results)
    return reused > 0 and imported > 30 and all("verified" in counters for counters in counted)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_no_wrong_byte_in_a_churn_of_three(node: Node, ranks: str) -> None:
    options = ("--requests", "120", "--ranks", ranks, "--peers", "2")
    engines = [start(node, seed, *options) for seed in (1, 2, 3)]
    results = [result(engine) for engine in engines]
    while not raced(results):
        results = all_more(engines)
    finish(engines)
    assert [r["wrong"] for r in results] == [0, 0, 0]
    assert [r["violations"] for r in results] == [[], [], []]
    assert sum(r["counters"].get("mismatched", 0) for r in results) == 0


@pytest.mark.parametrize("fault", ["wrong-block", "zero", "shift"])
def test_the_comparison_sees_each_fault(node: Node, fault: str) -> None:
    good = start(node, 1, "--peers", "0", "--loads", "0")
    result(good)  # from here on its blocks stay where they are
    blind = start(node, 2, KVSHM_FAULT=fault, KVSHM_VERIFY="0", KVSHM_ROLE="consumer")
    results = finish([good, blind])
    assert results[0]["wrong"] == 0
    assert results[1]["wrong"] > 0


@pytest.mark.parametrize("fault", ["wrong-block", "zero", "shift"])
def test_verification_keeps_each_fault_out(node: Node, fault: str) -> None:
    good = start(node, 1, "--peers", "0", "--loads", "0")
    result(good)
    # Nothing arrives, and after a few failures the exporter is quarantined.
    until = ("--loads", "1", "--imported", "0", "--counted", "mismatched")
    spoilt = start(node, 2, *until, KVSHM_FAULT=fault)
    results = finish([good, spoilt])
    assert results[1]["counters"]["mismatched"] > 0
    assert results[1]["wrong"] == 0


def test_an_importer_stopped_between_copy_and_check_delivers_nothing_stale(node: Node) -> None:
    """The exporter goes on, reuses what is being read, and waits no longer than its budget."""
    exporter = start(node, 1, "--requests", "400", "--loads", "0")
    # Its peer reuses blocks sooner than news of it arrives: many of its leases are refused.
    importer = start(node, 2, "--imported", "30", KVSHM_TEST_SYNC_POINT="COPIED:stop:3")
    result(exporter)
    wait_until(lambda: importer.is_stopped, "the importer to stop")
    assert more(exporter)["counters"]["forced"] > 0
    importer.signal(signal.SIGCONT)
    stale = result(importer)
    assert stale["counters"]["recheck_failed"] > 0
    assert stale["wrong"] == 0
    for engine in (exporter, importer):
        engine.say("")
        assert engine.wait() == 0


@pytest.mark.usefixtures("hurried")  # a quarantine may have to end
@pytest.mark.parametrize("point", ["LEASED", "COPY_BEGINS", "COPIED", "PUBLISHED", "RETRACTED"])
def test_an_engine_killed_anywhere_harms_nobody(node: Node, point: str) -> None:
    """Its leases are swept, its sockets go, and the others deliver no wrong byte."""
    others = [start(node, seed, "--requests", "150") for seed in (1, 2)]
    victim = start(node, 3, "--loads", "1000000", KVSHM_TEST_SYNC_POINT=f"{point}:kill:5")
    assert victim.wait() == -signal.SIGKILL
    tables = [table_of(node, engine) for engine in others]
    wait_until(lambda: len(node.sockets()) == 2, "the dead engine's socket to go")
    wait_until(lambda: all(table.lease_bit >= 0 for table in tables), "both to have joined")
    living_bits = sum(1 << table.lease_bit for table in tables)
    for table in tables:
        assert not any(slot.leases & ~living_bits for slot in table.slots())
        table.close()
    results = finish(others)
    assert [r["wrong"] for r in results] == [0, 0]
