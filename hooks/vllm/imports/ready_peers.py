"""The peers for whose copies a step may wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from kvshm._base.ids import Epoch
from kvshm.halves import LoadFailure, LoadReport

LATE_SECONDS = 10.0
"""For how long no step waits for a peer whose copy was too late: while copies take longer than
estimated, each request would wait in vain and be preempted."""


class ReadyPeers:
    """Which peers all ranks have attached, and which were too late.  Scheduler's thread."""

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self.attached: dict[int, frozenset[Epoch]] = {}
        """Epochs of the peers that each rank has attached, as reported by the ranks."""
        self._late_until: dict[Epoch, float] = {}

    def record_attached(self, by_rank: Mapping[int, frozenset[Epoch]]) -> frozenset[Epoch]:
        """Record which peers these ranks have attached; returns those that all ranks have."""
        self.attached.update(by_rank)
        if len(self.attached) < self._num_ranks:
            return frozenset()
        return frozenset.intersection(*self.attached.values())

    def record_late(self, reports: Iterable[LoadReport]) -> None:
        """A step has waited for loads, which have ended with these reports."""
        for failure in (failure for report in reports for failure in report.failures):
            if failure.reason is LoadFailure.TOO_LATE:
                self._late_until[failure.peer_epoch] = self._clock() + LATE_SECONDS

    def are_ready(self, peers: Set[Epoch]) -> bool:
        """Whether a step may wait for copies from all of these."""
        now = self._clock()
        self._late_until = {e: until for e, until in self._late_until.items() if now < until}
        return peers.isdisjoint(self._late_until) and peers <= self.record_attached({})
