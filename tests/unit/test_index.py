"""kvshm.index: rows, events in any order, growth, refusal, readers that follow."""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterable, Iterator

import pytest

from kvshm import index as index_module
from kvshm import segment as segments
from kvshm.errors import (
    CorruptSegment,
    IndexFull,
    SegmentExists,
    SegmentNotFound,
    SegmentTooSmall,
)
from kvshm.index import Applied, Replica
from kvshm.index_reader import ReplicaReader, Run
from kvshm.records import (
    CAPACITY_OFFSET,
    INDEX_MAGIC,
    NUM_ROWS,
    BlockRecord,
    RecordKind,
    RowState,
    pack_records,
    unpack_records,
)

PUBLISH, RETRACT = RecordKind.PUBLISH, RecordKind.RETRACT
EPOCH = 0x1122334455667788


def digest(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


HASHES = [digest(n) for n in range(4096)]


def record(block: int, generation: int = 1, kind: RecordKind = PUBLISH, content: int | None = None):
    number = block if content is None else content
    return BlockRecord(HASHES[number], block, generation, number, kind)


def packed(blocks: Iterable[int], generation: int = 1, kind: RecordKind = PUBLISH) -> bytes:
    return pack_records(record(block, generation, kind) for block in blocks)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = "t" + uuid.uuid4().hex[:10]
    yield name
    left = segments.list_segments(name)
    for leftover in left:
        segments.unlink(str(leftover))
    assert left == []


@pytest.fixture
def replica(namespace: str) -> Iterator[Replica]:
    replica = Replica.create(namespace, "b", EPOCH, segments.identity_of(), 64)
    yield replica
    assert replica.check_integrity() == []
    replica.unlink()
    replica.close()


@pytest.fixture
def row(replica: Replica) -> int:
    return replica.add_row(1, "a", 4096, 0)


def found(replica: ReplicaReader, block: int, mask: int | None = None) -> list[tuple[int, int]]:
    """(row, generation) of what a lookup of one block gives."""
    runs = replica.lookup(HASHES, block, block + 1, mask)
    return [(run.row, r.generation) for run in runs for r in unpack_records(run.records)]


# -- events


def test_a_published_prefix_is_found_as_one_run(replica: Replica, row: int) -> None:
    assert replica.apply(row, packed(range(5))) == Applied(added=5)
    assert replica.lookup(HASHES, 0, 100) == [Run(row, packed(range(5)))]
    assert replica.lookup(HASHES, 2, 4) == [Run(row, packed(range(2, 4)))]
    assert replica.lookup(HASHES, 5, 9) == []
    assert replica.lookup(tuple(HASHES), 2, 9) == replica.lookup(HASHES, 2, 9)
    assert replica.lookup((), 2, 9) == []


def test_a_lookup_ends_at_the_first_missing_block(replica: Replica, row: int) -> None:
    replica.apply(row, packed([0, 1, 3]))
    assert replica.lookup(HASHES, 0, 4) == [Run(row, packed([0, 1]))]


def test_digests_of_16_bytes_are_found_as_they_are(replica: Replica, row: int) -> None:
    short = HASHES[0][:16]
    replica.apply(row, pack_records([BlockRecord(short.ljust(32, b"\0"), 3, 1, 0)]))
    [run] = replica.lookup([short], 0, 1)
    assert next(unpack_records(run.records)).block_id == 3


def test_an_equal_tag_is_no_more_than_a_hint(replica: Replica, row: int) -> None:
    """The index keeps 8 bytes of a hash; the record repeats the hash that was asked for, so
    that the lease can compare all 32 bytes with the slot's."""
    replica.apply(row, packed([0]))
    twin = HASHES[0][:8] + bytes(24)
    [run] = replica.lookup([twin], 0, 1)
    assert next(unpack_records(run.records)).block_hash == twin


def test_a_replayed_publish_does_not_resurrect(replica: Replica, row: int) -> None:
    replica.apply(row, packed([7], 3))
    replica.apply(row, packed([7], 3, RETRACT))
    assert replica.apply(row, packed([7], 3)) == Applied(ignored=1)
    assert found(replica, 7) == []


def test_a_retract_that_overtakes_its_publish_holds(replica: Replica, row: int) -> None:
    replica.apply(row, packed([7], 3, RETRACT))
    assert replica.apply(row, packed([7], 3)) == Applied(ignored=1)
    assert found(replica, 7) == []
    assert replica.apply(row, packed([7], 4)).added == 1


def test_an_old_retract_leaves_a_newer_publish_alone(replica: Replica, row: int) -> None:
    replica.apply(row, packed([7], 5))
    assert replica.apply(row, packed([7], 4, RETRACT)) == Applied(ignored=1)
    assert found(replica, 7) == [(row, 5)]


def test_a_reused_block_replaces_its_entry_without_a_retract(replica: Replica, row: int) -> None:
    replica.apply(row, pack_records([record(7, 1, content=100)]))
    replica.apply(row, pack_records([record(7, 2, content=200)]))
    assert found(replica, 100) == []
    assert found(replica, 200) == [(row, 2)]
    assert replica.count == 1


def test_a_batch_is_one_ordered_list(replica: Replica, row: int) -> None:
    batch = [record(1, 1), record(1, 1, RETRACT), record(1, 2), record(2, 1), record(1, 1)]
    assert replica.apply(row, pack_records(batch)) == Applied(added=3, removed=1, ignored=1)
    assert (found(replica, 1), found(replica, 2)) == ([(row, 2)], [(row, 1)])


def test_generations_wrap(replica: Replica, row: int) -> None:
    """Modulo 2**32, as the slot's word counts."""
    for generation in (1, 2**31, 2**32 - 1):
        replica.apply(row, packed([1], generation))
    assert replica.apply(row, packed([1], 0)).added == 1
    assert found(replica, 1) == [(row, 0)]


def test_a_block_the_engine_does_not_have_is_refused_before_anything(replica: Replica) -> None:
    row = replica.add_row(1, "a", 10, 0)
    with pytest.raises(IndexError):
        replica.apply(row, packed([1, 10]))
    assert replica.count == 0
    with pytest.raises(ValueError, match="no whole number"):
        replica.apply(row, packed([1])[:-1])


def test_drop_is_a_retract_that_was_lost(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1, 2], 5))
    assert replica.drop(row, packed([1], 5)) == Applied(removed=1)
    assert replica.drop(row, packed([2], 4)) == Applied(ignored=1)
    assert replica.apply(row, packed([1], 5)) == Applied(ignored=1), "nor does a replay help"
    assert (found(replica, 1), found(replica, 2)) == ([], [(row, 5)])


