"""The client against a real coordinator in a process of its own."""

from __future__ import annotations

import signal

import pytest

from .engines import FakeEngine, hear_everything
from .processes import Node, wait_until

pytestmark = pytest.mark.multiprocess


def test_while_no_one_is_there_to_hear_nothing_is_sent(node: Node) -> None:
    node.coordinator()
    alone = FakeEngine(node, "alone")
    table = alone.table()
    for block in (1, 2, 3):
        alone.do("publish", blocks=[block])
    other = FakeEngine(node, "other")
    assert other.heard("engine_joined", name="alone")["blocks"] == [1, 2, 3]
    alone.heard("engine_joined", name="other")  # by then its thread has counted
    counted = table.counters.snapshot()
    assert (counted["events_sent"], counted["events_dropped"]) == (0, 0)
    assert counted["events_unheard"] == 3
    table.close()


def test_an_engine_that_joined_unnoticed_finds_what_was_not_sent(node: Node) -> None:
    """The newcomer has scanned the table, but the engine does not know of it yet."""
    node.coordinator()
    a = FakeEngine(node, "a")
    table = a.table()
    a.joined()
    a.do("be-deaf")
    b = FakeEngine(node, "b")
    assert b.heard("engine_joined", name="a")["blocks"] == []
    a.do("publish", blocks=[5])
    a.do("hear")
    a.heard("engine_joined", name="b")
    assert b.heard("rescan")["blocks"] == [5]
    assert table.counters.snapshot()["events_sent"] == 0
    table.close()


def test_engines_may_come_before_the_coordinator(node: Node) -> None:
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    a.do("publish", blocks=[1])
    node.coordinator()
    assert b.heard("engine_joined", name="a")["blocks"] == [1]
    a.heard("engine_joined", name="b")


def test_killed_and_restarted_coordinator_costs_nothing(node: Node) -> None:
    first = node.coordinator()
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    bits = [engine.joined()["bit"] for engine in (a, b)]
    b.heard("engine_joined", name="a")
    hear_everything(node, b)
    a.do("publish", blocks=[1])
    b.heard("engine_events", blocks=[1])
    marks = [a.mark(), b.mark()]
    first.kill()
    a.do("publish", blocks=[2])  # sent to no one
    node.coordinator()
    again = [e.joined(mark)["bit"] for e, mark in zip((a, b), marks, strict=True)]
    assert again == bits
    for engine, mark in zip((a, b), marks, strict=True):
        assert engine.places(mark) == ["coordinator_lost", "joined"]
    found = b.process.wait_out(lambda line: '"blocks": [1, 2]' in line, marks[1])
    assert "engine_joined" in found or "rescan" in found
    hear_everything(node, b)
    a.do("publish", blocks=[3])
    b.heard("engine_events", marks[1], blocks=[1, 2, 3])
    table = a.table()

    def counts() -> dict[str, int]:
        return table.counters.snapshot()

    # What b has read in the table may yet have to be sent.
    wait_until(lambda: counts()["events_sent"] + counts()["events_dropped"] >= 3, "all is sent")
    counted = counts()
    # A batch that met no coordinator, or one that had yet to answer the join, was dropped; b
    # heard of its blocks all the same, by looking into a's table.
    assert counted["events_sent"] >= 1
    assert counted["events_sent"] + counted["events_dropped"] == 3
    epochs = {engine.joined()["epoch"] for engine in (a, b)}
    gone = a.all_heard("engine_gone") + b.all_heard("engine_gone")
    assert not [said for said in gone if said["epoch"] in epochs]


@pytest.mark.usefixtures("hurried")
def test_silent_coordinator_is_lost_once_and_found_again(node: Node) -> None:
    coordinator = node.coordinator()
    a = FakeEngine(node, "a")
    a.joined()
    silent = a.mark()
    coordinator.signal(signal.SIGSTOP)
    a.heard("coordinator_lost", silent)
    mark = a.mark()
    coordinator.signal(signal.SIGCONT)
    a.joined(mark)
    assert a.places(silent) == ["coordinator_lost", "joined"]


def test_an_engine_that_raises_does_not_end_the_client(node: Node) -> None:
    node.coordinator()
    a = FakeEngine(node, "a")
    a.joined()
    a.do("fail", update="EngineJoined")
    b = FakeEngine(node, "b")
    b.heard("engine_joined", name="a")
    a.process.wait_err("apply EngineJoined failed")
    hear_everything(node, b)
    a.do("publish", blocks=[1])
    b.heard("engine_events", blocks=[1])
    assert len(a.process.err.matching(lambda line: " failed (logged once" in line)) == 1


def test_forked_child_leaves_the_client_alone(node: Node) -> None:
    node.coordinator()
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    b.heard("engine_joined", name="a")
    hear_everything(node, b)
    assert a.do("fork")["status"] == 0
    a.do("publish", blocks=[1])
    assert b.heard("engine_events")["blocks"] == [1]
    epoch = a.joined()["epoch"]
    assert epoch not in [said["epoch"] for said in b.all_heard("engine_gone")]
