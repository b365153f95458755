"""All ranks of an engine that live in one process, used as if they were one."""

from __future__ import annotations

from collections.abc import Sequence

from kvshm._base.ids import BlockId, Epoch, LoadId
from kvshm._engine.load_plan import LoadOrder, LoadReport
from kvshm._rank.rank_half import RankHalf


class Ranks:
    """At least one rank.  Its methods are those of RankHalf, in every rank."""

    def __init__(self, halves: Sequence[RankHalf]) -> None:
        self.halves = tuple(halves)
        self._reports: dict[LoadId, list[LoadReport]] = {}
        """Of loads that some ranks have not reported yet."""
        self._attached = frozenset[Epoch]()

    def attached(self) -> frozenset[Epoch]:
        """The peers that every rank has attached.  Another set only if it has changed."""
        found = frozenset.intersection(*(half.attached() for half in self.halves))
        if found != self._attached:
            self._attached = found
        return self._attached

    def open_epoch(self, epoch: Epoch) -> None:
        """Raises what a rank raises; ``failed`` then gives the reason."""
        for half in self.halves:
            half.open_epoch(epoch)

    @property
    def failed(self) -> str:
        """Why a rank could not open the epoch; empty if all have opened it."""
        return next((half.failed for half in self.halves if half.failed), "")

    def end_epoch(self) -> None:
        for half in self.halves:
            half.end_epoch()

    def begin_load(self, order: LoadOrder) -> None:
        for half in self.halves:
            half.begin_load(order)

    def cancel(self, load_id: LoadId) -> None:
        for half in self.halves:
            half.cancel(load_id)

    def poll(self) -> list[list[LoadReport]]:
        """Return, for each load that the last rank has reported since the last call, the reports
        of all ranks."""
        ended = []
        for half in self.halves:
            for report in half.poll():
                reports = self._reports.setdefault(report.load_id, [])
                reports.append(report)
                if len(reports) == len(self.halves):
                    ended.append(self._reports.pop(report.load_id))
        return ended

    def write_checksums(self, blocks: list[BlockId]) -> None:
        for half in self.halves:
            half.write_checksums(blocks)

    def close(self) -> None:
        for half in self.halves:
            half.close()
