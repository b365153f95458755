"""A block's key is its hash and its KV cache group: in slots, in the replica, in runs, in tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvshm import _native
from kvshm._base.ids import BlockId, Epoch, Fingerprint, Generation, LeaseBit, Rank
from kvshm._base.timing import TIMING
from kvshm._engine.marks import Marks, Run, blocks_of
from kvshm._node.peers import QUARANTINE_FAILURES, Peers
from kvshm._replica.index import ApplyResult, Replica
from kvshm._replica.index_layout import tag_in_group
from kvshm._shm.layout import (
    TABLE_HEADER_BYTES,
    BlockRecord,
    RecordKind,
    SlotState,
    pack_records,
    unpack_records,
)
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.statistics import MISS_NO_OWNER, MISS_QUARANTINED
from kvshm.tools.check import check_once

from .dumps import Node, chain_of, hash_of
from .exporters import HASHES as CONTENTS
from .exporters import Clock, Make
from .replicas import HASHES, wrong_in
from .served import AnyTable
from .test_marks import PoolBlock, ready

RETRACT = RecordKind.RETRACT
LAST_GROUP = 65535


@pytest.fixture
def table() -> Iterator[AnyTable]:
    name = "t" + uuid.uuid4().hex[:10]
    spec = TableSpec(name, "e", 8, 16, 1, Fingerprint(bytes(32)), "model")
    table = AnyTable.create(spec, Epoch(7))
    table.set_life(0)
    yield table
    table.close()


def record(
    content: int, block: int, group: int, kind: RecordKind = RecordKind.PUBLISH
) -> BlockRecord:
    """As a lookup gives it, too: the depth is the place in the list that is looked up."""
    return BlockRecord(HASHES[content], BlockId(block), Generation(1), content, kind, group)


def found(replica: Replica, content: int, group: int) -> list[BlockRecord]:
    runs = replica.lookup(HASHES, content, content + 1, group=group)
    return [one for _, records in runs for one in unpack_records(records)]


# -- records and slots


@pytest.mark.parametrize("group", [0, 1, 256, LAST_GROUP])
def test_a_record_keeps_its_group(group: int) -> None:
    record = BlockRecord(HASHES[0], BlockId(3), Generation(4), 5, RETRACT, group)
    assert list(unpack_records(pack_records([record]))) == [record]


@pytest.mark.parametrize(("group", "other"), [(0, 1), (1, 0), (1, 257), (LAST_GROUP, 255)])
@pytest.mark.parametrize("bit", [0, -1])
def test_a_lease_of_another_group_fails(
    table: AnyTable, group: int, other: int, bit: LeaseBit
) -> None:
    wanted = BlockRecord(HASHES[0], BlockId(3), Generation(0), 0, group=group)
    assert table.publish(pack_records([wanted]), bytes(8)) == pack_records([wanted])
    assert table.lease(bit, pack_records([wanted._replace(group=other)]))[0] == 0
    assert table.slot(3).leases == 0
    assert table.lease(bit, pack_records([wanted]))[0] == 1
    assert table.recheck(Rank(0), pack_records([wanted])) == [True]


def test_a_group_that_no_record_can_have_is_never_leased(table: AnyTable) -> None:
    """A scan cuts it: a wrong hint."""
    wanted = pack_records([BlockRecord(HASHES[0], BlockId(0), Generation(0), 0)])
    table.publish(wanted, bytes(8))
    table._segment.buffer[TABLE_HEADER_BYTES + 58] = 1  # group 65536
    assert table.slot(0).group == 1 << 16
    assert table.scan() == wanted
    assert table.lease(LeaseBit(0), table.scan())[0] == 0


def test_scans_and_retracts_tell_the_group_of_the_last_publication(table: AnyTable) -> None:
    for group in (LAST_GROUP, 2):
        generation = table.slot(1).generation
        wanted = BlockRecord(HASHES[0], BlockId(1), generation, 0, group=group)
        table.publish(pack_records([wanted]), bytes(8))
        assert list(unpack_records(table.scan())) == [wanted]
        (retracted,) = unpack_records(table.retract([BlockId(1)])[0])
        assert retracted == wanted._replace(kind=RETRACT)


# -- the replica


def test_one_hash_in_two_groups_is_two_entries(replica: Replica, row: int) -> None:
    one, other = record(7, 1, 1), record(7, 2, 2)
    assert replica.apply(row, pack_records([one, other])) == ApplyResult(added=2)
    assert [found(replica, 7, group) for group in range(4)] == [[], [one], [other], []]
    assert replica.apply(row, pack_records([one._replace(kind=RETRACT)])).removed == 1
    assert [found(replica, 7, group) for group in (1, 2)] == [[], [other]]
    assert wrong_in(replica) == []
    assert replica.apply(row, pack_records([other._replace(kind=RETRACT)])).removed == 1
    assert replica.count == 0


def test_a_block_that_changes_its_group_leaves_no_entry_behind(replica: Replica, row: int) -> None:
    anew = record(7, 1, 2)._replace(generation=Generation(2))
    replica.apply(row, pack_records([record(7, 1, 1)]))
    assert replica.apply(row, pack_records([anew])) == ApplyResult(added=1, removed=1)
    assert [found(replica, 7, group) for group in (1, 2)] == [[], [anew]]


@pytest.mark.parametrize("group", [0, 1, LAST_GROUP])
def test_the_tag_is_what_tools_take_it_for(replica: Replica, row: int, group: int) -> None:
    replica.apply(row, pack_records([record(7, 1, group)]))
    (entry,) = replica.entries()
    assert entry.tag == tag_in_group(HASHES[7], group)
    assert (entry.tag == int.from_bytes(HASHES[7][:8], "little")) == (group == 0)


def test_what_a_scan_did_not_see_is_removed_in_its_group(replica: Replica, row: int) -> None:
    records = [record(7, 1, 1), record(7, 2, 2), record(7, 3, 0)]
    replica.apply(row, pack_records(records))
    before = replica.tombstones(row)
    replica.resync(row, before, pack_records(records[1:2]))
    assert [found(replica, 7, group) for group in (0, 1, 2)] == [[], [], records[1:2]]
    assert wrong_in(replica) == []


def test_a_stale_record_is_forgotten_in_its_group(replica: Replica, row: int) -> None:
    one, other = record(7, 1, 1), record(7, 2, 2)
    replica.apply(row, pack_records([one, other]))
    replica.forget(row, replica.rows()[0].epoch, pack_records(found(replica, 7, 1)))
    assert [found(replica, 7, group) for group in (1, 2)] == [[], [other]]


def chain_at(scale: int, blocks: int, last: int = 0) -> list[bytes]:
    """As many hashes for each block; the last of a block's is HASHES of its number."""
    fill = [b"\xff" * 32] * (scale - 1)
    return [digest for n in range(blocks) for digest in (*fill, HASHES[n])] + fill[:last]


