"""The loads of one node that are under way.  Not thread-safe: its node's lock guards it."""

from __future__ import annotations

from kvshm._base.ids import BlockId, Epoch, LoadId
from kvshm._engine.load_plan import LoadOrder, Plan

from .halves_in_one import HalvesInOne
from .load import Load, LoadDriver
from .own_blocks import OwnBlocks


class Loads:
    """Begins loads, and ends them with what the rank reports."""

    def __init__(self, own: OwnBlocks) -> None:
        self._own = own
        self._under_way: dict[LoadId, tuple[Load, LoadOrder]] = {}
        self._number = 0
        self._attached: frozenset[Epoch] = frozenset()

    def begin(
        self, node: LoadDriver, halves: HalvesInOne, plan: Plan, targets: list[BlockId]
    ) -> Load:
        """Take the leases and have the rank copy.  Nobody may read the targets any more."""
        self._number += 1
        load = Load(node, self._number, targets)
        order = halves.cache.planner.load(plan, load._id, targets)
        self._under_way[load._id] = load, order
        self._own.begin_load(targets)
        halves.rank.begin_load(order)
        return load

    def failed(self, node: LoadDriver, targets: list[BlockId]) -> Load:
        """Return a load that cannot be carried out."""
        load = Load(node, 0, targets)
        load._end(0)
        return load

    def collect(self, halves: HalvesInOne) -> None:
        """End the loads that the rank has reported; does not block."""
        planner = halves.cache.planner
        if (attached := halves.rank.attached()) is not self._attached:
            self._attached = attached
            planner.attached(attached)
        for report in halves.rank.poll():
            load, order = self._under_way.pop(report.load_id)
            planner.end_load(order, [report])
            self._own.end_load(load.targets)
            load._end(planner.take_results()[-1].num_blocks)

    def end_all(self) -> None:
        """No report will come any more, and nothing writes: all loads have failed."""
        for load, _ in self._under_way.values():
            self._own.end_load(load.targets)
            load._end(0)
        self._under_way.clear()
