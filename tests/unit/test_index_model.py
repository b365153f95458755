"""The replica index against a plain dictionary, under everything that can happen to events.

Three engines publish and reuse blocks; what they send arrives in order, late, repeatedly or
never; scans overlap with all of it; engines restart.  The index must hold exactly what the
rule "newer, or equal with publish -> retract" leaves, find exactly that, and after a scan
hold exactly what its engine has.
"""

from __future__ import annotations

import itertools
import uuid
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshm._replica.index import Replica
from kvshm._shm.layout import BlockRecord, RecordKind, RowState, pack_records, unpack_records
from kvshm.errors import SegmentTooSmall

from .replicas import published_blocks, wrong_in
from .served import read_again

PUBLISH, RETRACT = RecordKind.PUBLISH, RecordKind.RETRACT
NUM_BLOCKS = 8
NUM_ENGINES = 3
# The last two differ, but not in the 8 bytes that the index keeps.
HASHES = [bytes([n]) * 32 for n in range(5)] + [bytes([4]) * 8 + bytes(24)]

engines = st.integers(0, NUM_ENGINES - 1)
blocks = st.integers(0, NUM_BLOCKS - 1)
some_blocks = st.sets(blocks, min_size=1)
contents = st.integers(0, len(HASHES) - 1)


def tag_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little")


class Engine:
    def __init__(self, row: int, epoch: int) -> None:
        self.row, self.epoch = row, epoch
        self.generation = [0] * NUM_BLOCKS
        self.ready: dict[int, bytes] = {}
        self.sent: list[BlockRecord] = []
        self.delivered = 0
        self.forgotten: set[tuple[int, int]] = set()
        self.scan: Scan | None = None

    def record(self, block: int, kind: RecordKind = PUBLISH) -> BlockRecord:
        return BlockRecord(self.ready[block], block, self.generation[block], 0, kind)

    def scanned(self, first: int, stop: int) -> list[BlockRecord]:
        return [self.record(b) for b in range(first, stop) if b in self.ready]


class Scan(NamedTuple):
    """A scan under way: it has read the slots below ``passed``."""

    before: bytes
    seen: list[BlockRecord]
    passed: int


