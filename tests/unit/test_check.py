"""dump_index --check: what is sound passes, what is spoiled is found and named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from kvshm import _native
from kvshm.index import Replica
from kvshm.records import (
    COUNT_OFFSET,
    ENTRY_BYTES,
    EPOCH_OFFSET,
    INDEX_HEADER_BYTES,
    LEASE_ROW_BYTES,
    LEASE_ROWS_OFFSET,
    LEASE_TABLE_BYTES,
    LEASE_TABLE_MAGIC,
    LIFE_OFFSET,
    NUM_BLOCKS_OFFSET,
    ROW_BYTES,
    ROWS_OFFSET,
    SEQUENCE_OFFSET,
    SLOT_BYTES,
    SUCCESSOR_OFFSET,
    TABLE_HEADER_BYTES,
    BlockRecord,
    pack_records,
)
from kvshm.segment import (
    LEASES_KIND,
    Identity,
    Segment,
    identity_of,
    list_segments,
    segment_name,
    unlink,
    write_header,
)
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit, Rank
from kvshm.tools import dump_index
from kvshm.tools.check import check, look

DEAD = Identity(identity_of().boot_id, 2**22 + 7, 12345)  # above every pid_max
RECORDS = pack_records(
    BlockRecord(BlockHash(bytes([block]) * 32), BlockId(block), Generation(0), block)
    for block in range(10)
)


class Node:
    """A namespace in which an exporter and an importer share, and nothing is wrong."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.exporter, self.importer = self.table("exporter", 0xA), self.table("importer", 0xB)
        self.exporter.publish(RECORDS, bytes(80))
        self.exporter.lease(LeaseBit(1), RECORDS[:96])
        self.exporter.retract([BlockId(0)])
        self.index = Replica.create(namespace, "importer", Epoch(0xB), identity_of(), 64)
        row = self.index.add_row(Epoch(0xA), "exporter", 26, LeaseBit(0))
        self.index.apply(row, RECORDS)
        self.leases = Segment.create(
            segment_name(namespace, LEASES_KIND, "coordinator", 0), LEASE_TABLE_BYTES
        )
        for bit, table in enumerate((self.exporter, self.importer)):
            table.lease_bit = LeaseBit(bit)
            self.own(bit, table.epoch, identity_of())
        write_header(self.leases, LEASE_TABLE_MAGIC, LEASE_ROWS_OFFSET, 0, identity_of())

    def table(self, engine: str, epoch: int, identity: Identity | None = None) -> SlotTable:
        spec = TableSpec(self.namespace, engine, 26, 16, 1, Fingerprint(bytes(32)))
        table = SlotTable.create(spec, Epoch(epoch), identity or identity_of())
        table.set_life(Rank(0))
        return table

    def own(self, bit: int, epoch: int, identity: Identity) -> None:
        boot_id, pid, start_time = identity
        row = struct.pack("<QQQ16s", epoch, pid, start_time, boot_id)
        offset = LEASE_ROWS_OFFSET + bit * LEASE_ROW_BYTES
        self.leases.buffer[offset : offset + len(row)] = row

    def violations(self) -> list[str]:
        """What is wrong, without the names' common parts; time passes in no time."""
        now = SimpleNamespace(seconds=0.0)

        def pause(seconds: float) -> None:
            now.seconds += 10 * seconds

        found = check(self.namespace, lambda: now.seconds, pause).suspects
        return [str(v).removeprefix(f"kvshm.{self.namespace}.") for v in found]

    def run(self, *arguments: str) -> int:
        return dump_index.main(["--check", "--namespace", self.namespace, *arguments])


@pytest.fixture
def node(namespace: str) -> Iterator[Node]:
    yield Node(namespace)
    for name in list_segments(namespace):
        unlink(str(name))


def used_entries(index: Replica) -> list[int]:
    buffer = index._segment.buffer
    places = range(INDEX_HEADER_BYTES, buffer.nbytes, ENTRY_BYTES)
    return [at for at in places if struct.unpack_from("<I", buffer, at + 16)[0]]


