"""The index dump, from real segments in this process to lines on the screen."""

from __future__ import annotations

import json
import os
import random
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshm.index import Replica
from kvshm.records import (
    LEASE_ROW_BYTES,
    LEASE_ROWS_OFFSET,
    LEASE_TABLE_BYTES,
    LEASE_TABLE_MAGIC,
    VERSION_OFFSET,
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
    write_header,
)
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit
from kvshm.tools import dump_index
from kvshm.tools.chains import tag_of
from kvshm.tools.render import render
from kvshm.tools.report import Filters, describe
from kvshm.tools.snapshot import take

DEAD = Identity(identity_of().boot_id, 2**22 + 7, 12345)  # above every pid_max


def hash_of(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"\0"))


def chain_of(*names: str) -> tuple[list[BlockRecord], bytes]:
    """Records for a chain, on blocks numbered by the first letter, and their parents."""
    records = [
        BlockRecord(hash_of(name), BlockId(ord(name[0]) - ord("a")), Generation(0), depth)
        for depth, name in enumerate(names)
    ]
    tags = [0] + [tag_of(hash_of(name)) for name in names[:-1]]
    return records, struct.pack(f"<{len(tags)}Q", *tags)


class Node:
    """Segments of a namespace of its own, all removed at the end."""

    def __init__(self) -> None:
        self.namespace = uuid.uuid4().hex

    def table(self, engine: str, epoch: int, identity: Identity | None = None) -> SlotTable:
        spec = TableSpec(
            self.namespace, engine, 26, 16, 2, Fingerprint(bytes(range(32))), "a-model"
        )
        return SlotTable.create(spec, Epoch(epoch), identity or identity_of())

    def replica(self, engine: str, epoch: int) -> Replica:
        return Replica.create(self.namespace, engine, Epoch(epoch), identity_of(), 64)

    def leases(self, owners: dict[int, tuple[int, Identity]]) -> None:
        name = segment_name(self.namespace, LEASES_KIND, "coordinator", 0)
        segment = Segment.create(name, LEASE_TABLE_BYTES)
        for bit, (epoch, (boot_id, pid, start)) in owners.items():
            row = struct.pack("<QQQ16s", epoch, pid, start, boot_id)
            offset = LEASE_ROWS_OFFSET + bit * LEASE_ROW_BYTES
            segment.buffer[offset : offset + len(row)] = row
        write_header(segment, LEASE_TABLE_MAGIC, LEASE_ROWS_OFFSET, 0, DEAD)

    def report(self, **filters: object) -> dict:
        chosen = Filters(**filters)
        spaces = describe(take(self.namespace, with_entries=True), chosen)["namespaces"]
        return spaces[0] if spaces else {}

    def run(self, *arguments: str) -> int:
        return dump_index.main(["--namespace", self.namespace, *arguments])


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for name in list_segments(made.namespace):
        os.unlink(f"/dev/shm/{name}")


@pytest.fixture
def busy(node: Node) -> SimpleNamespace:
    """An exporter of three chains, of whose blocks a living and a dead importer lease some."""
    exporter, importer = node.table("exporter", 0xA), node.table("importer", 0xB)
    crashed = node.table("crashed", 0xC, DEAD)
    for table, bit in (exporter, 0), (importer, 3), (crashed, 27):
        table.lease_bit = LeaseBit(bit)
    for rank in range(2):
        exporter.set_life(rank)
    importer.set_life(1)
    first, parents = chain_of("a", "b", "c", "d")
    exporter.publish(pack_records(first), parents)
    branch, parents = chain_of("a", "b", "x")
    exporter.publish(pack_records(branch[2:]), parents[16:])
    orphan, parents = chain_of("k", "l", "m")
    exporter.publish(pack_records(orphan[1:]), parents[8:])
    exporter.lease(LeaseBit(3), pack_records(first[:2]))
    exporter.lease(LeaseBit(27), pack_records(first[1:2]))
    exporter.retract([first[1].block_id])
    exporter.counters.add(0, 7)
    exporter.log_error("the dog ate it")
    replica = node.replica("importer", 0xB)
    row = replica.add_row(Epoch(0xA), "exporter", 26, LeaseBit(0))
    replica.apply(row, pack_records(first))
    return SimpleNamespace(exporter=exporter, importer=importer, replica=replica)


