"""kvshm._engine.publisher: what is waited for, what is taken back, and how both are counted."""

from __future__ import annotations

from types import SimpleNamespace

from kvshm._base.roles import Decision
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.marks import Marks
from kvshm._engine.publisher import Publisher
from kvshm._node.peers import Peers
from kvshm._shm.layout import RecordKind, SlotState, unpack_records
from kvshm._shm.statistics import DRAINED, FORCED

from .exporters import HASHES, NUM_BLOCKS, Make
from .served import AnyTable


def publisher_of(table: AnyTable, peers: Peers, sent: list[bytes]) -> Publisher:
    """The publisher of an engine with this table, which exports; ``sent`` gets its events."""
    state = EpochState(table, peers, None, None)  # type: ignore[arg-type]  # the others are not touched
    cache = SimpleNamespace(epoch_state=state, role=Decision("", ""))
    return Publisher(cache, sent.append, budget_seconds=0.0)


def test_blocks_taken_from_a_slow_importer_are_no_drained_ones(
    exporter: Make, peers: Peers
) -> None:
    table, marks, sent = exporter().table, Marks(NUM_BLOCKS), list[bytes]()
    publisher = publisher_of(table, peers, sent)

    def reuse(count: int, leased: int) -> tuple[int, int]:
        pool = [
            SimpleNamespace(block_id=b, block_hash=HASHES[b] + bytes(4), ref_cnt=1)
            for b in range(count)
        ]
        assert not publisher.publish_marked(
            marks, pool, [(HASHES, 0, marks.with_versions(range(count)))]
        )
        records = sent[-1]
        taken = table.lease(3, records[: leased * (len(records) // count)])
        assert taken[0] == leased
        publisher.retract(marks.withdraw(list(range(count))))
        publisher.drain_before_dispatch()
        return table.counters.read(DRAINED), table.counters.read(FORCED)

    _, forced = reuse(4, leased=4)
    assert forced == 4, "the budget was spent"
    assert publisher._slow.mask(peers.tables_by_bit) == 1 << 3
    assert reuse(4, leased=2) == (0, 6), "over the leases of the slow importer"


def test_peers_hear_of_what_was_withdrawn_before_what_took_its_place(
    exporter: Make, peers: Peers
) -> None:
    """At once, although no step follows: an engine that falls idle dispatches none."""
    table, marks, sent = exporter().table, Marks(NUM_BLOCKS), list[bytes]()
    publisher = publisher_of(table, peers, sent)
    for content in (1, 2):
        pool = [SimpleNamespace(block_id=0, block_hash=HASHES[content] + bytes(4), ref_cnt=1)]
        publisher.retract_marked(marks, [0])
        publisher.publish_marked(marks, pool, [(HASHES[content:], 0, marks.with_versions([0]))])
    reported = [(r.kind, r.block_hash) for r in unpack_records(b"".join(sent))]
    publish, retract = RecordKind.PUBLISH, RecordKind.RETRACT
    assert reported == [(publish, HASHES[1]), (retract, HASHES[1]), (publish, HASHES[2])]


def test_an_engine_that_may_not_export_publishes_nothing(exporter: Make, peers: Peers) -> None:
    table, marks = exporter().table, Marks(NUM_BLOCKS)
    state = EpochState(table, peers, None, None)  # type: ignore[arg-type]  # the others are not touched
    cache = SimpleNamespace(epoch_state=state, role=Decision("found late", ""))
    sent: list[bytes] = []
    publisher = Publisher(cache, sent.append, budget_seconds=0.0)
    pool = [SimpleNamespace(block_id=0, block_hash=HASHES[0] + bytes(4), ref_cnt=1)]
    runs = [(HASHES, 0, marks.with_versions(range(1)))]
    assert (publisher.publish_marked(marks, pool, runs), sent) == (runs, [])
    cache.role = Decision("", "found late")
    assert (publisher.publish_marked(marks, pool, runs), len(sent)) == ([], 1)


def test_a_block_handed_out_between_two_epochs_is_not_sound_in_the_next(
    exporter: Make, peers: Peers
) -> None:
    """Else its new contents would be published as what this engine computed before."""
    marks = Marks(NUM_BLOCKS)
    pool = [
        SimpleNamespace(block_id=b, block_hash=HASHES[b] + bytes(4), ref_cnt=1) for b in range(2)
    ]
    assert marks.write(pool, 0, 2, 2)[1] == []
    between = marks.with_versions([0, 1])
    cache = SimpleNamespace(epoch_state=None, role=Decision("", ""))
    sent: list[bytes] = []
    publisher = Publisher(cache, sent.append, budget_seconds=0.0)
    assert not publisher.retract_marked(marks, pool[1:])
    table = exporter().table
    cache.epoch_state = EpochState(table, peers, None, None)  # type: ignore[arg-type]  # not touched
    assert marks.sound(pool, 2) == 1
    assert marks.sound(pool[1:], 1) == 0
    assert not publisher.publish_marked(marks, pool, [(HASHES, 0, between)])
    assert [table.slot(block).state for block in range(2)] == [SlotState.READY, SlotState.EMPTY]