@pytest.mark.parametrize("scale", [1, 2, 3, 8])
@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_block_s_hash_is_its_last(
    replica: Replica, row: int, scale: int, sequence: Callable[[list[bytes]], Sequence[bytes]]
) -> None:
    records = [record(n, n, 5) for n in range(40)]
    replica.apply(row, pack_records(records))
    hashes = sequence(chain_at(scale, 40, last=1))
    for start, stop in ((0, 40), (3, 30), (39, 99), (40, 41), (5, 5)):
        runs = replica.lookup(hashes, start, stop, group=5, scale=scale)
        assert b"".join(part for _, part in runs) == pack_records(records[start:stop])
    assert replica.lookup(hashes, 0, 40, scale=scale) == []
    if scale > 1:
        assert replica.lookup(hashes, 0, 40, group=5) == []


def test_a_lookup_of_no_group_or_scale_is_refused(replica: Replica) -> None:
    for group, scale in ((-1, 1), (LAST_GROUP + 1, 1), (0, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"group -?\d+, or -?\d+ hashes"):
            replica.lookup(HASHES, 0, 4, group=group, scale=scale)
    assert replica.lookup(HASHES, 0, 4, group=LAST_GROUP, scale=2**62) == []


@pytest.mark.parametrize(
    "arguments",
    [([], 0, 1), ([], 0, 1, 1, 0, 1, 0), ((), 0, 1, 1), ([], "0", 1, 1), ([], 0, 1.0, 1),
     ([], 0, 1, None), ([], 0, 1, 1, "0"), ([], 0, 1, 1, 0, "1"), ([], 1 << 63, 1, 1)],
)  # fmt: skip
def test_other_arguments_of_a_lookup_are_refused(
    replica: Replica, arguments: tuple[object, ...]
) -> None:
    with pytest.raises((TypeError, OverflowError)):
        _native.index_lookup(replica.buffer, *arguments)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError):
        _native.index_lookup(None, [], 0, 1, 1)  # type: ignore[arg-type]  # on purpose