def engine(report: dict, name: str) -> dict:
    return next(found for found in report["engines"] if found["engine"] == name)


# -- the report


def test_engines_are_described(node, busy):
    found = engine(node.report(), "exporter")
    described = {name: found[name] for name in ("pid", "alive", "epoch", "model", "block_size")}
    assert described == {
        "pid": os.getpid(),
        "alive": True,
        "epoch": "000000000000000a",
        "model": "a-model",
        "block_size": 16,
    }
    assert found["fingerprint"] == bytes(range(32)).hex()
    assert found["states"] == {"empty": 19, "ready": 6, "draining": 1, "leased": 2}
    assert found["life"] == ["valid", "valid"]
    assert found["lease_bit"] == 0
    assert found["counters"] == {"published": 7}
    assert [(e["times"], e["text"]) for e in found["errors"]] == [(1, "the dog ate it")]
    assert found["problems"] == []
    assert engine(node.report(), "importer")["life"] == ["ended", "valid"]
    assert engine(node.report(), "crashed")["alive"] is False


def test_leased_blocks_have_a_reference_count_and_holders_by_name(node, busy):
    blocks = engine(node.report(), "exporter")["blocks"]
    listed = [
        (b["block_id"], b["state"], b["references"], [h["engine"] for h in b["holders"]])
        for b in blocks
    ]
    assert listed == [
        (0, "ready", 1, ["importer"]),
        (1, "draining", 2, ["importer", "crashed"]),
    ]
    assert [h["alive"] for h in blocks[1]["holders"]] == [True, False]


def test_the_lease_table_decides_who_holds_a_bit(node, busy):
    node.leases({3: (0xC, DEAD), 5: (0xEE, Identity(bytes(16), 99, 1))})
    report = node.report()
    holders = [b["holders"][0] for b in engine(report, "exporter")["blocks"]]
    assert [h["engine"] for h in holders] == ["crashed", "crashed"]
    owners = [(o["bit"], o["engine"], o["alive"]) for o in report["lease_table"]["owners"]]
    assert owners == [(3, "crashed", False), (5, None, False)]
    assert report["lease_table"]["coordinator"] == {"pid": DEAD.pid, "alive": False}


def test_of_two_engines_with_one_bit_the_living_one_holds_it(node, busy):
    node.table("before", 0xD, DEAD).lease_bit = LeaseBit(3)
    node.table("zombie", 0xE, DEAD).lease_bit = LeaseBit(3)
    blocks = engine(node.report(), "exporter")["blocks"]
    assert blocks[0]["holders"][0]["engine"] == "importer"


def test_a_bit_nobody_claims_has_an_unknown_holder(node):
    table = node.table("lonely", 1)
    records, parents = chain_of("a")
    table.publish(pack_records(records), parents)
    table.set_life(0)
    table.set_life(1)
    assert table.lease(LeaseBit(9), pack_records(records))[0] == 1
    holder = node.report()["engines"][0]["blocks"][0]["holders"][0]
    assert (holder["bit"], holder["engine"], holder["pid"]) == (9, None, None)
    assert "unknown (bit 9)" in render(describe(take(node.namespace, False), Filters()))


def test_chains_are_told_by_their_last_block_the_longest_first(node, busy):
    chains = engine(node.report(), "exporter")["chains"]
    assert [(c["tip"], c["length"], c["depth"], c["complete"]) for c in chains] == [
        (3, 4, 3, True),
        (23, 3, 2, True),
        (12, 2, 2, False),
    ]