def put(segment: Segment | SlotTable | Replica, offset: int, value: int) -> None:
    memory = segment if isinstance(segment, Segment) else segment._segment
    _native.store(memory.buffer, offset, value)


SLOTS, INDEX = "slots.exporter.000000000000000a", "index.importer.000000000000000b"
LEASES = "leases.coordinator.0000000000000000"


def slot(block: int) -> int:
    return TABLE_HEADER_BYTES + SLOT_BYTES * block


# -- what is sound


def test_a_sound_node_is_sound(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.violations() == []
    assert node.run() == 0
    assert capsys.readouterr().out == "sound: 1 index, 1 leases, 2 slots\n"
    assert node.run("--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "checked": {"index": 1, "leases": 1, "slots": 2},
        "violations": [],
        "warnings": [],
    }


def test_nothing_to_check_is_status_1(namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dump_index.main(["--check", "--namespace", namespace]) == 1
    assert "nothing of kvshm found" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--leased", "--entries", "--engine=a", "--hash=ff"])
def test_check_is_all_or_nothing(node: Node, other: str) -> None:
    with pytest.raises(SystemExit) as ended:
        node.run(other)
    assert ended.value.code == 2


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
    """A corruption; returns the line it must make."""
    PLANTED[plant.__name__] = plant
    return plant


@planted
def an_empty_slot_with_leases(node: Node) -> str:
    put(node.exporter, slot(20), 0x8)
    return f"{SLOTS}: slot 20: state 0 with leases 0x8"


@planted
def a_slot_in_no_state(node: Node) -> str:
    put(node.exporter, slot(21), 0xF << 28)
    return f"{SLOTS}: slot 21: state 15 with leases 0x0"


@planted
def a_life_word_of_nobody(node: Node) -> str:
    put(node.exporter, LIFE_OFFSET, 0x77)
    return f"{SLOTS}: header: life of rank 0 is 0x77"


@planted
def another_epoch_in_the_header(node: Node) -> str:
    node.exporter.end_life(None)
    put(node.exporter, EPOCH_OFFSET, 0xC)
    said = "says epoch 000000000000000c, engine 'exporter'"
    return f"{SLOTS}: header: {said}; its name does not"


@planted
def fewer_blocks_than_there_is_room_for(node: Node) -> str:
    struct.pack_into("<I", node.exporter._segment.buffer, NUM_BLOCKS_OFFSET, 25)
    size, has = 8192 + 25 * 72, 8192 + 26 * 72
    return f"{SLOTS}: header: says 25 blocks of 1 ranks, that is {size} bytes, of {has}"


@planted
def a_lease_nobody_holds(node: Node) -> str:
    node.exporter.lease(LeaseBit(9), RECORDS[96:144])
    return f"{SLOTS}: slot 2: leased by bit 9, which nobody holds"


@planted
def one_owner_of_two_bits(node: Node) -> str:
    node.own(5, 0xB, identity_of())
    return f"{LEASES}: bit 5: held by epoch {0xB:016x}, which holds bit 1, too"


@planted
def a_dead_owner_of_a_bit(node: Node) -> str:
    node.own(7, 0xD, DEAD)
    return f"{LEASES}: bit 7: held by pid {DEAD.pid}, which is dead"


@planted
def a_bit_that_the_lease_table_gives_to_another(node: Node) -> str:
    node.exporter.lease_bit = LeaseBit(3)
    return f"{SLOTS}: header: claims lease bit 3, which the lease table does not give it"


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
    struct.pack_into("<I", node.index._segment.buffer, at + 8, 26)
    place = (at - INDEX_HEADER_BYTES) // ENTRY_BYTES
    return f"{INDEX}: entry {place}: names block 26, its row has 26"


@planted
def two_entries_of_one_block(node: Node) -> str:
    first, second = used_entries(node.index)[:2]
    buffer = node.index._segment.buffer
    block = struct.unpack_from("<I", buffer, first + 8)[0]
    struct.pack_into("<I", buffer, second + 8, block)
    return f"{INDEX}: row 0: 2 entries name block {block}"


@planted
def a_write_that_never_ended(node: Node) -> str:
    put(node.index, SEQUENCE_OFFSET, 77)
    return f"{INDEX}: header: sequence 77 is odd, a write was never ended"


@planted
def an_index_replaced_that_is_still_there(node: Node) -> str:
    put(node.index, SUCCESSOR_OFFSET, 4)
    return f"{INDEX}: header: is replaced by revision 4, but keeps its name"


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_corruption_is_found_and_named(node: Node, plant: Callable[[Node], str]) -> None:
    line = plant(node)
    assert node.violations() == [line]


def test_what_a_dead_engine_left_is_reported(node: Node) -> None:
    dead = node.table("crashed", 0xD, DEAD)
    dead.publish(RECORDS[:96], bytes(16))
    table = "slots.crashed.000000000000000d"
    assert node.violations() == [
        f"{table}: header: life of rank 0 goes on, but its engine (pid {DEAD.pid}) is dead",
        f"{table}: slot 0: READY, but its engine (pid {DEAD.pid}) is dead",
        f"{table}: slot 1: READY, but its engine (pid {DEAD.pid}) is dead",
    ]


def test_leases_of_the_dead_may_wait_for_the_next_coordinator(node: Node) -> None:
    node.own(1, 0xB, DEAD)
    node.importer.retire()
    write_header(node.leases, LEASE_TABLE_MAGIC, LEASE_ROWS_OFFSET, 0, DEAD)
    assert node.violations() == []
    write_header(node.leases, LEASE_TABLE_MAGIC, LEASE_ROWS_OFFSET, 0, identity_of())
    dead = f"whose holder (pid {DEAD.pid}) is dead"
    assert node.violations() == [
        f"{LEASES}: bit 1: held by pid {DEAD.pid}, which is dead",
        f"{SLOTS}: slot 0: leased by bit 1, {dead}",
        f"{SLOTS}: slot 1: leased by bit 1, {dead}",
    ]


def test_an_unreadable_segment_and_a_strange_one_are_violations(node: Node) -> None:
    Segment.create(segment_name(node.namespace, "index", "unborn", 2), 16384).close()
    Segment.create(segment_name(node.namespace, "teapot", "strange", 4), 4096).close()
    first, second = node.violations()
    assert first.startswith("index.unborn.0000000000000002: header: SegmentNotReady: ")
    assert second == (
        "teapot.strange.0000000000000004: name: kind 'teapot' is unknown to this kvshm"
    )


# -- what only looks wrong


def test_what_has_changed_at_the_second_look_is_no_violation(node: Node) -> None:
    put(node.exporter, slot(20), 0x8)
    assert len(look(node.namespace).suspects) == 1

    def pause(seconds: float) -> None:
        put(node.exporter, slot(20), 0)

    assert check(node.namespace, lambda: 0.0, pause).suspects == []


def test_a_writer_at_work_is_waited_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence is odd at every look, but never the same: nothing is said."""
    put(node.index, COUNT_OFFSET, 11)
    load, count = _native.load, iter(range(1, 1 << 30, 2))
    monkeypatch.setattr(
        _native, "load", lambda b, at: next(count) if at == SEQUENCE_OFFSET else load(b, at)
    )
    assert look(node.namespace).suspects == []


def test_lines_and_json_name_segment_place_and_law(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    put(node.exporter, slot(20), 0x8)
    assert node.run() == 3
    name, law = node.exporter.name, "state 0 with leases 0x8"
    assert capsys.readouterr().out == f"{name}: slot 20: {law}\n"
    assert node.run("--json") == 3
    assert json.loads(capsys.readouterr().out)["violations"] == [
        {"segment": name, "place": "slot 20", "law": law}
    ]
