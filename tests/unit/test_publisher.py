"""kvshm.engine.publisher: what is waited for, what is taken back, and how both are counted."""

from __future__ import annotations

from types import SimpleNamespace

from kvshm.engine.epoch_state import EpochState
from kvshm.engine.marks import Marks
from kvshm.engine.publisher import Publisher
from kvshm.node.peers import Peers
from kvshm.roles import Decision
from kvshm.shm.counters import DRAINED, FORCED

from .exporters import HASHES, NUM_BLOCKS, Make


def test_blocks_taken_from_a_slow_importer_are_no_drained_ones(
    exporter: Make, peers: Peers
) -> None:
    table, marks = exporter().table, Marks(NUM_BLOCKS)
    state = EpochState(table, peers, None, None)  # type: ignore[arg-type]  # the others are not touched
    cache = SimpleNamespace(epoch_state=state, role=Decision("", ""))
    sent: list[bytes] = []
    publisher = Publisher(cache, sent.append, budget_seconds=0.0)

    def reuse(count: int, leased: int) -> tuple[int, int]:
        pool = [
            SimpleNamespace(block_id=b, block_hash=HASHES[b] + bytes(4), ref_cnt=1)
            for b in range(count)
        ]
        assert not publisher.publish_marked(marks, pool, [(HASHES, 0, marks.tag(range(count)))])
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


def test_an_engine_that_may_not_export_publishes_nothing(exporter: Make, peers: Peers) -> None:
    table, marks = exporter().table, Marks(NUM_BLOCKS)
    state = EpochState(table, peers, None, None)  # type: ignore[arg-type]  # the others are not touched
    cache = SimpleNamespace(epoch_state=state, role=Decision("found late", ""))
    sent: list[bytes] = []
    publisher = Publisher(cache, sent.append, budget_seconds=0.0)
    pool = [SimpleNamespace(block_id=0, block_hash=HASHES[0] + bytes(4), ref_cnt=1)]
    runs = [(HASHES, 0, marks.tag(range(1)))]
    assert (publisher.publish_marked(marks, pool, runs), sent) == (runs, [])
    cache.role = Decision("", "found late")
    assert (publisher.publish_marked(marks, pool, runs), len(sent)) == ([], 1)