# -- publishing


def keyed(digest: bytes, group: int) -> bytes:
    """As vLLM's make_block_hash_with_group_id has it (tests/vllm/test_private_facts.py)."""
    return digest + group.to_bytes(4, "big")


@pytest.mark.parametrize("group", [0, 1, 258, LAST_GROUP])
@pytest.mark.parametrize("scale", [1, 2])
def test_a_block_is_published_in_the_group_of_vllm_s_key(
    table: AnyTable, group: int, scale: int
) -> None:
    pool, marks = [PoolBlock(block) for block in range(8)], Marks(8)
    chain = chain_at(scale, 3)
    for index, block in enumerate((4, 2, 5)):
        pool[block].block_hash = keyed(HASHES[index], group)
    packed, _ = marks.write([pool[4], pool[2], pool[5]], 0, 3, 3)
    marks.clear([BlockId(2)])  # so that the chain has to say who the parent of 5 is
    run = Run(chain, 0, packed, scale)
    assert blocks_of([run, Run(chain, 0, packed)]) == [4, 2, 5] * 2
    records, left = table.publish_marked(marks.packed, pool, [run])
    assert (left, ready(table)) == ([], {4, 5})
    assert list(unpack_records(records)) == [
        BlockRecord(HASHES[index], BlockId(block), Generation(0), index, group=group)
        for index, block in ((0, 4), (2, 5))
    ]
    first, third = table.slot(4), table.slot(5)
    assert (first.group, third.group, first.parent_tag) == (group, group, 0)
    assert third.parent_tag == int.from_bytes(HASHES[1][:8], "little")


def test_the_parent_in_a_run_is_the_block_before_at_every_scale(table: AnyTable) -> None:
    pool, marks = [PoolBlock(block) for block in range(8)], Marks(8)
    for index in range(3):
        pool[index].block_hash = keyed(HASHES[index], 1)
    packed, _ = marks.write(pool, 0, 3, 3)
    table.publish_marked(marks.packed, pool, [(chain_at(3, 3), 0, packed, 3)])
    tags = [int.from_bytes(HASHES[index][:8], "little") for index in range(3)]
    assert [table.slot(block).parent_tag for block in range(3)] == [0, *tags[:2]]


def test_a_run_that_waits_comes_back_as_it_was_given(table: AnyTable) -> None:
    pool, marks = [PoolBlock(block) for block in range(8)], Marks(8)
    packed, _ = marks.write(pool, 0, 1, 1)
    runs = [Run(chain_at(2, 3), 0, packed, 2), Run(chain_at(1, 3), 0, packed)]
    _, left = table.publish_marked(marks.packed, pool, runs)
    assert [one is other for one, other in zip(left, runs, strict=True)] == [True, True]


def test_a_block_whose_hash_ends_beyond_the_chain_is_not_published(table: AnyTable) -> None:
    pool, marks = [PoolBlock(block) for block in range(8)], Marks(8)
    for block in pool:
        block.block_hash = keyed(HASHES[0], 0)
    packed, _ = marks.write(pool, 0, 1, 1)
    runs = [
        Run([HASHES[0]] * 5, 2, packed, 2),
        Run([HASHES[0]] * 5, 1, packed, 2**62),
        Run([HASHES[0]] * 5, 2**62, packed, 2),
    ]
    assert table.publish_marked(marks.packed, pool, runs) == (b"", [])
    for scale in (0, -1):
        with pytest.raises(ValueError, match="hashes for each block"):
            table.publish_marked(marks.packed, pool, [([HASHES[0]], 0, packed, scale)])
    assert ready(table) == set()


@pytest.mark.parametrize("group", [LAST_GROUP + 1, 1 << 24, 2**32 - 1])
def test_a_group_without_room_in_a_record_is_not_published(table: AnyTable, group: int) -> None:
    pool, marks = [PoolBlock(block) for block in range(8)], Marks(8)
    pool[0].block_hash = keyed(HASHES[0], group)
    packed, _ = marks.write(pool, 0, 1, 1)
    assert table.publish_marked(marks.packed, pool, [([HASHES[0]], 0, packed)]) == (b"", [])
    assert table.slot(0).state is SlotState.EMPTY


