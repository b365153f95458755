"""kvshm._replica.index: growth, refusal, readers beside it, and what is not trusted."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import pytest

from kvshm import _native
from kvshm._replica.index import ApplyResult, Replica
from kvshm._replica.index_check import violations
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm import segment as segments
from kvshm._shm.layout import (
    CAPACITY_OFFSET,
    ENTRY_BYTES,
    ENTRY_ROW_SHIFT,
    INDEX_HEADER_BYTES,
    INDEX_MAGIC,
    RowState,
)
from kvshm._shm.segment import Header
from kvshm.errors import CorruptSegment, SegmentError, SegmentTooSmall

from .replicas import HASHES, OWN_EPOCH, RETRACT, found, packed, wrong_in
from .served import read_again

# -- growth and refusal


def test_a_full_index_grows_and_loses_nothing(replica: Replica) -> None:
    a, b = replica.add_row(1, "a", 4096, 0), replica.add_row(2, "b", 4096, 1)
    replica.apply(a, packed(range(10, 20), 7, RETRACT))
    small = replica.capacity
    replica.apply(b, packed(range(30), 2))
    assert replica.apply(a, packed(range(2000), 7)) == ApplyResult(added=1990, ignored=10)
    assert replica.capacity > 2000 > small
    assert replica.lookup(HASHES, 0, 10, 1 << a) == [(a, packed(range(10), 7))]
    assert replica.lookup(HASHES, 20, 4096, 1 << a) == [(a, packed(range(20, 2000), 7))]
    assert replica.lookup(HASHES, 0, 4096, 1 << b) == [(b, packed(range(30), 2))]
    assert [(r.epoch, r.entries) for r in replica.rows()] == [(1, 1990), (2, 30)]


def test_growing_leaves_nothing_behind(replica: Replica, row: int) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f"{replica.name} ")

    assert mappings() == 1
    replica.apply(row, packed(range(500)))
    assert (replica.capacity, mappings()) == (1024, 1)


def test_growing_takes_along_rows_and_their_states(replica: Replica, row: int) -> None:
    gone, suspected = replica.add_row(7, "gone", 64, 3), replica.add_row(8, "suspected", 64, 4)
    replica.set_row_state(suspected, RowState.SUSPECTED)
    replica.apply(suspected, packed(range(20)))
    replica.drop_row(gone)
    before = list(replica.rows())
    small = replica.capacity
    replica.apply(row, packed(range(500)))
    assert replica.capacity > small
    after = list(replica.rows())
    assert [r._replace(entries=0) for r in after] == [r._replace(entries=0) for r in before]
    assert {r.row: r.entries for r in after} == {row: 500, suspected: 20}
    assert wrong_in(replica) == []


def test_entries_that_name_no_block_of_a_row_do_not_outlive_growth(namespace: str) -> None:
    replica = Replica.create(namespace, "spoilt", OWN_EPOCH, 64)
    row = replica.add_row(1, "a", 4096, 0)
    replica.apply(row, packed(range(8)))
    buffer = replica._segment.buffer
    used = [at for at in range(INDEX_HEADER_BYTES, len(buffer), ENTRY_BYTES)
            if _native.load(buffer, at + 8)]  # fmt: skip
    blocks = [_native.load(buffer, at + 8) & 0xFFFFFF for at in used]
    _native.store(buffer, used[0] + 8, 65 << ENTRY_ROW_SHIFT)  # of a row that cannot be
    _native.store(buffer, used[1] + 8, 2 << ENTRY_ROW_SHIFT)  # of a row that is free
    _native.store(buffer, used[2] + 8, 1 << ENTRY_ROW_SHIFT | 0xFFFFFF)  # no block of this row
    replica.apply(row, packed(range(100, 500)))
    kept = {int(e.block_id) for e in replica.entries()}
    assert kept == {*blocks[3:], *range(100, 500)}
    assert replica.count == len(kept)
    replica.close()


def test_only_an_empty_index_with_room_is_filled(namespace: str, replica: Replica) -> None:
    row = replica.add_row(1, "a", 64, 0)
    replica.apply(row, packed(range(20)))
    for capacity, filled in ((64, 1), (16, 0)):
        other = Replica.create(namespace, "other", OWN_EPOCH, capacity)
        other.apply(other.add_row(1, "a", 64, 0), packed(range(filled)))
        with pytest.raises(ValueError, match="do not match"):
            _native.index_copy(replica._segment.buffer, other._segment.buffer)
        other.close()


def test_the_tombstones_survive_growth(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1], 5))
    replica.apply(row, packed([1], 5, RETRACT))
    replica.apply(row, packed(range(100, 500)))
    assert replica.apply(row, packed([1], 5)) == ApplyResult(ignored=1)


def full_shared_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    tried: list[str] = []

    def create(name: str, nbytes: int) -> segments.Segment:
        tried.append(name)
        raise SegmentTooSmall(f"{name} needs {nbytes} bytes, 0 available")

    monkeypatch.setattr(segments.Segment, "create", create)
    return tried


def test_without_room_to_grow_entries_are_refused_never_raised(
    replica: Replica, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_shared_memory(monkeypatch)
    applied = replica.apply(row, packed(range(100)))
    assert applied == ApplyResult(added=48, refused=52), "64 entries are filled to 3/4"
    assert replica.refused == 52
    assert replica.lookup(HASHES, 0, 100) == [(row, packed(range(48)))]


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
    assert replica.refused == 1000 - 48
    assert 1 < len(tried) < 20


def test_it_grows_after_all_when_memory_is_there_again(
    replica: Replica, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        full_shared_memory(patch)
        replica.apply(row, packed(range(100)))
    assert replica.apply(row, packed(range(200))) == ApplyResult(added=152, ignored=48)
    replica.apply(row, packed(range(1000)))
    assert replica.count == 1000


# -- readers


def test_a_reader_started_before_the_writer_sees_the_entry(replica: Replica, row: int) -> None:
    reader = read_again(replica)
    assert found(reader, 1) == []
    replica.apply(row, packed([1]))
    assert found(reader, 1) == [(row, 1)]
    assert violations(reader.buffer) == []
    reader.close()


def test_a_reader_sees_what_was_there_when_it_was_handed_out(replica: Replica, row: int) -> None:
    """Until it asks again: a larger one is another segment."""
    reader = read_again(replica)
    replica.apply(row, packed(range(20)))
    replica.apply(row, packed(range(3000)))
    assert found(reader, 19) == [(row, 1)]
    assert found(reader, 2999) == []
    assert reader.capacity == 64
    late = read_again(replica)
    assert found(late, 2999) == [(row, 1)]
    assert (late.name, late.count) == (replica.name, 3000)
    reader.close()
    late.close()


def test_a_reader_keeps_what_it_has_when_the_owner_has_closed(namespace: str) -> None:
    replica = Replica.create(namespace, "b", OWN_EPOCH, 64)
    replica.apply(replica.add_row(1, "a", 4096, 0), packed(range(40)))
    reader = read_again(replica)
    replica.close()
    assert found(reader, 1) == [(0, 1)]
    reader.close()
    with pytest.raises(SegmentError, match="closed"):
        replica.descriptor()


def test_a_reader_cannot_write(replica: Replica) -> None:
    fd = replica.descriptor()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, replica._segment.buffer.nbytes)
    os.close(fd)


def test_the_entries_are_listed(replica: Replica, row: int) -> None:
    replica.apply(row, packed([3, 5], 9))
    listed = sorted((e.row, e.block_id, e.generation, e.tag) for e in replica.entries())
    tags = [struct.unpack("<Q", HASHES[n][:8])[0] for n in (3, 5)]
    assert listed == [(row, 3, 9, tags[0]), (row, 5, 9, tags[1])]


def test_repr_tells_how_full_it_is(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1, 2]))
    assert repr(replica) == f"<Replica {replica.name} [2 of 64 entries]>"


# -- what must not be trusted


@pytest.mark.parametrize("capacity", [0, 63, 128, 2**63])
def test_a_capacity_that_does_not_fit_is_corrupt(replica: Replica, capacity: int) -> None:
    struct.pack_into("<Q", replica._segment.buffer, CAPACITY_OFFSET, capacity)
    try:
        with pytest.raises(CorruptSegment):
            read_again(replica)
    finally:
        struct.pack_into("<Q", replica._segment.buffer, CAPACITY_OFFSET, 64)


def test_only_an_index_is_opened_as_one() -> None:
    segment = segments.Segment.create("table", 8192)
    segments.write_header(segment, Header(b"KVSHMSLT", 8192, OWN_EPOCH, 1))
    with pytest.raises(CorruptSegment, match=INDEX_MAGIC.decode()):
        ReplicaReader.from_fd("table", segment.descriptor(False))
    segment.close()


def test_after_close_writes_are_dropped_without_an_error(namespace: str) -> None:
    replica = Replica.create(namespace, "b", OWN_EPOCH, 64)
    row = replica.add_row(1, "a", 10, 0)
    replica.close()
    replica.close()
    assert replica.apply(row, packed([1, 2])) == ApplyResult(ignored=2)
    replica.set_row_state(row, RowState.SUSPECTED)
    assert replica.drop_row(row) == 0


def test_the_check_finds_a_wrong_count_and_a_lost_entry(replica: Replica, row: int) -> None:
    replica.apply(row, packed([1]))
    count = _native.load(replica._segment.buffer, 72)
    _native.store(replica._segment.buffer, 72, count + 1)
    assert any("2 entries counted, 1 in use" in wrong for wrong in wrong_in(replica))
    _native.store(replica._segment.buffer, 72, count)
    tombstones = replica._tombstones[row]
    replica._tombstones[row] = bytearray(len(tombstones))
    assert any("heard of" in wrong for wrong in wrong_in(replica))
    replica._tombstones[row] = tombstones