# -- rows


def test_engines_with_equal_block_ids_never_mix(replica: Replica) -> None:
    a, b = replica.add_row(1, "a", 100, 0), replica.add_row(2, "b", 100, 1)
    replica.apply(a, pack_records([record(1, 9, content=10)]))
    replica.apply(b, pack_records([record(1, 2, content=20)]))
    assert (found(replica, 10), found(replica, 20)) == ([(a, 9)], [(b, 2)])
    replica.apply(b, pack_records([record(1, 9, RETRACT, content=10)]))
    assert (found(replica, 10), found(replica, 20)) == ([(a, 9)], [])


def test_of_several_owners_the_mask_decides(replica: Replica) -> None:
    a, b = replica.add_row(1, "a", 100, 0), replica.add_row(2, "b", 100, 1)
    replica.apply(a, packed([1], 3))
    replica.apply(b, packed([1], 4))
    assert found(replica, 1, 1 << a) == [(a, 3)]
    assert found(replica, 1, 1 << b) == [(b, 4)]
    assert found(replica, 1, 0) == []


def test_a_prefix_is_cut_into_as_few_owners_as_possible(replica: Replica) -> None:
    a, b = replica.add_row(1, "a", 100, 0), replica.add_row(2, "b", 100, 1)
    replica.apply(a, packed([0, 1, 4]))
    replica.apply(b, packed([0, 1, 2, 3]))
    assert replica.lookup(HASHES, 0, 9) == [
        Run(b, packed([0, 1, 2, 3])),
        Run(a, packed([4])),
    ]