# -- peers and tools


def test_peers_are_asked_for_blocks_of_a_group(peers: Peers, exporter: Make, clock: Clock) -> None:
    a = exporter()
    peers.joined(a.info)
    wanted = BlockRecord(CONTENTS[4], BlockId(9), Generation(0), 4, group=3)
    peers.apply_events([(a.info.epoch, a.table.publish(pack_records([wanted]), bytes(8)))])
    chain = [digest for content in CONTENTS[:10] for digest in (b"\xff" * 32, content)]
    (run,) = peers.lookup(chain, 4, 9, group=3, scale=2)
    assert list(unpack_records(run.records)) == [wanted]
    for group, scale in ((0, 2), (3, 1), (2, 2)):
        assert peers.lookup(chain, 4, 9, group=group, scale=scale) == []
    for _ in range(QUARANTINE_FAILURES):
        peers.load_failed(Epoch(a.info.epoch))
    assert peers.why_missed(chain, 4, group=3, scale=2) is MISS_QUARANTINED
    assert peers.why_missed(chain, 4, scale=2) is MISS_NO_OWNER
    clock.now += TIMING.quarantine_seconds + 0.001
    peers.forget(Epoch(a.info.epoch), run.records)
    assert peers.lookup(chain, 4, 9, group=3, scale=2) == []


def grouped_node(dumped: Node) -> None:
    owner, peer = dumped.engine("owner", 0xA), dumped.engine("peer", 0xB)
    row = peer.replica.add_row(Epoch(0xA), "owner", 26, LeaseBit(0))
    for group in (0, 2):
        records, parents = chain_of("a", "b")
        records = [
            one._replace(block_id=BlockId(one.block_id + 10 * group), group=group)
            for one in records
        ]
        peer.replica.apply(row, owner.table.publish(pack_records(records), parents))
    gone = BlockRecord(hash_of("c"), BlockId(25), Generation(0), 2, group=2)
    peer.replica.apply(row, pack_records([gone]))
    anew = gone._replace(block_hash=hash_of("d"), depth=0)
    owner.table.publish(pack_records([anew]), bytes(8))


def test_a_dump_has_the_groups_of_blocks_chains_and_entries(dumped: Node) -> None:
    grouped_node(dumped)
    report = dumped.report(entries=True)
    (owner, _), (_, replica) = report["engines"], report["replicas"]
    assert [(b["block_id"], b["group"]) for b in owner["blocks"]] == [
        (0, 0), (1, 0), (20, 2), (21, 2), (25, 2)
    ]  # fmt: skip
    chains = [(chain["tip"], chain["length"], chain["group"]) for chain in owner["chains"]]
    assert chains == [(1, 2, 0), (21, 2, 2), (25, 1, 2)]
    reported = {e["block_id"]: (e["group"], e["hash_prefix"]) for e in replica["entries"]}
    a, b = (hash_of(name)[:8].hex() for name in "ab")
    tag = tag_in_group(hash_of("c"), 2).to_bytes(8, "little").hex()
    assert reported == {0: (0, a), 1: (0, b), 20: (2, a), 21: (2, b), 25: (None, tag)}
    found = dumped.report(block_hash=b"b".hex())["replicas"]
    assert [sorted(e["block_id"] for e in one["entries"]) for one in found] == [[1, 21]]


def test_groups_are_shown_where_there_are_others_than_0(
    dumped: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    single = dumped.engine("single", 0xC).table
    records, parents = chain_of("a", "b")
    single.publish(pack_records(records), parents)
    dumped.run("--entries")
    assert "group" not in capsys.readouterr().out
    grouped_node(dumped)
    dumped.run("--entries")
    shown = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in shown if "group" in line.split()]
    assert len(heads) == 3
    assert ["20", hash_of("a").hex()[:16], "0", "ready", "0", "2", "0", "-"] in map(
        str.split, shown
    )


def test_an_entry_of_a_group_is_sound(dumped: Node) -> None:
    grouped_node(dumped)
    assert check_once(dumped.run_dir, dumped.namespace).suspects == []
