"""The index dump of engines that have ended, stand still, or hand out what cannot be."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from kvshm.handout import FETCH_SECONDS
from kvshm.records import VERSION_OFFSET
from kvshm.segment import Segment
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import Epoch, Fingerprint

from .dumps import (
    Node,
    busy_node,
    coordinator_of,
    engine,
    fresh_node,
    handing_out,
    put,
    silent_engine,
)


@pytest.fixture
def node() -> Iterator[Node]:
    with fresh_node() as node:
        yield node


@pytest.fixture
def busy(node: Node) -> SimpleNamespace:
    return busy_node(node)


# -- the dead, and those that do not answer


def test_of_the_dead_the_sockets_are_named_with_what_to_do(node, busy, capsys):
    node.engine("gone", 0xF).crash()
    line = "engine 000000000000000f: its process has ended; "
    assert node.run() == 0
    assert line + "run `kvshm clean` or start a coordinator" in capsys.readouterr().out
    assert node.report(engine="importer")["ended"] == []
    with coordinator_of(node):
        node.run()
        assert line + "the coordinator clears up" in capsys.readouterr().out


def test_with_nobody_alive_what_is_left_is_said_and_status_1(node, capsys):
    node.engine("gone", 0xF).crash()
    assert node.run() == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.splitlines() == [
        "engine 000000000000000f: its process has ended; run `kvshm clean` or start a coordinator",
        "nothing of kvshm found that was asked for",
    ]


def test_of_one_that_stands_still_the_coordinator_gives_the_table(node, busy, capsys):
    spec = TableSpec(node.namespace, "still", 8, 16, 1, Fingerprint(bytes(32)))
    table = SlotTable.create(spec, Epoch(0xD))
    with silent_engine(node, 0xD), coordinator_of(node, table):
        assert node.run() == 0
    text = capsys.readouterr().out
    assert "unreadable: engine 000000000000000d\n    it does not answer: " in text
    assert "its table is shown by the coordinator, its replica is not" in text
    assert text.index("    still") < text.index("replica of importer")
    table.close()


def test_however_many_stand_still_the_dump_does_not(node, busy, capsys):
    with ExitStack() as stack:
        for epoch in range(0x10, 0x30):
            stack.enter_context(silent_engine(node, epoch))
        began = time.monotonic()
        assert node.run() == 0
        took = time.monotonic() - began
    assert took < 10 * FETCH_SECONDS  # not 32 times
    text = capsys.readouterr().out
    assert text.count("nothing of it is shown, since the coordinator has no table of it") == 32
    assert "exporter" in text


# -- what must not happen


def test_everything_is_mapped_read_only_and_nothing_changes(node, busy, monkeypatch):
    def contents() -> list[bytes]:
        engines = node.engines
        return [bytes(m._segment.buffer) for e in engines for m in (e.table, e.replica)]

    before, opened, real = contents(), [], Segment.of

    def spy(name: str, fd: int, writable: bool, largest: int) -> Segment:
        opened.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
        return real(name, fd, writable, largest)

    monkeypatch.setattr(Segment, "of", spy)
    node.run("--entries")
    assert opened == [os.O_RDONLY] * 6
    assert contents() == before


def test_half_written_and_strange_segments_are_shown_as_such(node, busy, capsys):
    newer = node.engine("newer", 3)
    put(newer.table, VERSION_OFFSET, 99)
    other = Segment.create("strange", 4096)
    with handing_out(node, 2, Segment.create("unfilled", 16384)), handing_out(node, 4, other):
        put(other, 0, 0x1234)
        put(other, VERSION_OFFSET, 1)
        assert node.run() == 0
        broken = node.report()["unreadable"]
    problems = {u["segment"].partition(f"{node.namespace}.")[2]: u["problem"] for u in broken}
    assert problems.keys() == {
        f"{kind}.{epoch:016x}" for kind in ("slots", "index") for epoch in (2, 4)
    } | {f"slots.{3:016x}"}
    assert problems[f"slots.{2:016x}"].startswith("SegmentNotReady")
    assert problems[f"slots.{3:016x}"].startswith("VersionMismatch")
    assert problems[f"index.{4:016x}"].startswith("CorruptSegment")
    text = capsys.readouterr().out
    assert text.count("unreadable:") == 5
    assert "exporter" in text


def test_a_contradiction_in_a_slot_is_named_and_the_rest_still_shown(node, busy):
    put(busy.exporter, 8192 + 64 * 2, 0xF << 28)
    found = engine(node.report(), "exporter")
    assert any("slot 2" in problem for problem in found["problems"])
    assert found["states"]["ready"] == 5


@pytest.mark.parametrize("seed", range(60))
def test_no_corruption_ever_makes_a_traceback(node, busy, seed, capsys):
    chance = random.Random(seed)
    for served in node.engines:
        for memory in (served.table._segment.buffer, served.replica._segment.buffer):
            for _ in range(chance.choice([1, 3, 30, 300])):
                # Mostly in the headers, which is where a wrong number leads astray.
                place = chance.randrange(chance.choice([64, 160, 8192, len(memory)]))
                memory[place] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
    for arguments in (["--entries"], ["--json", "--entries"], ["--leased"], ["--hash", "61"]):
        assert node.run(*arguments) in (0, 1)
