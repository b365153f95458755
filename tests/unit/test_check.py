"""dump_index --check: what is sound passes, what is spoiled is found and named."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshm import _native
from kvshm._base.ids import BlockHash, BlockId, Epoch, Generation, LeaseBit, Rank
from kvshm._replica.index import Replica
from kvshm._shm.layout import (
    COUNT_OFFSET,
    ENTRY_BYTES,
    EPOCH_OFFSET,
    INDEX_HEADER_BYTES,
    LIFE_OFFSET,
    NUM_BLOCKS_OFFSET,
    ROW_BYTES,
    ROWS_OFFSET,
    SEQUENCE_OFFSET,
    SLOT_BYTES,
    TABLE_HEADER_BYTES,
    BlockRecord,
    pack_records,
)
from kvshm._shm.segment import Segment
from kvshm.tools import cli
from kvshm.tools.check import check, check_once

from ..sessions import new_namespace
from .dumps import coordinator_of, handing_out, put, silent_engine
from .served import Served, ServedNode

RECORDS = pack_records(
    BlockRecord(BlockHash(bytes([block]) * 32), BlockId(block), Generation(0), block)
    for block in range(10)
)


class Node(ServedNode):
    def __init__(self, run_dir: Path, namespace: str) -> None:
        super().__init__(run_dir, namespace)
        self.exporter, self.importer = self.engine("exporter", 0xA), self.engine("importer", 0xB)
        for bit, engine in enumerate((self.exporter, self.importer)):
            engine.table.set_lease_bit(LeaseBit(bit))
        self.table, self.index = self.exporter.table, self.importer.replica
        self.table.publish(RECORDS, bytes(80))
        self.table.lease(LeaseBit(1), RECORDS[:96])
        self.table.retract([BlockId(0)])
        row = self.index.add_row(Epoch(0xA), "exporter", 26, LeaseBit(0))
        self.index.apply(row, RECORDS)

    def engine(self, name: str, epoch: int) -> Served:
        engine = self.serve(name, epoch)
        engine.table.set_life(Rank(0))
        return engine

    def violations(self) -> list[str]:
        now = SimpleNamespace(seconds=0.0)

        def pause(seconds: float) -> None:
            now.seconds += 10 * seconds

        found = check(self.run_dir, None, lambda: now.seconds, pause).suspects
        return [str(v).removeprefix(f"kvshm.{self.namespace}.") for v in found]

    def run(self, *arguments: str) -> int:
        return cli.main(["dump", "--check", "--run-dir", str(self.run_dir), *arguments])


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        made = Node(Path(directory), new_namespace())
        with coordinator_of(made):
            yield made
        made.close()


def used_entries(index: Replica) -> list[int]:
    buffer = index._segment.buffer
    places = range(INDEX_HEADER_BYTES, buffer.nbytes, ENTRY_BYTES)
    return [at for at in places if buffer[at + 11]]  # row + 1


SLOTS, INDEX = "slots.exporter.000000000000000a", "index.importer.000000000000000b"


def slot(block: int) -> int:
    return TABLE_HEADER_BYTES + SLOT_BYTES * block


# -- what is sound


def test_a_sound_node_is_sound(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.violations() == []
    assert node.run() == 0
    assert capsys.readouterr().out == (
        "sound: 2 index, 2 slots (of shared memory; this is no health check)\n"
    )
    assert node.run("--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "checked": {"index": 2, "slots": 2},
        "violations": [],
        "warnings": [],
    }


def test_nothing_to_check_is_status_1(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.run("--namespace", "none-such") == 1
    reported = capsys.readouterr().err.splitlines()
    assert reported[0] == "nothing of kvshm found to check"
    assert [line.split(" (")[0] for line in reported[1:]] == [
        "there is engine exporter",
        "there is engine importer",
    ]


@pytest.mark.parametrize("other", ["--leased", "--entries", "--engine=a", "--hash=ff"])
def test_check_is_all_or_nothing(node: Node, other: str) -> None:
    assert node.run(other) == 2


def test_an_index_full_of_wrapping_chains_is_sound(node: Node) -> None:
    """Runs of entries that go over the end to the beginning, at every fill."""
    for block in range(10, 26):
        block_hash = BlockHash(bytes([block]) * 32)
        node.index.apply(
            0, pack_records([BlockRecord(block_hash, BlockId(block), Generation(0), 0)])
        )
        assert node.violations() == []


# -- planted corruptions: each is found, named, and nothing else is


PLANTED: dict[str, Callable[[Node], str]] = {}


def planted(plant: Callable[[Node], str]) -> Callable[[Node], str]:
    PLANTED[plant.__name__] = plant
    return plant


@planted
def an_empty_slot_with_leases(node: Node) -> str:
    put(node.table, slot(20), 0x8)
    return f"{SLOTS}: slot 20: state 0 with leases 0x8"


@planted
def a_slot_in_no_state(node: Node) -> str:
    put(node.table, slot(21), 0xF << 28)
    return f"{SLOTS}: slot 21: state 15 with leases 0x0"


@planted
def a_life_word_of_no_one(node: Node) -> str:
    put(node.table, LIFE_OFFSET, 0x77)
    return f"{SLOTS}: header: life of rank 0 is 0x77"


@planted
def another_epoch_in_the_header(node: Node) -> str:
    node.table.end_life(None)
    put(node.table, EPOCH_OFFSET, 0xC)
    said = "handed out epoch 000000000000000c, not 000000000000000a"
    called = SLOTS.replace("exporter.", "")
    return f"{called}: header: ProtocolError: {node.exporter.path} {said}"


@planted
def another_epoch_in_the_header_of_an_index(node: Node) -> str:
    put(node.index, EPOCH_OFFSET, 0xC)
    return f"{INDEX}: header: says epoch 000000000000000c; its socket does not"


@planted
def fewer_blocks_than_there_is_room_for(node: Node) -> str:
    struct.pack_into("<I", node.table._segment.buffer, NUM_BLOCKS_OFFSET, 25)
    size, has = 32768 + 25 * 72, 32768 + 26 * 72
    return f"{SLOTS}: header: says 25 blocks of 1 ranks, that is {size} bytes, of {has}"


@planted
def a_lease_no_one_holds(node: Node) -> str:
    node.table.lease(LeaseBit(9), RECORDS[96:144])
    return f"{SLOTS}: slot 2: leased by bit 9, which no engine holds"


@planted
def two_owners_of_one_bit(node: Node) -> str:
    node.engine("late", 0xD).table.set_lease_bit(LeaseBit(1))
    other = f"kvshm.{node.namespace}.slots.importer.000000000000000b"
    return f"slots.late.000000000000000d: header: claims lease bit 1, and so does {other}"


@planted
def a_count_too_many(node: Node) -> str:
    put(node.index, COUNT_OFFSET, 11)
    return f"{INDEX}: header: 11 entries counted, 10 in use"


@planted
def a_row_that_counts_wrongly(node: Node) -> str:
    put(node.index, ROWS_OFFSET + 16, 9)
    return f"{INDEX}: row 0: 9 entries counted, 10 in use"


@planted
def a_row_in_no_state(node: Node) -> str:
    struct.pack_into("<I", node.index._segment.buffer, ROWS_OFFSET + 5 * ROW_BYTES + 8, 200)
    return f"{INDEX}: row 5: there is no state 200"


@planted
def an_entry_behind_a_gap(node: Node) -> str:
    """Its tag is another now: whose search begins, and ends, elsewhere."""
    at = used_entries(node.index)[0]
    put(node.index, at, 0x123456789)
    place = (at - INDEX_HEADER_BYTES) // ENTRY_BYTES
    return f"{INDEX}: entry {place}: cannot be found by its tag"


@planted
def an_entry_of_a_block_beyond_the_row(node: Node) -> str:
    at = used_entries(node.index)[3]
    node.index._segment.buffer[at + 8] = 26
    place = (at - INDEX_HEADER_BYTES) // ENTRY_BYTES
    return f"{INDEX}: entry {place}: names block 26, its row has 26"


@planted
def two_entries_of_one_block(node: Node) -> str:
    first, second = used_entries(node.index)[:2]
    buffer = node.index._segment.buffer
    buffer[second + 8 : second + 12] = buffer[first + 8 : first + 12]
    block = int.from_bytes(buffer[first + 8 : first + 11], "little")
    return f"{INDEX}: row 0: 2 entries name block {block}"


@planted
def a_write_that_never_ended(node: Node) -> str:
    put(node.index, SEQUENCE_OFFSET, 77)
    return f"{INDEX}: header: sequence 77 is odd, a write was never ended"


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_corruption_is_found_and_named(node: Node, plant: Callable[[Node], str]) -> None:
    line = plant(node)
    assert node.violations() == [line]


def test_leases_of_the_dead_wait_for_the_next_coordinator(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.importer.crash()
    lines = [f"{SLOTS}: slot {block}: leased by bit 1, which no engine holds" for block in (0, 1)]
    assert node.violations() == lines
    with silent_engine(node, 0xE):
        assert node.run() == 0
    reported = capsys.readouterr().err
    assert "warning: engine (epoch 000000000000000e): it does not answer: " in reported
    ended = "warning: engine (epoch 000000000000000b): its process has ended; the coordinator"
    assert ended in reported


def test_what_cannot_be_read_is_a_violation(node: Node) -> None:
    with handing_out(node, 2, Segment.create("unfilled", 16384)):
        lines = node.violations()
    assert [line.partition(" has ")[0].partition(" is ")[0] for line in lines] == [
        f"{kind}.{2:016x}: header: SegmentNotReady: kvshm.{node.namespace}.{kind}.{2:016x}"
        for kind in ("slots", "index")
    ]


# -- what only looks wrong


def test_what_has_changed_at_the_second_look_is_no_violation(node: Node) -> None:
    put(node.table, slot(20), 0x8)
    assert len(check_once(node.run_dir, None).suspects) == 1

    def pause(seconds: float) -> None:
        put(node.table, slot(20), 0)

    assert check(node.run_dir, None, lambda: 0.0, pause).suspects == []


def test_a_writer_at_work_is_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    put(node.index, COUNT_OFFSET, 11)
    load, count = _native.load, iter(range(1, 1 << 30, 2))
    monkeypatch.setattr(
        _native, "load", lambda b, at: next(count) if at == SEQUENCE_OFFSET else load(b, at)
    )
    assert check_once(node.run_dir, None).suspects == []


def test_lines_and_json_name_segment_place_and_law(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    put(node.table, slot(20), 0x8)
    assert node.run() == 3
    name, law = node.table.name, "state 0 with leases 0x8"
    assert capsys.readouterr().out == f"{name}: slot 20: {law}\n"
    assert node.run("--json") == 3
    assert json.loads(capsys.readouterr().out)["violations"] == [
        {"segment": name, "place": "slot 20", "law": law}
    ]
