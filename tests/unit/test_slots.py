"""The slot table as Python sees it: creating, opening, slots, integrity."""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Iterator

import pytest

from kvshm import _native
from kvshm._base.ids import (
    NO_LEASE_BIT,
    BlockHash,
    BlockId,
    Epoch,
    Fingerprint,
    Generation,
    LeaseBit,
    Rank,
)
from kvshm._shm.layout import (
    MODEL_NAME_BYTES,
    NUM_BLOCKS_OFFSET,
    NUM_LEASE_BITS,
    NUM_RANKS_OFFSET,
    PULSE_DIED,
    PULSES_OFFSET,
    TABLE_HEADER_BYTES,
    TICKETS_OFFSET,
    VERSION_OFFSET,
    BlockRecord,
    SlotState,
    pack_records,
    table_bytes,
    unpack_records,
)
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.errors import (
    CorruptSegment,
    SegmentError,
    SegmentNotReady,
    VersionMismatch,
)

from ..waiting import NanosecondClock as Clock
from .served import AnyTable, again

EPOCH = Epoch(0xFEED_0000_0000_0001)
HASH = BlockHash(b"h" * 32)


def spec_of(namespace: str = "", **changes: object) -> TableSpec:
    values = {
        "namespace": namespace or f"test-{uuid.uuid4().hex[:12]}",
        "engine": "engine-0",
        "num_blocks": 6,
        "block_size": 16,
        "num_ranks": 2,
        "fingerprint": Fingerprint(b"f" * 32),
        "model": "llama",
    }
    return TableSpec(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> Iterator[AnyTable]:
    table = AnyTable.create(spec_of(), EPOCH, clock=clock)
    for rank in range(table.num_ranks):
        table.set_life(rank)
    yield table
    table.close()


def publish(table: AnyTable, *blocks: int, group: int = 0) -> bytes:
    packed = pack_records(
        BlockRecord(HASH, BlockId(block), Generation(0), block, group=group) for block in blocks
    )
    return table.publish(packed, b"parent!!" * len(blocks))


def block_ids(packed: bytes) -> list[int]:
    return [record.block_id for record in unpack_records(packed)]


# -- creating and opening


def test_what_a_table_was_made_for_is_read_back_by_another_mapping(table: AnyTable) -> None:
    other = again(table)
    for name in (
        "name", "epoch", "pid", "num_blocks", "block_size", "num_ranks", "fingerprint",
        "engine", "model", "created_ns",
    ):  # fmt: skip
        assert getattr(other, name) == getattr(table, name), name
    assert (other.pid, other.engine, other.model) == (os.getpid(), "engine-0", "llama")
    other.close()


def test_a_table_that_cannot_be_is_refused(subtests: pytest.Subtests) -> None:
    for changes in [
        {"num_blocks": 0},
        {"num_blocks": 2**32},
        {"block_size": 0},
        {"num_ranks": 0},
        {"num_ranks": 65},
        {"fingerprint": b"short"},
        {"engine": "e" * 65},
    ]:
        with subtests.test(changes=changes), pytest.raises(ValueError, match=r"."):
            spec_of(**changes)


def test_a_long_model_name_is_cut_between_characters() -> None:
    spec = spec_of(model="x" + "é" * MODEL_NAME_BYTES)
    table = AnyTable.create(spec, EPOCH)
    try:
        assert table.model == "x" + "é" * 127
    finally:
        table.close()


def test_a_table_larger_than_it_may_be_is_not_mapped(table: AnyTable) -> None:
    """The roster says how large it is."""
    largest = table_bytes(5, 2)
    with pytest.raises(SegmentError, match=f"{table.nbytes} bytes, at most {largest} were"):
        AnyTable.from_fd(table.name, table.descriptor(True), largest=largest)


@pytest.mark.parametrize(
    ("offset", "value", "error"),
    [
        (VERSION_OFFSET, 0, SegmentNotReady),
        (VERSION_OFFSET, 99, VersionMismatch),
        (NUM_BLOCKS_OFFSET, 0, CorruptSegment),
        (NUM_BLOCKS_OFFSET, 2**32 - 1, CorruptSegment),
        (NUM_RANKS_OFFSET, 0, CorruptSegment),
        (NUM_RANKS_OFFSET, 65, CorruptSegment),
        (0, 0, CorruptSegment),
    ],
)
def test_a_damaged_table_cannot_be_opened(
    table: AnyTable, offset: int, value: int, error: type[SegmentError]
) -> None:
    struct.pack_into("<I", table._segment.buffer, offset, value)
    with pytest.raises(error, match=table.name):
        again(table)


def test_a_table_damaged_while_open_gives_an_exception(table: AnyTable) -> None:
    struct.pack_into("<I", table._segment.buffer, NUM_BLOCKS_OFFSET, 2**31)
    with pytest.raises(CorruptSegment):
        table.scan()


def test_a_closed_table_says_so(table: AnyTable) -> None:
    table.close()
    table.close()
    with pytest.raises(SegmentError, match="closed"):
        table.scan()
    assert "closed" in repr(table)


# -- slots


def test_a_published_slot_says_everything_about_its_block(table: AnyTable, clock: Clock) -> None:
    clock.now += 7_000_000
    publish(table, 3, group=65535)
    slot = table.slot(3)
    assert slot.state is SlotState.READY
    assert slot[2:] == (0, HASH, int.from_bytes(b"parent!!", "little"), 3, 7, 65535, 0)
    assert [s.state is SlotState.READY for s in table.slots()] == [i == 3 for i in range(6)]


@pytest.mark.parametrize(("passed_ns", "wanted"), [(-5, 0), (10**18, 2**32 - 1)])
def test_the_age_of_a_block_saturates(
    table: AnyTable, clock: Clock, passed_ns: int, wanted: int
) -> None:
    clock.now += passed_ns
    publish(table, 0)
    assert table.slot(0).published_ms == wanted


def test_leases_show_as_bits(table: AnyTable) -> None:
    held = publish(table, 0, 1)
    importer = again(table)
    assert importer.lease(LeaseBit(2), held) == (2, b"\1\1")
    assert importer.lease(LeaseBit(27), held) == (2, b"\1\1")
    assert table.slot(0).leases == 1 << 2 | 1 << 27
    assert table.sweep(1 << 27) == 2
    assert importer.recheck(Rank(1), held) == [True, True]
    assert importer.release(LeaseBit(2), held, b"\0\1") == 1
    assert table.retract([BlockId(0), BlockId(1)])[1] == [0]
    importer.close()


class ReadingPeer(PeerSlotTable):
    """An importer that has no lease bit."""

    WRITABLE = False


def test_a_reader_without_a_lease_bit_needs_no_write_access(table: AnyTable) -> None:
    held = publish(table, 0, 5)
    reader = again(table, ReadingPeer)
    assert reader.lease(NO_LEASE_BIT, held) == (2, b"\0\0")
    assert reader.recheck(Rank(0), held) == [True, True]
    assert reader.scan() == held
    assert reader.check_integrity() == []
    with pytest.raises(ValueError, match="writable"):
        reader.lease(LeaseBit(0), held)
    reader.close()


def test_what_is_overwritten_under_an_importer_without_a_lease_bit_is_not_imported(
    table: AnyTable,
) -> None:
    records = publish(table, 0, 1)
    memory, copied = bytearray(b"aaaabbbb"), bytearray(8)
    importer = again(table, ReadingPeer)
    assert importer.lease(NO_LEASE_BIT, records) == (2, b"\0\0")
    copied[:6] = memory[:6]  # block 0, and a half of block 1
    assert table.retract([BlockId(1)])[1] == [], "nothing tells the exporter to wait"
    memory[4:] = b"BBBB"
    publish(table, 1)
    copied[6:] = memory[6:]
    assert copied == b"aaaabbBB", "torn"
    assert importer.recheck(Rank(0), records) == [True, False]
    importer.close()


def test_scan_finds_every_ready_slot_of_a_large_table() -> None:
    table = AnyTable.create(spec_of(num_blocks=10_000), EPOCH)
    try:
        publish(table, *range(0, 10_000, 3))
        assert block_ids(table.scan()) == list(range(0, 10_000, 3))
    finally:
        table.close()


def test_reset_and_retire(table: AnyTable) -> None:
    held = publish(table, 0, 1)
    table.lease(LeaseBit(2), held)
    assert not table.retired
    table.retire()
    assert table.retired
    assert table.lease(LeaseBit(3), held)[0] == 0
    assert table.reset() == 2
    assert table.recheck(Rank(0), held) == [False, False]


def test_checksums_belong_to_a_rank_and_a_block(table: AnyTable) -> None:
    for rank in (0, 1):
        for block in range(6):
            assert table.checksum(Rank(rank), block) == 0
            table.set_checksum(Rank(rank), block, 100 * rank + block + 2**63)
    assert [table.checksum(Rank(1), b) for b in range(6)] == [2**63 + 100 + b for b in range(6)]
    assert table.scan() == b""


@pytest.mark.parametrize("block", [-1, 6, 2**32])
def test_there_is_no_such_block(table: AnyTable, block: int) -> None:
    for call in (
        lambda: table.slot(block),
        lambda: table.checksum(Rank(0), block),
        lambda: table.retract([BlockId(block)]),
    ):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize("rank", [-1, 2])
def test_there_is_no_such_rank(table: AnyTable, rank: int) -> None:
    for call in (
        lambda: table.life(rank),
        lambda: table.set_life(rank),
        lambda: table.end_life(rank),
        lambda: table.checksum(Rank(rank), 0),
        lambda: table.recheck(Rank(rank), b""),
    ):
        with pytest.raises((IndexError, OverflowError)):
            call()


# -- integrity


def test_a_sound_table_has_nothing_to_report(table: AnyTable) -> None:
    held = publish(table, 0, 1, 2)
    table.lease(LeaseBit(4), held)
    table.retract([BlockId(0)])
    table.take_ticket(2)
    assert table.check_integrity() == []


@pytest.mark.parametrize(
    ("offset", "value", "report"),
    [
        (TABLE_HEADER_BYTES + 64, 3 << NUM_LEASE_BITS, "slot 1: state 3"),
        (TABLE_HEADER_BYTES + 128, 1, "slot 2: state 0 with leases 0x1"),
        (192, EPOCH + 1, "life of rank 0"),
        (TICKETS_OFFSET + 16, 2**40, "ticket 2"),
        (NUM_RANKS_OFFSET, 30 << 32 | 2, "lease bit is 29"),
        (PULSES_OFFSET + 8, PULSE_DIED + 1, "pulse 0 is 0x40000001"),
    ],
)
def test_what_is_wrong_is_reported(table: AnyTable, offset: int, value: int, report: str) -> None:
    _native.store(table._segment.buffer, offset, value)
    (found,) = table.check_integrity()
    assert report in found


def test_a_slot_in_no_legal_state_is_corrupt(table: AnyTable) -> None:
    _native.store(table._segment.buffer, TABLE_HEADER_BYTES, 9 << NUM_LEASE_BITS)
    with pytest.raises(CorruptSegment, match="slot 0"):
        table.slot(0)


def test_repr_is_an_inspection(table: AnyTable) -> None:
    table.lease(LeaseBit(4), publish(table, 0, 1, 2)[:48])
    table.retract([BlockId(0), BlockId(1)])
    table.retire()
    states = "[4 empty, 1 ready, 1 draining, 1 leased, retired]"
    assert repr(table) == f"<AnyTable {table.name} {states}>"