def test_replicas_list_their_rows_and_if_asked_their_entries(node, busy):
    replica = node.report()["replicas"][0]
    assert (replica["engine"], replica["count"], replica["capacity"]) == ("importer", 4, 64)
    rows = [(r["engine"], r["epoch"], r["state"], r["entries"]) for r in replica["rows"]]
    assert rows == [("exporter", "000000000000000a", "live", 4)]
    assert replica["entries"] == []
    entries = node.report(entries=True)["replicas"][0]["entries"]
    assert sorted(e["block_id"] for e in entries) == [0, 1, 2, 3]
    assert {e["epoch"] for e in entries} == {"000000000000000a"}


def test_a_replica_that_has_grown_is_listed_once(node, busy):
    records = [
        BlockRecord(BlockHash(random.Random(i).randbytes(32)), BlockId(i), Generation(0), i)
        for i in range(200)
    ]
    row = busy.replica.add_row(Epoch(0xD), "other", 200, LeaseBit(1))
    busy.replica.apply(row, pack_records(records))
    replicas = node.report()["replicas"]
    assert [(r["count"], r["capacity"]) for r in replicas] == [(204, 256)]


# -- filters


@pytest.mark.parametrize("wanted", ["crashed", str(DEAD.pid), "000000000000000c", "0x" + "c" * 16])
def test_an_engine_is_chosen_by_name_pid_or_epoch(node, busy, wanted):
    found = [e["engine"] for e in node.report(engine=wanted)["engines"]]
    assert found == ([] if wanted.endswith("cccc") else ["crashed"])


def test_engine_filters_the_replicas_too(node, busy):
    assert node.report(engine="exporter")["replicas"] == []
    assert len(node.report(engine="importer")["replicas"]) == 1


def test_a_hash_finds_blocks_chains_and_replica_entries(node, busy):
    report = node.report(block_hash=b"d".hex())
    assert [e["engine"] for e in report["engines"]] == ["exporter"]
    assert [b["block_id"] for b in engine(report, "exporter")["blocks"]] == [3]
    assert [c["tip"] for c in engine(report, "exporter")["chains"]] == [3]
    assert [e["block_id"] for e in report["replicas"][0]["entries"]] == [3]
    assert node.report(block_hash="00")["engines"] == []


def test_a_hash_may_be_given_in_full(node, busy):
    report = node.report(block_hash=hash_of("a").hex())
    assert [b["block_id"] for b in engine(report, "exporter")["blocks"]] == [0]
    assert [e["block_id"] for e in report["replicas"][0]["entries"]] == [0]


def test_leased_shows_leased_blocks_and_nothing_else(node, busy):
    report = node.report(leased=True)
    assert [e["engine"] for e in report["engines"]] == ["exporter"]
    found = report["engines"][0]
    assert [b["block_id"] for b in found["blocks"]] == [0, 1]
    assert (found["chains"], found["counters"], found["errors"]) == ([], {}, [])
    assert report["replicas"] == []
    both = node.report(leased=True, block_hash=b"b".hex())["engines"][0]["blocks"]
    assert [b["block_id"] for b in both] == [1]


def test_entries_lists_every_block_in_use(node, busy):
    blocks = engine(node.report(entries=True), "exporter")["blocks"]
    assert [b["block_id"] for b in blocks] == [0, 1, 2, 3, 11, 12, 23]


# -- command line


def test_the_table_names_everything_that_matters(node, busy, capsys):
    node.leases({3: (0xB, identity_of())})
    assert node.run() == 0
    text = capsys.readouterr().out
    for expected in (
        f"namespace {node.namespace}",
        "exporter",
        "crashed",
        "dead",
        "000102030405",
        f"importer (pid {os.getpid()}), crashed (pid {DEAD.pid}, dead)",
        "2/2",
        "replica of importer",
        "published",
        "the dog ate it",
        "lease bits (coordinator",
    ):
        assert expected in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_json_is_the_report(node, busy, capsys):
    assert node.run("--json", "--engine", "exporter") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"namespaces": [node.report(engine="exporter")]}


