"""The slot table against a model in plain Python: any order of calls, any stale record."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshm._base.ids import BlockHash, BlockId, Epoch, Fingerprint, Generation, LeaseBit, Rank
from kvshm._shm.layout import (
    TABLE_HEADER_BYTES,
    TABLE_MAGIC,
    BlockRecord,
    RecordKind,
    SlotState,
    pack_records,
    unpack_records,
)
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.segment import Header, Segment, write_header

from ..waiting import NanosecondClock
from .served import AnyTable

BLOCKS = 5
RANKS = 2
EPOCH = Epoch(77)

blocks = st.lists(st.integers(0, BLOCKS - 1), max_size=4)
bits = st.sampled_from([0, 1, 27])
ages = st.lists(st.integers(0, 8), max_size=4)
masks = st.sets(bits).map(lambda chosen: sum(1 << bit for bit in chosen))


def anonymous_table(clock: NanosecondClock) -> AnyTable:
    """A table without a name: the same code over memory that no one else sees."""
    spec = TableSpec("model", "e", BLOCKS, 16, RANKS, Fingerprint(bytes(32)))
    segment = Segment("anonymous", -1, mmap.mmap(-1, spec.nbytes))
    spec.write(segment, 0)
    header = Header(TABLE_MAGIC, TABLE_HEADER_BYTES, EPOCH, 1)
    write_header(segment, header)
    return AnyTable(segment, header, clock)


def digest(number: int) -> BlockHash:
    return BlockHash(bytes([number + 1]) * 32)


@dataclass
class ModelSlot:
    generation: int = 0
    state: SlotState = SlotState.EMPTY
    leases: set[int] = field(default_factory=set)
    block_hash: BlockHash = field(default_factory=lambda: BlockHash(bytes(32)))
    held_until: int = 0

    def free(self) -> None:
        self.generation += 1
        self.state = SlotState.EMPTY
        self.leases = set()


class SlotsModel(RuleBasedStateMachine):
    """One exporter, three importers, and every record that was ever published."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = NanosecondClock()
        self.table = anonymous_table(self.clock)
        self.slots = [ModelSlot() for _ in range(BLOCKS)]
        self.life = [True] * RANKS
        for rank in range(RANKS):
            self.table.set_life(rank)
        self.retired = False
        self.known: list[BlockRecord] = [
            BlockRecord(digest(0), BlockId(BLOCKS), Generation(0), 0)  # a hint to nowhere
        ]

    def teardown(self) -> None:
        self.table.close()

    def some(self, picks: list[int]) -> list[BlockRecord]:
        """Records by their age: 0 is the newest."""
        return [self.known[-1 - pick % len(self.known)] for pick in picks]

    # -- exporter

    @rule(wanted=blocks, number=st.integers(0, 3))
    def publish(self, wanted: list[int], number: int) -> None:
        offered = [BlockRecord(digest(number), BlockId(b), Generation(0), number) for b in wanted]
        expected = []
        for record in offered:
            slot = self.slots[record.block_id]
            if slot.state is SlotState.EMPTY:
                slot.state, slot.block_hash = SlotState.READY, record.block_hash
                slot.held_until = 0
                expected.append(record._replace(generation=Generation(slot.generation)))
        got = self.table.publish(pack_records(offered), bytes(8 * len(offered)))
        assert list(unpack_records(got)) == expected
        self.known += expected

    @rule(wanted=blocks)
    def retract(self, wanted: list[int]) -> None:
        expected, draining = [], []
        for block in wanted:
            slot = self.slots[block]
            if slot.state is SlotState.READY:
                expected.append((block, slot.generation, slot.block_hash))
                slot.state = SlotState.DRAINING
                if not slot.leases:
                    slot.free()
            if slot.state is SlotState.DRAINING and slot.leases:
                draining.append(block)
        packed, still = self.table.retract([BlockId(b) for b in wanted])
        got = list(unpack_records(packed))
        assert [(r.block_id, r.generation, r.block_hash) for r in got] == expected
        assert {r.kind for r in got} <= {RecordKind.RETRACT}
        assert still == draining

    @rule(wanted=blocks, slow=masks)
    def drain(self, wanted: list[int], slow: int) -> None:
        waiting = []
        for block in wanted:
            slot = self.slots[block]
            if slot.state is not SlotState.DRAINING:
                continue
            if any(not slow >> bit & 1 for bit in slot.leases):
                waiting.append(block)
            else:
                slot.free()
        assert self.table.drain([BlockId(b) for b in wanted], slow) == waiting

    @rule(wanted=blocks)
    def force(self, wanted: list[int]) -> None:
        forced, holders = 0, 0
        for block in wanted:
            slot = self.slots[block]
            if slot.state is SlotState.DRAINING:
                forced += 1
                holders |= sum(1 << bit for bit in slot.leases)
                slot.free()
        assert self.table.force([BlockId(b) for b in wanted]) == (forced, holders)

    @rule()
    def reset(self) -> None:
        assert self.table.reset() == sum(s.state is not SlotState.EMPTY for s in self.slots)
        for slot in self.slots:
            slot.free()

    @rule(rank=st.integers(0, RANKS - 1), alive=st.sampled_from([True, True, True, False]))
    def change_life(self, rank: int, alive: bool) -> None:
        self.life[rank] = alive
        if alive:
            self.table.set_life(rank)
        else:
            self.table.end_life(rank)

    @precondition(lambda self: len(self.known) > 12)
    @rule()
    def retire(self) -> None:
        self.retired = True
        self.table.retire()

    # -- importers

    @rule(bit=bits, picks=ages)
    def lease(self, bit: int, picks: list[int]) -> None:
        records, taken = self.some(picks), []
        usable = all(self.life) and not self.retired
        for record in records if usable else []:
            if record.block_id >= BLOCKS:
                break
            slot = self.slots[record.block_id]
            fits = (slot.generation, slot.block_hash) == (record.generation, record.block_hash)
            if slot.state is not SlotState.READY or not fits:
                break
            taken.append(bit not in slot.leases)
            slot.leases.add(bit)
        got, flags = self.table.lease(LeaseBit(bit), pack_records(records))
        assert got == len(taken)
        assert flags == bytes(taken).ljust(len(records), b"\0")

    @rule(bit=bits, picks=ages, flags=st.binary(min_size=4))
    def release(self, bit: int, picks: list[int], flags: bytes) -> None:
        records = [r for r in self.some(picks) if r.block_id < BLOCKS]
        released = 0
        for record, flag in zip(records, flags, strict=False):
            slot = self.slots[record.block_id]
            if flag and slot.generation == record.generation and bit in slot.leases:
                slot.leases.remove(bit)
                released += 1
        assert self.table.release(LeaseBit(bit), pack_records(records), flags) == released

    @rule(rank=st.integers(0, RANKS - 1), picks=ages)
    def recheck(self, rank: int, picks: list[int]) -> None:
        records = [r for r in self.some(picks) if r.block_id < BLOCKS]
        slots = [self.slots[r.block_id] for r in records]
        wanted = [
            self.life[rank] and s.state is not SlotState.EMPTY and s.generation == r.generation
            for s, r in zip(slots, records, strict=True)
        ]
        assert self.table.recheck(Rank(rank), pack_records(records)) == wanted

    @rule(picks=st.lists(st.integers(0, 4), min_size=1), holds=st.lists(st.integers(1, 9)))
    def hold(self, picks: list[int], holds: list[int]) -> None:
        records, found = self.some(picks), list[ModelSlot]()
        for record in records if all(self.life) and not self.retired else []:
            slot = self.slots[min(record.block_id, BLOCKS - 1)]
            fits = (slot.generation, slot.block_hash) == (record.generation, record.block_hash)
            if record.block_id < BLOCKS and slot.state is SlotState.READY and fits:
                found.append(slot)
        for seconds in holds:
            assert self.table.hold(pack_records(records), seconds) == len(found)
            for slot in found:
                slot.held_until = max(slot.held_until, self.clock.now // 10**9 + seconds)

    @rule(seconds=st.integers(1, 9))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds * 10**9

    @rule(dead=masks)
    def sweep(self, dead: int) -> None:
        gone = {bit for bit in range(28) if dead >> bit & 1}
        changed = sum(bool(slot.leases & gone) for slot in self.slots)
        assert self.table.sweep(dead) == changed
        for slot in self.slots:
            slot.leases -= gone

    # -- what holds after every step

    @invariant()
    def every_slot_is_as_the_protocol_says(self) -> None:
        for slot, model in zip(self.table.slots(), self.slots, strict=True):
            leases = sum(1 << bit for bit in model.leases)
            assert slot[:3] == (model.generation, model.state, leases)
            assert slot.block_hash == model.block_hash
            assert slot.held_until == model.held_until

    @invariant()
    def kept_is_what_is_leased_or_held(self) -> None:
        now, ready = self.table.now, [s for s in self.slots if s.state is SlotState.READY]
        wanted = [bool(s.leases) or s.held_until > now for s in ready]
        head = None
        for block in reversed(range(-1, BLOCKS)):
            head = SimpleNamespace(block_id=block, next_free_block=head)
        _, others, kept = self.table.kept_runs(head, BLOCKS, BLOCKS)
        assert (kept, others) == (sum(wanted), BLOCKS - sum(wanted))
        assert self.table.keeps_blocks() or not any(s.held_until > now for s in ready)

    @invariant()
    def the_table_finds_itself_sound(self) -> None:
        assert self.table.check_integrity() == []

    @invariant()
    def a_scan_is_what_is_ready(self) -> None:
        ready = {i for i, slot in enumerate(self.slots) if slot.state is SlotState.READY}
        assert {r.block_id for r in unpack_records(self.table.scan())} == ready


TestSlotsModel = SlotsModel.TestCase
TestSlotsModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
