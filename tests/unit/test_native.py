"""The native module at its own face: slots, words and argument checks, over plain memory."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest

from kvshm import _native
from kvshm._base.ids import BlockHash, BlockId, Generation
from kvshm._shm import layout as records
from kvshm._shm.layout import (
    COUNTERS_OFFSET,
    EPOCH_OFFSET,
    HEADER_BYTES_OFFSET,
    LAYOUT_VERSION,
    LIFE_OFFSET,
    NUM_BLOCKS_OFFSET,
    NUM_RANKS_OFFSET,
    RECORD_BYTES,
    RETIRED_OFFSET,
    SEGMENT_BYTES_OFFSET,
    TABLE_HEADER_BYTES,
    VERSION_OFFSET,
    BlockRecord,
    RecordKind,
    pack_records,
    table_bytes,
    unpack_records,
)
from kvshm.errors import CorruptSegment

from .test_native_index import make_index

INDEX = make_index(8)
EPOCH = 0x1234_5678_9ABC_DEF0
BLOCKS = 8
RANKS = 2


def make_table() -> mmap.mmap:
    memory = mmap.mmap(-1, table_bytes(BLOCKS, RANKS))
    struct.pack_into("<IQQ", memory, HEADER_BYTES_OFFSET, TABLE_HEADER_BYTES, len(memory), EPOCH)
    struct.pack_into("<III", memory, NUM_BLOCKS_OFFSET, BLOCKS, 16, RANKS)
    for rank in range(RANKS):
        _native.store(memory, LIFE_OFFSET + 8 * rank, EPOCH)
    _native.mark_ready(memory, LAYOUT_VERSION)
    return memory


def record(block: int, generation: int = 0, depth: int = 0) -> BlockRecord:
    digest = BlockHash(bytes([block + 1]) * 32)
    return BlockRecord(digest, BlockId(block), Generation(generation), depth)


def pack(*blocks: int) -> bytes:
    return pack_records(record(block) for block in blocks)


def publish(memory: mmap.mmap, *blocks: int) -> bytes:
    return _native.publish(memory, pack(*blocks), bytes(8 * len(blocks)), 7)


@pytest.fixture
def table() -> mmap.mmap:
    return make_table()


# -- layout


@pytest.mark.parametrize("name", ["SLOT_HASH_OFFSET", "DRAINING", "RETRACT", "HASH_BYTES"])
def test_a_differing_layout_is_refused(name: str) -> None:
    of = records.numbers()
    records.check_layout(records.digest(of))
    with pytest.raises(ImportError, match="build the native module again"):
        records.check_layout(records.digest({**of, name: of[name] + 1}))


def test_import_fails_if_the_layouts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    monkeypatch.setattr(records, "SLOT_BYTES", 128)
    spec = util.spec_from_file_location("kvshm._native", _native.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="built with another layout"):
        spec.loader.exec_module(util.module_from_spec(spec))


# -- what a slot goes through


def test_publish_fills_generations_and_skips_what_is_not_empty(table: mmap.mmap) -> None:
    first = list(unpack_records(publish(table, 1, 2)))
    assert [(r.block_id, r.generation, r.kind) for r in first] == [
        (1, 0, RecordKind.PUBLISH),
        (2, 0, RecordKind.PUBLISH),
    ]
    assert [r.block_id for r in unpack_records(publish(table, 2, 3))] == [3]


def test_retract_of_a_free_slot_names_the_generation_that_ended(table: mmap.mmap) -> None:
    publish(table, 1)
    packed, draining = _native.retract(table, [1, 4])
    assert draining == []
    (retracted,) = unpack_records(packed)
    assert retracted == record(1)._replace(kind=RecordKind.RETRACT)
    (again,) = unpack_records(publish(table, 1))
    assert again.generation == 1


def test_a_leased_slot_drains_until_released(table: mmap.mmap) -> None:
    held = publish(table, 1, 2)
    assert _native.lease(table, EPOCH, 5, held) == (2, b"\1\1")
    packed, draining = _native.retract(table, [1, 2])
    assert len(packed) == 2 * RECORD_BYTES
    assert draining == [1, 2]
    assert _native.retract(table, [1]) == (b"", [1]), "a slot that drains is still reported"
    assert _native.lease(table, EPOCH, 6, held) == (0, b"\0\0"), "no lease while it drains"
    assert _native.recheck(table, EPOCH, 1, held) == b"\1\1", "bytes stay while it drains"
    assert _native.release(table, 5, held[:RECORD_BYTES], None) == 1
    assert _native.drain(table, [1, 2], 0) == [2]
    assert _native.recheck(table, EPOCH, 1, held) == b"\0\1"


def test_a_slow_holder_is_not_waited_for(table: mmap.mmap) -> None:
    held = publish(table, 1)
    _native.lease(table, EPOCH, 5, held)
    _native.lease(table, EPOCH, 6, held)
    _native.retract(table, [1])
    assert _native.drain(table, [1], 1 << 5) == [1]
    assert _native.drain(table, [1], 1 << 5 | 1 << 6) == []
    assert _native.release(table, 5, held, None) == 0


def test_force_overrides_and_names_the_holders(table: mmap.mmap) -> None:
    held = publish(table, 1, 2)
    _native.lease(table, EPOCH, 5, held)
    _native.lease(table, EPOCH, 27, held[:RECORD_BYTES])
    _native.retract(table, [1, 2, 3])
    assert _native.force(table, [1, 2, 3]) == (2, 1 << 5 | 1 << 27)
    assert _native.recheck(table, EPOCH, 0, held) == b"\0\0"
    assert _native.sweep(table, 2**28 - 1) == 0, "no bit stays in a slot that was forced"
    fresh = publish(table, 1)
    _native.lease(table, EPOCH, 5, fresh)
    assert _native.release(table, 5, held, None) == 0, "an old lease's release touches nothing"
    assert _native.release(table, 5, fresh, None) == 1


def test_reset_moves_every_slot_on(table: mmap.mmap) -> None:
    held = publish(table, 1, 2)
    _native.lease(table, EPOCH, 5, held)
    _native.retract(table, [2])
    assert _native.reset(table) == 2
    assert _native.recheck(table, EPOCH, 0, held) == b"\0\0"
    assert {r.generation for r in unpack_records(publish(table, *range(BLOCKS)))} == {1}


def test_a_batch_keeps_the_longest_leasable_prefix(table: mmap.mmap) -> None:
    held = publish(table, 1, 2, 3)
    _native.retract(table, [2])
    assert _native.lease(table, EPOCH, 5, held) == (1, b"\1\0\0")
    assert _native.lease(table, EPOCH, 5, held) == (1, b"\0\0\0"), "joined, not taken"


def test_without_a_lease_bit_nothing_is_written(table: mmap.mmap) -> None:
    held = publish(table, 1)
    before = bytes(table)
    assert _native.lease(memoryview(table).toreadonly(), EPOCH, -1, held) == (1, b"\0")
    assert bytes(table) == before


@pytest.mark.parametrize(
    "change",
    [
        {"block_hash": BlockHash(b"x" * 32)},
        {"block_hash": BlockHash(bytes([2]) * 31 + b"x")},
        {"generation": Generation(1)},
        {"generation": Generation(2**32 - 1)},
        {"block_id": BlockId(2)},
        {"block_id": BlockId(BLOCKS)},
        {"block_id": BlockId(2**32 - 1)},
    ],
)
def test_a_wrong_hint_leases_nothing(table: mmap.mmap, change: dict[str, int]) -> None:
    publish(table, 1)
    wrong = pack_records([record(1)._replace(**change)])
    assert _native.lease(table, EPOCH, 5, wrong) == (0, b"\0")
    assert _native.sweep(table, 2**28 - 1) == 0


@pytest.mark.parametrize(
    ("offset", "value"),
    [(LIFE_OFFSET, 0), (LIFE_OFFSET + 8, EPOCH + 1), (EPOCH_OFFSET, 5), (RETIRED_OFFSET, 1)],
)
def test_nothing_is_leased_from_a_table_whose_life_has_ended(
    table: mmap.mmap, offset: int, value: int
) -> None:
    held = publish(table, 1)
    _native.store(table, offset, value)
    assert _native.lease(table, EPOCH, 5, held) == (0, b"\0")


def test_a_recheck_asks_the_life_of_its_own_rank(table: mmap.mmap) -> None:
    held = publish(table, 1)
    _native.store(table, LIFE_OFFSET + 8, 0)
    assert _native.recheck(table, EPOCH, 0, held) == b"\1"
    assert _native.recheck(table, EPOCH, 1, held) == b"\0"
    assert _native.recheck(table, EPOCH + 1, 0, held) == b"\0"


def test_a_recheck_never_passes_for_an_empty_slot(table: mmap.mmap) -> None:
    assert _native.recheck(table, EPOCH, 0, pack(1)) == b"\0"


def test_sweep_clears_exactly_the_dead(table: mmap.mmap) -> None:
    held = publish(table, 1, 2)
    for bit in (0, 5, 27):
        _native.lease(table, EPOCH, bit, held)
    _native.retract(table, [1])
    assert _native.sweep(table, 1 << 0 | 1 << 27) == 2
    assert _native.sweep(table, 1 << 0 | 1 << 27) == 0
    assert _native.release(table, 5, held, None) == 2


def test_scan_goes_on_where_it_stopped(table: mmap.mmap) -> None:
    publish(table, 0, 3, 7)
    _native.retract(table, [3])
    publish(table, 3)
    packed, following = _native.scan(table, 0, 2)
    assert [(r.block_id, r.generation) for r in unpack_records(packed)] == [(0, 0), (3, 1)]
    rest, end = _native.scan(memoryview(table).toreadonly(), following, 100)
    assert list(unpack_records(rest)) == [record(7)]
    assert end == BLOCKS
    assert _native.scan(table, end, 1) == (b"", BLOCKS)


def test_scan_looks_at_no_block_from_its_stop_on(table: mmap.mmap) -> None:
    publish(table, 0, 3, 7)
    packed, following = _native.scan(table, 1, 100, 7)
    assert [r.block_id for r in unpack_records(packed)] == [3]
    assert following == 7
    assert _native.scan(table, 7, 100, 7) == (b"", 7)


def test_generations_wrap(table: mmap.mmap) -> None:
    _native.store(table, TABLE_HEADER_BYTES, (2**32 - 1) << 32)
    (last,) = unpack_records(publish(table, 0))
    assert last.generation == 2**32 - 1
    _native.retract(table, [0])
    (first,) = unpack_records(publish(table, 0))
    assert first.generation == 0


# -- words


def test_words(table: mmap.mmap) -> None:
    _native.store(table, 128, 2**64 - 1)
    assert _native.add(table, 128, 2) == 2**64 - 1
    assert _native.load(table, 128) == 1
    assert not _native.compare_exchange(table, 128, 2, 7)
    assert _native.compare_exchange(table, 128, 1, 7)
    assert _native.load(memoryview(table).toreadonly(), 128) == 7


@pytest.mark.parametrize("offset", [4096, 4096 - 4, 4096 - 7, 2**64 - 8, -8, 2**63])
def test_a_word_must_lie_in_its_segment(offset: int) -> None:
    memory = mmap.mmap(-1, 4096)
    for call in (
        lambda: _native.load(memory, offset),
        lambda: _native.store(memory, offset, 1),
        lambda: _native.add(memory, offset, 1),
        lambda: _native.compare_exchange(memory, offset, 0, 1),
    ):
        with pytest.raises((IndexError, ValueError)):
            call()
    assert bytes(memory) == bytes(4096)


def test_several_words_are_added_to_in_one_call(table: mmap.mmap) -> None:
    words = [COUNTERS_OFFSET + 8 * i for i in range(4)]
    assert _native.add(table, words[0], 5) == 0
    pairs = [number for i, word in enumerate(words) for number in (word, i + 1)]
    assert _native.add(table, *pairs) == 5, "what the first one was"
    assert [_native.load(table, word) for word in words] == [6, 2, 3, 4]
    for numbers in ((), pairs[:1], pairs[:3], (*pairs, *pairs[:2]), ("0", 1), (0.5, 1)):
        with pytest.raises(TypeError):
            _native.add(table, *numbers)  # type: ignore[arg-type]  # on purpose
    for call in (_native.load, _native.observe, _native.hook_took):
        for numbers in ((), range(8)):
            with pytest.raises(TypeError, match="numbers, not"):
                call(table, *numbers)  # type: ignore[arg-type,operator]  # on purpose
    assert [_native.load(table, word) for word in words] == [6, 2, 3, 4]


def test_blocks_of_any_class_move_behind_another_one() -> None:
    queue = [SimpleNamespace(block_id=number) for number in range(8)]
    for before, behind in pairwise(queue):
        before.next_free_block, behind.prev_free_block = behind, before
    ends = [queue[5], queue[2]]
    known = bytearray([1] * 8)
    _native.put_behind(known, queue[0], [queue[i] for i in (1, 4, 5)], ends)
    moved = [queue[i] for i in (0, 1, 4, 5, 2, 3, 6, 7)]
    for before, behind in pairwise(moved):
        assert before.next_free_block is behind
        assert behind.prev_free_block is before
    assert ends[0] is queue[3]
    assert ends[1] is queue[2]
    assert known == bytes([1, 0, 1, 1, 0, 0, 1, 1])
    with pytest.raises(AttributeError, match="free_block"):
        _native.put_behind(known, queue[0], [SimpleNamespace(block_id=9)], [])


def test_as_many_marks_as_blocks_are_looked_at_again() -> None:
    with pytest.raises(ValueError, match="2 marks of 1 blocks"):
        _native.still_duplicates(
            INDEX, INDEX, {}, MARKS, MARKS, 0, KNOWN, [FREE.next_free_block], bytes(16), 0
        )


def test_address_is_where_the_buffer_lies() -> None:
    memory = bytearray(16)
    assert _native.address(memory) == ctypes.addressof(ctypes.c_char.from_buffer(memory))


# -- refusals

MARKS = bytearray(8)
KNOWN = bytearray(1)
FREE = SimpleNamespace(next_free_block=SimpleNamespace(block_id=0, next_free_block=None))

LIMITS = 1, 0, 0.0, 0.0, 1, 1

CALLS: list[Callable[[mmap.mmap], object]] = [
    lambda t: _native.publish(t, pack(0), bytes(8), 0),
    lambda t: _native.retract(t, [0]),
    lambda t: _native.drain(t, [0], 0),
    lambda t: _native.force(t, [0]),
    lambda t: _native.reset(t),
    lambda t: _native.lease(t, EPOCH, 0, pack(0)),
    lambda t: _native.release(t, 0, pack(0), None),
    lambda t: _native.recheck(t, EPOCH, 0, pack(0)),
    lambda t: _native.hold(t, EPOCH, pack(0), 0, 5),
    lambda t: _native.kept_runs(t, FREE, 1, 1, 0),
    lambda t: _native.find_duplicates(t, INDEX, {}, MARKS, MARKS, 0, KNOWN, FREE, 1, 1, 0, LIMITS),
    lambda t: _native.still_duplicates(
        t, INDEX, {}, MARKS, MARKS, 0, KNOWN, [FREE.next_free_block], bytes(8), 0
    ),
    lambda t: _native.sweep(t, 1),
    lambda t: _native.scan(t, 0, 1),
]


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (VERSION_OFFSET, 0),
        (VERSION_OFFSET, LAYOUT_VERSION + 1),
        (HEADER_BYTES_OFFSET, 4096),
        (SEGMENT_BYTES_OFFSET, table_bytes(BLOCKS, RANKS) + 1),
        (SEGMENT_BYTES_OFFSET, TABLE_HEADER_BYTES - 1),
        (NUM_BLOCKS_OFFSET, 0),
        (NUM_BLOCKS_OFFSET, BLOCKS + 1),
        (NUM_BLOCKS_OFFSET, 2**32 - 1),
        (NUM_RANKS_OFFSET, 0),
        (NUM_RANKS_OFFSET, 65),
        (NUM_RANKS_OFFSET, 2**32 - 1),
    ],
)
def test_a_corrupt_header_is_an_exception_everywhere(
    table: mmap.mmap, offset: int, value: int
) -> None:
    struct.pack_into("<I", table, offset, value)
    for call in CALLS:
        with pytest.raises(CorruptSegment):
            call(table)


def test_a_segment_below_its_header_is_corrupt() -> None:
    with pytest.raises(CorruptSegment, match="64 bytes are mapped"):
        _native.reset(bytearray(64))
    with pytest.raises(CorruptSegment):
        _native.reset(bytearray(0))


def test_a_bad_id_is_refused_before_anything_changes(table: mmap.mmap) -> None:
    held = publish(table, 1)
    _native.lease(table, EPOCH, 5, held)
    before = bytes(table)
    beyond = pack(1, BLOCKS)
    for call in (
        lambda: _native.publish(table, pack(2, BLOCKS), bytes(16), 0),
        lambda: _native.retract(table, [1, BLOCKS]),
        lambda: _native.retract(table, [1, -1]),
        lambda: _native.retract(table, [1, 2**32]),
        lambda: _native.retract(table, [1, 2**80]),
        lambda: _native.drain(table, [1, BLOCKS], 2**28 - 1),
        lambda: _native.force(table, [1, BLOCKS]),
        lambda: _native.release(table, 5, beyond, None),
        lambda: _native.recheck(table, EPOCH, 0, beyond),
        lambda: _native.recheck(table, EPOCH, RANKS, pack(1)),
        lambda: _native.lease(table, EPOCH, 28, held),
        lambda: _native.lease(table, EPOCH, -2, held),
        lambda: _native.release(table, -1, held, None),
    ):
        with pytest.raises(IndexError):
            call()
    assert bytes(table) == before


def test_arguments_of_the_wrong_shape_are_refused(table: mmap.mmap) -> None:
    for call in (
        lambda: _native.publish(table, pack(1)[:-1], bytes(8), 0),
        lambda: _native.publish(table, pack(1), bytes(16), 0),
        lambda: _native.lease(table, EPOCH, 0, b"x"),
        lambda: _native.release(table, 0, pack(1, 2), b"\1"),
        lambda: _native.scan(table, 0, -1),
        lambda: _native.reset(memoryview(bytearray(TABLE_HEADER_BYTES + 1000))[1:]),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
    with pytest.raises(TypeError):
        _native.retract(table, ["1"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _native.retract(table, 5)  # type: ignore[arg-type]


def test_what_is_written_must_be_writable(table: mmap.mmap) -> None:
    held = publish(table, 1)
    frozen = memoryview(table).toreadonly()
    for call in (
        lambda: _native.publish(frozen, pack(2), bytes(8), 0),
        lambda: _native.reset(frozen),
        lambda: _native.lease(frozen, EPOCH, 1, held),
        lambda: _native.store(frozen, 128, 1),
    ):
        with pytest.raises((BufferError, TypeError, ValueError)):
            call()


def test_records_may_lie_anywhere_in_a_message(table: mmap.mmap) -> None:
    message = memoryview(b"xyz" + publish(table, 1, 2))
    assert _native.lease(table, EPOCH, 5, message[3:]) == (2, b"\1\1")