def test_rows_say_who_they_are(replica: Replica) -> None:
    row = replica.add_row(77, "engine-" + "x" * 40, 100, 5)
    replica.apply(row, packed([1, 2, 3]))
    [shown] = replica.rows()
    assert shown == (row, 77, RowState.LIVE, 100, 3, 5, ("engine-" + "x" * 40)[:32])


def test_lookups_without_a_mask_use_live_rows_only(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1]))
    replica.set_row_state(row, RowState.SUSPECTED)
    assert replica.rows()[0].state is RowState.SUSPECTED
    assert found(replica, 1) == []
    replica.set_row_state(row, RowState.LIVE)
    assert found(replica, 1) == [(row, 1)]


def test_dropping_a_row_leaves_the_others_and_makes_room(replica: Replica) -> None:
    a, b = replica.add_row(1, "a", 100, 0), replica.add_row(2, "b", 100, 1)
    replica.apply(a, packed(range(20), 9))
    replica.apply(b, packed(range(20), 4))
    assert replica.drop_row(a) == 20
    assert replica.drop_row(a) == 0
    assert replica.lookup(HASHES, 0, 99) == [Run(b, packed(range(20), 4))]
    assert [r.epoch for r in replica.rows()] == [2]


def test_a_restarted_engine_begins_with_clean_tombstones(replica: Replica) -> None:
    """The same row may be handed on: generations of the new epoch start again."""
    old = replica.add_row(1, "a", 100, 0)
    replica.apply(old, packed([1], 50, RETRACT))
    replica.drop_row(old)
    new = replica.add_row(2, "a", 100, 0)
    assert new == old
    assert replica.apply(new, packed([1], 1)).added == 1


def test_events_of_a_dropped_row_are_ignored(replica: Replica, row: int) -> None:
    replica.drop_row(row)
    assert replica.apply(row, packed([1, 2])) == Applied(ignored=2)
    assert replica.count == 0


def test_more_engines_than_rows_are_refused(replica: Replica) -> None:
    for engine in range(NUM_ROWS):
        replica.add_row(engine + 1, str(engine), 8, -1)
    with pytest.raises(IndexFull, match="64 rows"):
        replica.add_row(100, "too many", 8, -1)
    assert {r.lease_bit for r in replica.rows()} == {-1}


# -- scans


def test_resync_removes_what_the_scan_did_not_see(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1, 2, 3], 5))
    before = replica.published(row)
    scanned = packed([2], 5) + packed([3], 6) + packed([4], 1)
    assert replica.resync(row, before, scanned) == Applied(added=2, removed=2, ignored=1)
    assert [found(replica, n) for n in (1, 2, 3, 4)] == [[], [(row, 5)], [(row, 6)], [(row, 1)]]


def test_resync_keeps_what_was_heard_during_the_scan(replica: Replica, row: int) -> None:
    """A publish that was applied after ``published`` was taken, of a block that the scan had
    passed already, and a retract of a block that the scan had still seen."""
    replica.apply(row, packed([1, 2], 5))
    before = replica.published(row)
    replica.apply(row, packed([1], 6) + packed([3], 1) + packed([2], 5, RETRACT))
    replica.resync(row, before, packed([2], 5))
    assert [found(replica, n) for n in (1, 2, 3)] == [[(row, 6)], [], [(row, 1)]]


