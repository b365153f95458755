"""The loads of one rank: the copies under way, and what vLLM and the scheduler get of their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvshm._base.ids import BlockId, LoadId
from kvshm.halves import POLL_SECONDS, LoadOrder, LoadReport, RankHalf

from .messages import RankReport

GIVE_UP_SECONDS = 1.0
"""How long a reset waits for copies under way, which take milliseconds."""


class RankLoads:
    """Used by the worker's main thread."""

    def __init__(
        self, cache: RankHalf | None, next_report: Callable[[], RankReport], by_block: bool
    ) -> None:
        """``cache`` is None while this rank cannot share: every load fails then.  ``by_block``:
        vLLM goes on from the first bad block of a load, as with one group of full attention;
        otherwise it begins the whole load again."""
        self._cache, self._next_report, self._by_block = cache, next_report, by_block
        self.under_way: dict[LoadId, LoadOrder] = {}
        self._outdated: set[LoadId] = set()
        """Those that began before the weights changed: they bring nothing."""
        self._finished: set[LoadId] = set()
        self._failed: set[LoadId] = set()
        self._bad: set[BlockId] = set()

    def begin(self, orders: list[LoadOrder]) -> None:
        """Begin these loads, and take each from ``orders`` once it has begun: what is left when a
        hook fails is begun again, to be reported.  Does not block."""
        while orders:
            order = orders[0]
            self.under_way[order.load_id] = order
            if self._cache is None:
                self._end(LoadReport(order.load_id, order.targets + order.lost))
            else:
                self._cache.begin_load(order)
            orders.pop(0)

    def outdate(self) -> None:
        """The weights change: the loads under way bring nothing any more."""
        self._outdated |= self.under_way.keys()

    def collect(self, linger: float = 0.0) -> None:
        """Report the loads that have ended; waits up to ``linger`` seconds for the others."""
        for report in self._cache.poll(linger) if self._cache is not None else ():
            self._end(report)

    def _end(self, report: LoadReport) -> None:
        order = self.under_way.pop(report.load_id, None)
        if order is not None and report.load_id in self._outdated:
            report = LoadReport(order.load_id, order.targets + order.lost)
        self._outdated.discard(report.load_id)
        self._finished.add(report.load_id)  # first: vLLM waits for it
        if self._by_block:
            self._bad.update(report.bad)
        elif report.bad:
            self._failed.add(report.load_id)
        self._next_report().loads.append(report)

    def wait_for_end(self, load_ids: Iterable[LoadId]) -> set[LoadId]:
        """Wait up to GIVE_UP_SECONDS for loads whose epoch has ended; returns the ended loads that
        were not reported."""
        wanted, deadline = set(load_ids), time.monotonic() + GIVE_UP_SECONDS
        self.collect()
        while wanted & self.under_way.keys() and time.monotonic() < deadline:  # a thread ends them
            time.sleep(POLL_SECONDS)
            self.collect()
        return wanted & self._finished

    def end(self, load_ids: Iterable[LoadId]) -> set[LoadId]:
        """End these loads, wait for that up to GIVE_UP_SECONDS, and never report them; returns
        those that this rank does not carry out any more.  It may have reported them, or never have
        heard of them.  Loads that have ended by themselves are reported with the next step."""
        self.collect()
        wanted = set(load_ids) - self._finished
        for load_id in wanted & self.under_way.keys():
            if self._cache is not None and self._cache.carries_out(load_id):
                self._cache.cancel(load_id)
            else:
                del self.under_way[load_id]  # it failed to begin
        self.wait_for_end(wanted)
        ended = wanted - self.under_way.keys()
        self.forget(ended)
        return ended

    def forget(self, load_ids: Iterable[LoadId]) -> None:
        """Drop the reports of these loads, which have ended."""
        gone, report = set(load_ids), self._next_report()
        bad = {block for r in report.loads if r.load_id in gone for block in r.bad}
        report.loads = [r for r in report.loads if r.load_id not in gone]
        self._finished -= gone
        self._failed -= gone
        self._bad -= bad

    def take_finished(self) -> tuple[set[LoadId], set[LoadId]]:
        """Return the requests whose loads have ended on this rank, good or bad, and those of them
        that vLLM has to begin again: none if it goes on from the first block in ``take_bad``."""
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def take_bad(self) -> set[BlockId]:
        """Return the blocks of ended loads whose contents must not be used.  vLLM accepts blocks
        from engines with one group only."""
        bad, self._bad = self._bad, set()
        return bad
