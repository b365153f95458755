"""The loads of one node that are under way.  Not thread-safe: its node's lock guards it."""

from __future__ import annotations

from kvshm._base.ids import BlockId, Epoch, LoadId
from kvshm._engine.load_plan import LoadOrder, Plan

from .halves_in_one import HalvesInOne
from .load import Load, LoadDriver
from .own_blocks import OwnBlocks
from .single_blocks import LoadOfBlocks


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
        load = Load(node, self._next_id(), targets)
        self._begin(halves, load, halves.cache.planner.load(plan, load._id, targets))
        return load

    def begin_blocks(
        self, node: LoadDriver, halves: HalvesInOne, plan: Plan, targets: list[BlockId]
    ) -> LoadOfBlocks:
        """The same for single blocks, without leases."""
        load = LoadOfBlocks(node, self._next_id(), targets)
        self._begin(halves, load, halves.cache.planner.load_blocks(plan, load._id, targets))
        return load

    def _next_id(self) -> LoadId:
        self._number += 1
        return self._number

    def _begin(self, halves: HalvesInOne, load: Load, order: LoadOrder) -> None:
        self._under_way[load._id] = load, order
        self._own.begin_load(load.targets)
        halves.ranks.begin_load(order)

    def failed(self, node: LoadDriver, targets: list[BlockId]) -> Load:
        """Return a load that cannot be carried out."""
        load = Load(node, 0, targets)
        load._end(0, targets)
        return load

    def failed_blocks(self, node: LoadDriver, targets: list[BlockId]) -> LoadOfBlocks:
        """The same for single blocks."""
        load = LoadOfBlocks(node, 0, targets)
        load._end(0, targets)
        return load

    def collect(self, halves: HalvesInOne) -> None:
        """End the loads that all ranks have reported; does not block."""
        planner = halves.cache.planner
        if (attached := halves.ranks.attached()) is not self._attached:
            self._attached = attached
            planner.attached(attached)
        for reports in halves.ranks.poll():
            load, order = self._under_way.pop(reports[0].load_id)
            bad = planner.end_load(order, reports)
            self._own.end_load(load.targets)
            load._end(planner.take_results()[-1].num_blocks, bad)

    def end_all(self) -> None:
        """No report will come any more, and nothing writes: all loads have failed."""
        for load, _ in self._under_way.values():
            self._own.end_load(load.targets)
            load._end(0, load.targets)
        self._under_way.clear()