def test_a_scan_does_not_resurrect_what_was_retracted(replica: Replica, row: int) -> None:
    scanned = packed([1], 5)
    replica.apply(row, packed([1], 5, RETRACT))
    assert replica.resync(row, {}, scanned) == Applied(ignored=1)


# -- growth and refusal


def test_a_full_index_grows_and_loses_nothing(replica: Replica) -> None:
    a, b = replica.add_row(1, "a", 4096, 0), replica.add_row(2, "b", 4096, 1)
    replica.apply(a, packed(range(10, 20), 7, RETRACT))
    small = replica.capacity
    replica.apply(b, packed(range(30), 2))
    assert replica.apply(a, packed(range(2000), 7)) == Applied(added=1990, ignored=10)
    assert replica.capacity > 2000 > small
    assert replica.lookup(HASHES, 0, 10, 1 << a) == [Run(a, packed(range(10), 7))]
    assert replica.lookup(HASHES, 20, 4096, 1 << a) == [Run(a, packed(range(20, 2000), 7))]
    assert replica.lookup(HASHES, 0, 4096, 1 << b) == [Run(b, packed(range(30), 2))]
    assert [(r.epoch, r.entries) for r in replica.rows()] == [(1, 1990), (2, 30)]


def test_growing_leaves_one_name_behind(namespace: str, replica: Replica, row: int) -> None:
    replica.apply(row, packed(range(500)))
    [name] = segments.list_segments(namespace)
    assert str(name) == replica.name
    assert (name.kind, name.revision) == ("index", 4)


def test_the_tombstones_survive_growth(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1], 5))
    replica.apply(row, packed([1], 5, RETRACT))
    replica.apply(row, packed(range(100, 500)))
    assert replica.apply(row, packed([1], 5)) == Applied(ignored=1)


