"""The index dump of engines that have ended, stand still, or hand out what cannot be."""

from __future__ import annotations

import fcntl
import os
import random
import time
from contextlib import ExitStack

import pytest

from kvshm._base.ids import Epoch, Fingerprint
from kvshm._node.segment_server import FETCH_SECONDS
from kvshm._shm.layout import VERSION_OFFSET
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.segment import Segment

from .dumps import coordinator_of, engine, handing_out, put, silent_engine
from .served import AnyTable

# -- the dead, and those that do not answer


def test_of_the_dead_the_sockets_are_named_with_what_to_do(dumped, busy, capsys):
    dumped.engine("gone", 0xF).crash()
    line = "engine (epoch 000000000000000f): its process has ended; "
    assert dumped.run() == 0
    assert line + "run `kvshm clean` or start a coordinator" in capsys.readouterr().out
    assert dumped.report(engine="importer")["ended"] == []
    with coordinator_of(dumped):
        dumped.run()
        assert line + "the coordinator clears up" in capsys.readouterr().out


def test_with_no_one_alive_what_is_left_is_said_and_status_1(dumped, capsys):
    dumped.engine("gone", 0xF).crash()
    assert dumped.run() == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.splitlines() == [
        "engine (epoch 000000000000000f): its process has ended; "
        "run `kvshm clean` or start a coordinator",
        "nothing of kvshm found that is alive",
        f"no engine runs in {dumped.run_dir}",
    ]


def test_of_one_that_stands_still_the_coordinator_gives_the_table(dumped, busy, capsys):
    spec = TableSpec(dumped.namespace, "still", 8, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(0xD))
    with silent_engine(dumped, 0xD), coordinator_of(dumped, table):
        assert dumped.run() == 0
    text = capsys.readouterr().out
    assert "unreadable: engine (epoch 000000000000000d)\n    it does not answer: " in text
    assert "its table is shown by the coordinator, its replica is not" in text
    assert text.index("    still") < text.index("replica of importer")
    table.close()


def test_however_many_stand_still_the_dump_does_not(dumped, busy, capsys):
    with ExitStack() as stack:
        for epoch in range(0x10, 0x30):
            stack.enter_context(silent_engine(dumped, epoch))
        began = time.monotonic()
        assert dumped.run() == 0
        took = time.monotonic() - began
    assert took < 10 * FETCH_SECONDS  # not 32 times
    text = capsys.readouterr().out
    assert text.count("nothing of it is shown, since the coordinator has no table of it") == 32
    assert "exporter" in text


# -- what must not happen


def test_everything_is_mapped_read_only_and_nothing_changes(dumped, busy, monkeypatch):
    def contents() -> list[bytes]:
        engines = dumped.engines
        return [bytes(m._segment.buffer) for e in engines for m in (e.table, e.replica)]

    before, opened, real = contents(), [], Segment.from_fd

    def spy(name: str, fd: int, writable: bool, largest: int) -> Segment:
        opened.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
        return real(name, fd, writable, largest)

    monkeypatch.setattr(Segment, "from_fd", spy)
    dumped.run("--entries")
    assert opened == [os.O_RDONLY] * 6
    assert contents() == before


def test_half_written_and_strange_segments_are_shown_as_such(dumped, busy, capsys):
    newer = dumped.engine("newer", 3)
    put(newer.table, VERSION_OFFSET, 99)
    other = Segment.create("strange", 4096)
    with handing_out(dumped, 2, Segment.create("unfilled", 16384)), handing_out(dumped, 4, other):
        put(other, 0, 0x1234)
        put(other, VERSION_OFFSET, 1)
        assert dumped.run() == 0
        broken = dumped.report()["unreadable"]
    problems = {u["segment"].partition(f"{dumped.namespace}.")[2]: u["problem"] for u in broken}
    assert problems.keys() == {
        f"{kind}.{epoch:016x}" for kind in ("slots", "index") for epoch in (2, 4)
    } | {f"slots.{3:016x}"}
    assert problems[f"slots.{2:016x}"].startswith("SegmentNotReady")
    assert problems[f"slots.{3:016x}"].startswith("VersionMismatch")
    assert problems[f"index.{4:016x}"].startswith("CorruptSegment")
    text = capsys.readouterr().out
    assert text.count("unreadable:") == 5
    assert "exporter" in text


def test_a_contradiction_in_a_slot_is_named_and_the_rest_still_shown(dumped, busy):
    put(busy.exporter, 32768 + 64 * 2, 0xF << 28)
    found = engine(dumped.report(), "exporter")
    assert any("slot 2" in problem for problem in found["problems"])
    assert found["states"]["ready"] == 5


@pytest.mark.parametrize("seed", range(60))
def test_no_corruption_ever_makes_a_traceback(dumped, busy, seed, capsys):
    chance = random.Random(seed)
    for served in dumped.engines:
        for memory in (served.table._segment.buffer, served.replica._segment.buffer):
            for _ in range(chance.choice([1, 3, 30, 300])):
                # Mostly in the headers, which is where a wrong number leads astray.
                place = chance.randrange(chance.choice([64, 160, 8192, len(memory)]))
                memory[place] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
    for arguments in (["--entries"], ["--json", "--entries"], ["--leased"], ["--hash", "61"]):
        assert dumped.run(*arguments) in (0, 1)