def test_long_lists_of_chains_are_cut_unless_everything_is_asked_for(node, capsys):
    table = node.table("a", 1)
    for letter in "abcdefghijklmnopqrstuvwxyz":
        records, parents = chain_of(letter)
        table.publish(pack_records(records), parents)
    node.run()
    assert "and 6 shorter ones" in capsys.readouterr().out
    node.run("--entries")
    assert "shorter ones" not in capsys.readouterr().out


def test_nothing_found_is_status_1_and_said(node, busy, capsys):
    assert node.run("--engine", "nobody") == 1
    assert node.run("--hash", "ff") == 1
    assert dump_index.main(["--namespace", uuid.uuid4().hex]) == 1
    streams = capsys.readouterr()
    assert streams.err.count("nothing of kvshm found") == 3
    assert streams.out == ""
    assert dump_index.main(["--json", "--namespace", "none-such"]) == 1
    assert json.loads(capsys.readouterr().out) == {"namespaces": []}


@pytest.mark.parametrize("arguments", [["--hash", "xyz"], ["--hash", ""], ["--colour"], ["extra"]])
def test_a_wrong_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        dump_index.main(arguments)
    assert ended.value.code == 2


# -- what must not happen


def test_everything_is_mapped_read_only_and_nothing_changes(node, busy, monkeypatch):
    files = [Path(f"/dev/shm/{name}") for name in list_segments(node.namespace)]
    before = [file.read_bytes() for file in files]
    opened = []
    real = Segment.open
    monkeypatch.setattr(
        Segment, "open", lambda name, writable: opened.append(writable) or real(name, writable)
    )
    node.run("--entries")
    assert opened
    assert not any(opened)
    assert [file.read_bytes() for file in files] == before


def test_half_written_and_foreign_segments_are_shown_as_such(node, busy, capsys):
    empty = segment_name(node.namespace, "slots", "unborn", 1)
    Path(f"/dev/shm/{empty}").touch(mode=0o600)
    unfilled = segment_name(node.namespace, "index", "unfilled", 2)
    Segment.create(unfilled, 16384)
    newer = Path(f"/dev/shm/{node.table('newer', 3).name}")
    contents = bytearray(newer.read_bytes())
    contents[VERSION_OFFSET] = 99
    newer.write_bytes(contents)
    Segment.create(segment_name(node.namespace, "teapot", "strange", 4), 4096)
    assert node.run() == 0
    problems = {u["segment"].split(".")[3]: u["problem"] for u in node.report()["unreadable"]}
    assert problems["unborn"].startswith("SegmentNotReady")
    assert problems["unfilled"].startswith("SegmentNotReady")
    assert problems["newer"].startswith("VersionMismatch")
    assert "teapot" in problems["strange"]
    text = capsys.readouterr().out
    assert text.count("unreadable:") == 4
    assert "exporter" in text


def test_a_contradiction_in_a_slot_is_named_and_the_rest_still_shown(node, busy):
    path = Path(f"/dev/shm/{busy.exporter.name}")
    contents = bytearray(path.read_bytes())
    contents[8192 + 64 * 2 : 8192 + 64 * 2 + 8] = struct.pack("<Q", 0xF << 28)
    path.write_bytes(contents)
    found = engine(node.report(), "exporter")
    assert any("slot 2" in problem for problem in found["problems"])
    assert found["states"]["ready"] == 5


@pytest.mark.parametrize("seed", range(60))
def test_no_corruption_ever_makes_a_traceback(node, busy, seed, capsys):
    node.leases({3: (0xB, identity_of())})
    chance = random.Random(seed)
    for name in list_segments(node.namespace):
        path = Path(f"/dev/shm/{name}")
        contents = bytearray(path.read_bytes())
        for _ in range(chance.choice([1, 3, 30, 300])):
            # Mostly in the headers, which is where a wrong number leads astray.
            place = chance.randrange(chance.choice([64, 160, 8192, len(contents)]))
            contents[place] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        path.write_bytes(contents)
    for arguments in (["--entries"], ["--json", "--entries"], ["--leased"], ["--hash", "61"]):
        assert node.run(*arguments) in (0, 1)
