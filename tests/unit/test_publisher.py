"""kvshm.publisher: what is waited for, what is taken back, and how both are counted."""

from __future__ import annotations

from kvshm.counters import DRAINED, FORCED
from kvshm.publisher import Exports, Lame, Publication
from kvshm.slots import SlotTable

from .exporters import HASHES, Make


def test_blocks_taken_from_a_lame_importer_are_no_drained_ones(exporter: Make) -> None:
    table: SlotTable = exporter().table
    lame = Lame(dict)
    sent: list[bytes] = []
    exports = Exports(table, sent.append, lame, budget_seconds=0.0)

    def reuse(count: int, leased: int) -> tuple[int, int]:
        blocks = list(range(count))
        exports.publish([Publication(b, HASHES[b], None, 0) for b in blocks])
        exports.flush()
        records = sent[-1]
        taken = table.lease(3, records[: leased * (len(records) // count)])
        assert taken[0] == leased
        exports.retract(blocks)
        exports.settle()
        return table.counters.read(DRAINED), table.counters.read(FORCED)

    _, forced = reuse(4, leased=4)
    assert forced == 4, "the budget was spent"
    assert lame.mask() == 1 << 3
    assert reuse(4, leased=2) == (0, 6), "over the leases of the lame"