class Model:
    def __init__(self, capacity: int, grows: bool) -> None:
        self.heard: dict[tuple[int, int], tuple[int, RecordKind, int]] = {}
        self.capacity = capacity
        self.grows = grows

    def published(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {k: (g, tag) for k, (g, kind, tag) in self.heard.items() if kind is PUBLISH}

    def apply(self, row: int, record: BlockRecord) -> None:
        place = (row, record.block_id)
        known, kind, _ = self.heard.get(place, (-1, RETRACT, 0))
        retracts = (kind, record.kind) == (PUBLISH, RETRACT)
        if record.generation < known or (record.generation == known and not retracts):
            return
        adds = record.kind is PUBLISH and place not in self.published()
        if adds and not self.grows and len(self.published()) >= self.capacity // 4 * 3:
            return
        self.heard[place] = (record.generation, record.kind, tag_of(record.block_hash))

    def holders(self, block_hash: bytes, rows: set[int]) -> set[int]:
        tag = tag_of(block_hash)
        return {row for (row, _), (_, held) in self.published().items() if held == tag} & rows

    def expected_runs(self, wanted: list[bytes], rows: set[int]) -> tuple[int, int]:
        """Length of the known prefix and the fewest owners it can be cut into."""
        length = owners = 0
        able: set[int] = set()
        for block_hash in wanted:
            holders = self.holders(block_hash, rows)
            if not holders:
                break
            if not able & holders:
                owners, able = owners + 1, holders
            able &= holders
            length += 1
        return length, owners


class GrowingIndex(RuleBasedStateMachine):
    """An index with room for 6 entries at first, which grows as it needs."""

    grows = True

    def __init__(self) -> None:
        super().__init__()
        self.namespace = "t" + uuid.uuid4().hex[:10]
        self.replica = Replica.create(self.namespace, "me", 1, 8)
        self.model = Model(8, self.grows)
        self.epochs = itertools.count(2)
        if not self.grows:
            self.replica._enlarge = self._no_memory
        self.engines = [self._new_engine() for _ in range(NUM_ENGINES)]

    @staticmethod
    def _no_memory() -> None:
        raise SegmentTooSmall("no shared memory left")

    def teardown(self) -> None:
        self.replica.close()

    def _new_engine(self) -> Engine:
        epoch = next(self.epochs)
        return Engine(self.replica.add_row(epoch, "e", NUM_BLOCKS, -1), epoch)

    def _apply(self, row: int, records: list[BlockRecord]) -> None:
        self.replica.apply(row, pack_records(records))
        for record in records:
            self.model.apply(row, record)

    # -- what engines do

    @rule(engine=engines, chosen=some_blocks, content=contents)
    def publish(self, engine: int, chosen: set[int], content: int) -> None:
        e = self.engines[engine]
        for block in sorted(chosen - e.ready.keys()):
            e.ready[block] = HASHES[(content + block) % len(HASHES)]
            e.sent.append(e.record(block))

    @rule(engine=engines, chosen=some_blocks)
    def reuse(self, engine: int, chosen: set[int]) -> None:
        e = self.engines[engine]
        for block in sorted(chosen & e.ready.keys()):
            e.sent.append(e.record(block, RETRACT))
            del e.ready[block]
            e.generation[block] += 1

    @rule(engine=engines)
    def restart(self, engine: int) -> None:
        e = self.engines[engine]
        self.replica.drop_row(e.row)
        self.model.heard = {k: v for k, v in self.model.heard.items() if k[0] != e.row}
        self.engines[engine] = self._new_engine()

    # -- what becomes of their events

    @rule(engine=engines, count=st.integers(1, 20))
    def deliver(self, engine: int, count: int) -> None:
        e = self.engines[engine]
        batch = e.sent[e.delivered : e.delivered + count]
        self._apply(e.row, batch)
        e.delivered += len(batch)

    @rule(engine=engines, picks=st.lists(st.integers(0, 1000), min_size=1, max_size=8))
    def deliver_any(self, engine: int, picks: list[int]) -> None:
        """Again, too early, too late, in any order."""
        e = self.engines[engine]
        if e.sent:
            self._apply(e.row, [e.sent[pick % len(e.sent)] for pick in picks])

    @rule(engine=engines, count=st.integers(1, 20))
    def lose(self, engine: int, count: int) -> None:
        e = self.engines[engine]
        e.delivered = min(len(e.sent), e.delivered + count)

    @rule(engine=engines, block=blocks)
    def forget(self, engine: int, block: int) -> None:
        e = self.engines[engine]
        generation, tag = self.model.published().get((e.row, block), (None, 0))
        if generation is not None:
            stale = BlockRecord(tag.to_bytes(32, "little"), block, generation, 0)
            self.replica.forget(e.row, e.epoch, pack_records([stale]))
            self.model.apply(e.row, stale._replace(kind=RETRACT))
            e.forgotten.add((block, generation))

    # -- scans

    @rule(engine=engines, passed=st.integers(0, NUM_BLOCKS))
    def begin_scan(self, engine: int, passed: int) -> None:
        e = self.engines[engine]
        e.scan = Scan(self.replica.tombstones(e.row), e.scanned(0, passed), passed)

    @precondition(lambda self: any(e.scan for e in self.engines))
    @rule()
    def end_scan(self) -> None:
        e = next(e for e in self.engines if e.scan)
        before, seen, passed = e.scan
        e.scan = None
        self._resync(e, before, seen + e.scanned(passed, NUM_BLOCKS))

    @rule(engine=engines)
    def scan_at_once(self, engine: int) -> None:
        e = self.engines[engine]
        self._resync(e, self.replica.tombstones(e.row), e.scanned(0, NUM_BLOCKS))
        held = {b: g for (row, b), (g, _) in self.model.published().items() if row == e.row}
        true = {b: e.generation[b] for b in e.ready}
        known = {b: g for b, g in true.items() if (b, g) not in e.forgotten}
        assert held.items() <= true.items(), "nothing stale is left"
        assert not self.grows or held == known, "and nothing is missing"

    def _resync(self, e: Engine, before: bytes, seen: list[BlockRecord]) -> None:
        self.replica.resync(e.row, before, pack_records(seen))
        for block, (tag, generation) in published_blocks(before).items():
            if block not in {r.block_id for r in seen}:
                gone = BlockRecord(tag.to_bytes(32, "little"), block, generation, 0, RETRACT)
                self.model.apply(e.row, gone)
        for record in seen:
            self.model.apply(e.row, record)

    # -- what lookups find

    @rule(
        wanted=st.lists(contents, max_size=8),
        start=st.integers(0, 3),
        masked=st.sets(engines),
        from_outside=st.booleans(),
    )
    def look_up(self, wanted: list[int], start: int, masked: set[int], from_outside: bool) -> None:
        rows = {self.engines[engine].row for engine in masked}
        hashes = [HASHES[content] for content in wanted]
        asked = read_again(self.replica) if from_outside else self.replica
        runs = asked.lookup(hashes, start, len(hashes), sum(1 << row for row in rows))
        found = [(row, r) for row, records in runs for r in unpack_records(records)]
        length, owners = self.model.expected_runs(hashes[start:], rows)
        assert (len(found), len(runs)) == (length, owners)
        published = self.model.published()
        for block_hash, (row, r) in zip(hashes[start:], found, strict=False):
            assert row in rows
            assert r.block_hash == block_hash
            assert published[row, r.block_id] == (r.generation, tag_of(block_hash))

    # -- what always holds

    @invariant()
    def holds_what_the_rule_leaves(self) -> None:
        held = {(e.row, e.block_id): (e.generation, e.tag) for e in self.replica.entries()}
        assert held == self.model.published()
        assert wrong_in(self.replica) == []

    @invariant()
    def rows_are_all_there(self) -> None:
        rows = {row.row: row for row in self.replica.rows()}
        assert rows.keys() == {e.row for e in self.engines}
        assert all(row.state is RowState.LIVE for row in rows.values())


class FullIndex(GrowingIndex):
    grows = False


TestGrowingIndex = GrowingIndex.TestCase
TestFullIndex = FullIndex.TestCase
TestGrowingIndex.settings = TestFullIndex.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