def full_shared_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on no segment can be created; gives the names that were tried."""
    tried: list[str] = []

    def create(name: str, nbytes: int) -> segments.Segment:
        tried.append(name)
        raise SegmentTooSmall(f"{name} needs {nbytes} bytes, 0 available")

    monkeypatch.setattr(index_module.Segment, "create", create)
    return tried


def test_without_room_to_grow_entries_are_refused_never_raised(
    replica: Replica, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_shared_memory(monkeypatch)
    applied = replica.apply(row, packed(range(100)))
    assert applied == Applied(added=56, refused=44), "64 entries are filled to 7/8"
    assert replica.refused == 44
    assert replica.lookup(HASHES, 0, 100) == [Run(row, packed(range(56)))]


def test_a_refused_block_is_welcome_again_once_there_is_room(
    replica: Replica, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_shared_memory(monkeypatch)
    replica.apply(row, packed(range(100)))
    replica.apply(row, packed(range(10), 1, RETRACT))
    assert replica.apply(row, packed([99])).added == 1
    assert found(replica, 99) == [(row, 1)]


def test_refusals_do_not_ask_for_memory_every_time(
    replica: Replica, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = full_shared_memory(monkeypatch)
    for block in range(1000):
        replica.apply(row, packed([block]))
    assert replica.refused == 1000 - 56
    assert 1 < len(tried) < 20


def test_it_grows_after_all_when_memory_is_there_again(
    replica: Replica, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        full_shared_memory(patch)
        replica.apply(row, packed(range(100)))
    assert replica.apply(row, packed(range(200))) == Applied(added=144, ignored=56)
    replica.apply(row, packed(range(1000)))
    assert replica.count == 1000


# -- readers


def test_a_reader_started_before_the_writer_sees_the_entry(replica: Replica, row: int) -> None:
    reader = Replica.open(replica.name)
    assert found(reader, 1) == []
    replica.apply(row, packed([1]))
    assert found(reader, 1) == [(row, 1)]
    assert reader.check_integrity() == []
    reader.close()


def test_a_reader_follows_the_index_as_it_grows(replica: Replica, row: int) -> None:
    reader = Replica.open(replica.name)
    replica.apply(row, packed(range(100)))
    assert found(reader, 99) == [(row, 1)]
    replica.apply(row, packed(range(3000)))
    assert found(reader, 2999) == [(row, 1)]
    assert (reader.name, reader.capacity) == (replica.name, replica.capacity)
    reader.close()


def test_a_reader_that_comes_with_an_old_name_finds_the_newest(replica: Replica, row: int) -> None:
    first = replica.name
    replica.apply(row, packed(range(3000)))
    with pytest.raises(SegmentNotFound):
        segments.Segment.open(first, writable=False)
    reader = Replica.open(first)
    assert (reader.name, reader.count) == (replica.name, 3000)
    reader.close()


def test_a_reader_keeps_what_it_has_when_the_owner_is_swept(replica: Replica, row: int) -> None:
    reader = Replica.open(replica.name)
    replica.apply(row, packed(range(100)))
    replica.unlink()
    assert found(reader, 1) == [(row, 1)], "the old mapping; the larger one is gone"
    reader.close()


def test_the_entries_are_listed(replica: Replica, row: int) -> None:
    replica.apply(row, packed([3, 5], 9))
    listed = sorted((e.row, e.block_id, e.generation, e.depth, e.tag) for e in replica.entries())
    tags = [struct.unpack("<Q", HASHES[n][:8])[0] for n in (3, 5)]
    assert listed == [(row, 3, 9, 3, tags[0]), (row, 5, 9, 5, tags[1])]


def test_repr_tells_how_full_it_is(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1, 2]))
    assert repr(replica) == f"<Replica {replica.name} [2 of 64 entries]>"


# -- what must not be trusted


def test_a_second_replica_of_the_same_epoch_is_refused(namespace: str, replica: Replica) -> None:
    with pytest.raises(SegmentExists):
        Replica.create(namespace, "b", EPOCH, segments.identity_of(), 64)


@pytest.mark.parametrize("capacity", [0, 63, 128, 2**63])
def test_a_capacity_that_does_not_fit_is_corrupt(replica: Replica, capacity: int) -> None:
    struct.pack_into("<Q", replica._segment.buffer, CAPACITY_OFFSET, capacity)
    try:
        with pytest.raises(CorruptSegment):
            Replica.open(replica.name)
    finally:
        struct.pack_into("<Q", replica._segment.buffer, CAPACITY_OFFSET, 64)


def test_only_an_index_is_opened_as_one(namespace: str) -> None:
    name = segments.segment_name(namespace, "index", "b", 9)
    segment = segments.Segment.create(name, 8192)
    segments.write_header(segment, b"KVSHMSLT", 8192, 9, segments.identity_of())
    with pytest.raises(CorruptSegment, match=INDEX_MAGIC.decode()):
        Replica.open(name)
    with pytest.raises(SegmentNotFound, match="no name"):
        Replica.open("psm_123")
    segment.close()
    segment.unlink()


def test_after_close_writes_are_dropped_without_an_error(namespace: str) -> None:
    replica = Replica.create(namespace, "b", EPOCH, segments.identity_of(), 64)
    row = replica.add_row(1, "a", 10, 0)
    replica.unlink()
    replica.close()
    replica.close()
    assert replica.apply(row, packed([1, 2])) == Applied(ignored=2)
    replica.set_row_state(row, RowState.SUSPECTED)
    assert replica.drop_row(row) == 0


def test_check_integrity_finds_a_wrong_count_and_a_lost_entry(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1]))
    count = segments._native.load(replica._segment.buffer, 72)
    segments._native.store(replica._segment.buffer, 72, count + 1)
    assert any("2 entries counted, 1 in use" in wrong for wrong in replica.check_integrity())
    segments._native.store(replica._segment.buffer, 72, count)
    tombstones = replica._tombstones[row]
    replica._tombstones[row] = bytearray(len(tombstones))
    assert any("heard of" in wrong for wrong in replica.check_integrity())
    replica._tombstones[row] = tombstones
