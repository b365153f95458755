"""Marks of the exporter's own blocks: what a run still names, what is sound, what is shown."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvshm._base.ids import BlockId, Epoch, Fingerprint
from kvshm._engine.marks import TICKS_PER_SECOND, Marks, Run, blocks_of, touching
from kvshm._shm.layout import SlotState, unpack_records
from kvshm._shm.own_slot_table import TableSpec

from .served import AnyTable

GROUP = b"\0\0\0\0"
CHAIN = [bytes([index]) * 32 for index in range(1, 6)]


@dataclass
class PoolBlock:
    block_id: int
    block_hash: bytes | None = None
    ref_cnt: int = 1


class Slotted:
    """The same as vLLM has it: each attribute at one place of all objects."""

    __slots__ = ("_block_hash", "block_id", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 1
        self._block_hash: bytes | None = None

    @property
    def block_hash(self) -> bytes | None:
        return self._block_hash

    @block_hash.setter
    def block_hash(self, value: bytes) -> None:
        self._block_hash = value


class Elsewhere(Slotted):
    __slots__ = ("_other",)

    def __init__(self, block_id: int) -> None:
        super().__init__(block_id)
        self._other: bytes | None = None
        self._block_hash = bytes(36)

    @property
    def block_hash(self) -> bytes | None:
        return getattr(self, "_other", None)

    @block_hash.setter
    def block_hash(self, value: bytes) -> None:
        self._other = value


class Refusing(Slotted):
    """One that cannot be tried out."""

    __slots__ = ()

    def __new__(cls, block_id: int) -> Refusing:
        return super().__new__(cls)


Block = PoolBlock | Slotted


@pytest.fixture
def table() -> Iterator[AnyTable]:
    name = "t" + uuid.uuid4().hex[:10]
    spec = TableSpec(name, "e", 8, 16, 1, Fingerprint(bytes(32)), "model")
    table = AnyTable.create(spec, Epoch(7))
    yield table
    table.close()


@pytest.fixture(params=[PoolBlock, Slotted, Elsewhere, Refusing])
def pool(request: pytest.FixtureRequest) -> list[Block]:
    return [request.param(block) for block in range(8)]


def hashed(pool: list[Block], *blocks: int) -> list[Block]:
    for index, block in enumerate(blocks):
        pool[block].block_hash = CHAIN[index] + GROUP
    return [pool[block] for block in blocks]


def ready(table: AnyTable) -> set[int]:
    return {i for i, slot in enumerate(table.slots()) if slot.state is SlotState.READY}


def test_a_step_makes_sound_what_it_completes_and_nothing_else(pool: list[Block]) -> None:
    marks, blocks = Marks(8), [pool[5], pool[2], pool[7]]
    packed, published = marks.write(blocks, 0, 3, 2)
    assert (blocks_of([Run(CHAIN, 0, packed)]), published) == ([5, 2], [])
    assert marks.sound(blocks, 3) == 2
    assert marks.sound(blocks, 1) == 1
    marks.withdraw([BlockId(2)])
    assert marks.sound(blocks, 3) == 2  # only the hash is lost
    marks.clear([pool[5]])
    assert marks.sound(blocks, 3) == 0


def test_the_last_use_is_that_of_the_present_contents(pool: list[Block]) -> None:
    now = [100.0]
    marks, blocks = Marks(8, clock=lambda: now[0]), [pool[5], pool[2], pool[7]]
    marks.write(blocks, 0, 3, 2)
    assert marks.touch(blocks, 3) == 2
    now[0] += 2.5
    assert marks.touch(blocks, 1) == 1
    assert marks.sound(blocks, 3) == 2
    assert [marks.used_at(BlockId(block)) for block in (5, 2, 7)] == [161, 1, 0]
    marks.withdraw([BlockId(5)])
    marks.write([pool[2]], 0, 1, 1)
    assert [marks.used_at(BlockId(block)) for block in (5, 2, 7)] == [0, 0, 0]


def test_a_tick_is_never_none() -> None:
    now = [0.0]
    marks = Marks(8, clock=lambda: now[0])
    now[0] = ((1 << 30) - 1) / TICKS_PER_SECOND
    assert marks.tick() == 1
    now[0] += 1
    assert marks.tick() == TICKS_PER_SECOND


def test_what_is_hashed_as_its_place_says_is_published(table: AnyTable, pool: list[Block]) -> None:
    marks = Marks(8)
    packed, _ = marks.write(hashed(pool, 3, 1, 4), 0, 3, 3)
    records, left = table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed)])
    found = list(unpack_records(records))
    assert [(r.block_id, r.block_hash, r.depth) for r in found] == [
        (3, CHAIN[0], 0), (1, CHAIN[1], 1), (4, CHAIN[2], 2)
    ]  # fmt: skip
    assert (left, ready(table)) == ([], {1, 3, 4})
    assert table.slot(1).parent_tag == int.from_bytes(CHAIN[0][:8], "little")
    again = table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed)])
    assert again == (b"", [])  # it is by now
    assert marks.write([pool[1], pool[4]], 0, 2, 0) == (b"", [1, 4])


def test_a_block_without_a_hash_waits_while_somebody_may_give_it_one(
    table: AnyTable, pool: list[Block]
) -> None:
    marks = Marks(8)
    packed, _ = marks.write([pool[3], pool[1]], 0, 2, 2)
    run = (CHAIN, 0, packed)
    hashed(pool, 3)
    assert table.publish_marked(marks.packed, pool, [run])[1] == [run]
    assert ready(table) == {3}
    pool[1].ref_cnt = 0
    assert table.publish_marked(marks.packed, pool, [run]) == (b"", [])


def test_a_changed_block_and_another_hash_are_passed_over(
    table: AnyTable, pool: list[Block]
) -> None:
    marks = Marks(8)
    packed, _ = marks.write(hashed(pool, 3, 1, 4), 0, 3, 3)
    marks.withdraw([BlockId(3)])
    pool[1].block_hash = CHAIN[4] + GROUP
    assert table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed)])[1] == []
    assert ready(table) == {4}
    marks.clear_all()
    assert table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed)]) == (b"", [])
    assert marks.sound([pool[4]], 1) == 0


def test_a_slot_that_still_drains_waits(table: AnyTable, pool: list[Block]) -> None:
    marks = Marks(8)
    packed, _ = marks.write(hashed(pool, 3), 0, 1, 1)
    records, _ = table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed)])
    table.set_life(0)  # type: ignore[arg-type]  # the only rank
    assert table.lease(5, records)[0] == 1  # type: ignore[arg-type]  # any bit
    packed, published = marks.write([pool[3]], 0, 1, 1)
    assert table.retract(published)[1] == [3]
    run = (CHAIN, 0, packed)
    assert table.publish_marked(marks.packed, pool, [run]) == (b"", [run])
    table.force([BlockId(3)])
    assert table.publish_marked(marks.packed, pool, [run])[1] == []
    assert ready(table) == {3}


def test_a_twin_is_offered_too_and_stays_when_the_other_goes(
    table: AnyTable, pool: list[Block]
) -> None:
    marks = Marks(8)
    for block in (3, 6):
        packed, _ = marks.write(hashed(pool, block), 0, 1, 1)
        table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed)])
    assert ready(table) == {3, 6}
    assert table.check_integrity() == []
    table.retract(marks.clear([BlockId(3)]))
    assert ready(table) == {6}


def test_the_parent_is_the_chain_s_whatever_was_published_before(
    table: AnyTable, pool: list[Block]
) -> None:
    marks, other = Marks(8), [bytes([index]) * 32 for index in range(11, 15)]
    packed, _ = marks.write(hashed(pool, 3, 1, 4), 0, 3, 3)
    pool[6].block_hash = other[3] + GROUP
    another, _ = marks.write(pool[3:7], 3, 4, 4)
    marks.clear([pool[1]])  # between 3 and 4
    table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed), (other, 3, another)])
    assert ready(table) == {3, 4, 6}
    parents = {block: table.slot(block).parent_tag for block in (3, 4, 6)}
    tags = [int.from_bytes(chain[:8], "little") for chain in (CHAIN[1], other[2])]
    assert parents == {3: 0, 4: tags[0], 6: tags[1]}


def test_what_is_cleared_is_retracted_as_far_as_it_is_published(
    table: AnyTable, pool: list[Block]
) -> None:
    marks = Marks(8)
    packed, _ = marks.write(hashed(pool, 3, 1), 0, 2, 2)
    records, _ = table.publish_marked(marks.packed, pool, [(CHAIN, 0, packed)])
    table.set_life(0)  # type: ignore[arg-type]  # the only rank
    assert table.lease(5, records[48:])[0] == 1  # type: ignore[arg-type]  # any bit
    retracted, draining = table.retract_marked(marks.packed, [pool[7], pool[1], pool[3]])
    assert [r.block_id for r in unpack_records(retracted)] == [1, 3]
    assert (draining, ready(table)) == ([1], set())
    assert marks.sound(hashed(pool, 3, 1), 2) == 0
    assert table.retract_marked(marks.packed, pool) == (b"", [])  # no mark says that 1 is published


@pytest.mark.parametrize("block", [8, -1, 1 << 40])
def test_a_block_that_does_not_exist_is_an_error(table: AnyTable, block: int) -> None:
    marks = Marks(8)
    with pytest.raises(IndexError):
        marks.clear([PoolBlock(block)])
    with pytest.raises(IndexError):
        table.retract_marked(marks.packed, [PoolBlock(block)])
    with pytest.raises(IndexError):
        marks.sound([PoolBlock(block)], 1)
    with pytest.raises(IndexError):
        marks.write([PoolBlock(block)], 0, 1, 1)
    for first, last in ((0, 2), (-1, 1), (0, 1 << 62)):
        with pytest.raises(IndexError):
            marks.write((PoolBlock(0),), first, last, last)
    assert marks.sound([PoolBlock(0)], 1) == 0


def test_runs_that_change_while_they_are_published_harm_no_one(table: AnyTable) -> None:
    """What a block says may be told by Python code, which may do anything."""
    marks = Marks(8)
    blocks = [PoolBlock(n) for n in range(3)]
    packed, _ = marks.write(blocks, 0, 3, 3)
    runs = [(CHAIN, 0, packed)]

    class Meddling(PoolBlock):
        @property
        def block_hash(self) -> bytes | None:  # type: ignore[override]  # of an attribute
            runs.extend([(CHAIN, 0, packed)] * 1000)
            return None

        @block_hash.setter
        def block_hash(self, value: bytes | None) -> None: ...

    _, left = table.publish_marked(marks.packed, [Meddling(n) for n in range(3)], runs)
    assert len(left) == 1


def test_runs_of_other_shapes_are_refused(table: AnyTable, pool: list[Block]) -> None:
    marks = Marks(8)
    packed, _ = marks.write(hashed(pool, 3), 0, 1, 1)
    for run in ((CHAIN, 0), (CHAIN, 0, "text"), ([7], 0, packed), ([b""], 0, packed)):
        with pytest.raises((TypeError, ValueError, IndexError)):
            table.publish_marked(marks.packed, pool, [run])  # type: ignore[list-item]  # on purpose
    with pytest.raises(IndexError):
        table.publish_marked(marks.packed, pool[:3], [(CHAIN, 0, packed)])
    assert ready(table) == set()


@dataclass
class Request:
    num_computed_tokens: int
    num_tokens: int
    num_output_placeholders: int = 0
    num_preemptions: int = 0


class TrackedRequest:
    __slots__ = ("complete", "epochs", "preemptions", "request")

    def __init__(self, request: Request, complete: int, epochs: int = 3) -> None:
        self.request, self.complete = request, complete
        self.epochs, self.preemptions = epochs, 0


def touches(
    request: Request, complete: int, count: int, drafts: bool = False, epochs: int = 3
) -> tuple[int, int] | None:
    """The first block and the end of what a step with blocks of 16 tokens writes, if it matters."""
    tracked = TrackedRequest(request, complete, epochs)
    found = touching({"r": tracked}, {"r": count, "another": 5}, 16, 3, drafts)
    assert all(one is tracked for one, _, _ in found)
    return found[0][1:] if found else None


def test_only_steps_that_complete_a_block_or_write_a_marked_one_matter() -> None:
    assert touches(Request(20, 21), 1, 1) is None
    assert touches(Request(31, 32), 1, 1) == (1, 32)  # completes block 1
    assert touches(Request(20, 40), 1, 20) == (1, 40)
    assert touches(Request(20, 21), 2, 1) == (1, 21)  # block 1 has a mark
    assert touches(Request(20, 21), 1, 1, epochs=2) == (1, 21)
    assert touches(Request(20, 21, num_preemptions=1), 1, 1) == (1, 21)


def test_drafts_complete_nothing_and_may_be_written_again() -> None:
    assert touches(Request(30, 31), 1, 4, drafts=True) is None  # only drafts go beyond the block
    assert touches(Request(31, 32), 1, 4, drafts=True) == (1, 35)
    assert touches(Request(30, 31, 1), 1, 4, drafts=True) == (1, 34)  # one more is on its way
    assert touches(Request(34, 31), 2, 4, drafts=True) == (1, 38)  # back to where drafts failed


def test_a_step_of_what_is_no_request_is_an_exception() -> None:
    with pytest.raises(AttributeError):
        touching({"r": object()}, {"r": 1}, 16, 0, False)
    with pytest.raises(ValueError, match="token"):
        touching({}, {}, 0, 0, False)


def test_the_null_block_stays_sound_when_all_else_is_forgotten() -> None:
    """It stands before every window: else no request behind its window would be shown again after
    a reset."""
    marks = Marks(3, BlockId(0))
    marks.make_sound([BlockId(1)])
    table = [PoolBlock(0), PoolBlock(1)]
    assert marks.sound(table, 2) == 2
    marks.clear_all()
    assert marks.sound(table, 2) == 1
