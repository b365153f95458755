"""The loads of imports while they are under way: what ranks report of them, and how they end."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence, Set
from itertools import count
from typing import TYPE_CHECKING, Any

from kvshm._base.ids import BlockId, LoadId
from kvshm.halves import LOADS_LOST, ONE_FULL_GROUP, LoadOrder, LoadReport, SchedulerHalf

from .ready_peers import ReadyPeers
from .request_import import RequestImport, Stage, Way
from .twins import Twins

if TYPE_CHECKING:
    from .tracing import ImportTracer


class RunningLoads:
    """From the allocation of an import's blocks to the reports of all ranks.  Scheduler's
    thread."""

    def __init__(
        self,
        cache: SchedulerHalf,
        imports: MutableMapping[str, RequestImport],
        peers: ReadyPeers,
        twins: Twins,
        num_ranks: int,
        tracer: ImportTracer | None,
    ) -> None:
        """``imports``: the newest of each request, by its id."""
        self._cache, self._imports = cache, imports
        self._peers, self._twins = peers, twins
        self._num_ranks, self._tracer = num_ranks, tracer
        self.groups = ONE_FULL_GROUP
        self.by_id: dict[LoadId, RequestImport] = {}
        """The imports whose loads are under way.  A request may have several: one that it was
        preempted under lacks its report for a while."""
        self._attempts = count()

    def new_id(self, import_: RequestImport) -> LoadId:
        """Return the id of a new load: vLLM knows an asynchronous load by its request's id, and
        does not know the others."""
        is_asynchronous = import_.way is Way.ASYNCHRONOUS
        return import_.request_id if is_asynchronous else next(self._attempts)

    def begin(self, import_: RequestImport) -> None:
        """The load of an import will be handed to the ranks."""
        self.by_id[import_.load.order.load_id] = import_
        self._twins.begun(import_)

    def queued_seconds(self) -> float:
        """Estimated seconds of the copies that earlier steps have begun: a rank makes one copy
        after the other."""
        return sum(
            self._cache.planner.load_seconds(import_.load.order)
            for import_ in self.by_id.values()
            if import_.way is Way.ASYNCHRONOUS and import_.stage is Stage.LOADING
        )

    def drop(self, load_ids: Iterable[LoadId]) -> None:
        """Forget these imports, still unfinished although all ranks have reported: something
        failed, and requests for the same prefix must not wait for them."""
        for load_id in load_ids:
            if (import_ := self.by_id.pop(load_id, None)) is not None:
                import_.load.bad = set(import_.load.targets)
                self._end(import_)
                self.compute_from_now(import_.request)  # also if it was to fill no block

    def finish_awaited(
        self, loads: Iterable[LoadOrder], reports: Sequence[LoadReport]
    ) -> list[RequestImport]:
        """A step that waited for these loads has ended with these ``reports`` of its ranks.  A
        load counts only as a whole: its request has computed on top of all its blocks."""
        results = []
        for order in loads:
            if (import_ := self.by_id.get(order.load_id)) is None:
                continue
            own = [report for report in reports if report.load_id == order.load_id]
            self._peers.record_late(own)
            heard = len(own) == self._num_ranks and bool(order.pieces) and not order.lost
            if not heard or any(report.bad for report in own):
                own.append(LoadReport(order.load_id, order.targets))
                self.compute_from_now(import_.request)  # also if it was to fill no block
            import_.load.reports = own
            self._finish(order.load_id)
            results.append(import_)
        return results

    def reported(self, reports: Iterable[LoadReport]) -> set[BlockId]:
        """Keep what ranks have reported; a load is finished only when vLLM calls ``finish``.
        Returns the blocks that must not be used."""
        bad = {block for report in reports for block in report.bad}
        for report in reports:
            if (import_ := self.by_id.get(report.load_id)) is None:
                continue
            import_.load.reports.append(report)
            if report.bad and not self.groups.is_single_full_attention:
                bad.update(import_.load.targets)
        return bad

    def finish(self, request_ids: Iterable[str]) -> list[RequestImport]:
        """All ranks have reported these requests: finish their imports."""
        return [self._finish(name) for name in request_ids if name in self.by_id]

    def _finish(self, load_id: LoadId) -> RequestImport:
        """End an import.  A rank without a report has not filled any block."""
        import_ = self.by_id[load_id]
        load = import_.load
        if len(load.reports) < self._num_ranks:
            load.reports.append(LoadReport(load_id, load.targets))
        load.bad = self._cache.planner.end_load(load.order, load.reports)
        del self.by_id[load_id]
        self._end(import_)
        if load.bad:
            self.compute_from_now(import_.request)
        self.tell_tracer(import_)
        return import_

    def tell_tracer(self, import_: RequestImport) -> None:
        """The import has ended, or its request before anything was allocated."""
        if self._tracer is not None and import_.trace is not None:
            self._tracer.ended(import_)

    def _end(self, import_: RequestImport) -> None:
        """The load of an import is under way no more."""
        self._twins.ended(import_)
        waits = import_.way is Way.ASYNCHRONOUS and self._imports.get(import_.request_id) is import_
        import_.move_to(Stage.LOADED if waits else Stage.ENDED)

    def compute_from_now(self, request: Any) -> None:
        """Import nothing more for this request: an import of it has lost blocks."""
        if not request.is_finished():
            known = self._imports.setdefault(request.request_id, RequestImport(request))
            known.may_import = False

    def under_way(self) -> set[str]:
        """Requests that vLLM holds back because not every rank has reported their load."""
        return {i.request_id for i in self.by_id.values() if i.way is Way.ASYNCHRONOUS}

    def discard_loads(self, request_ids: Iterable[str]) -> None:
        """Finish loads that have ended and that no rank will report: they bring nothing."""
        for request_id in request_ids:
            self._finish(request_id)

    def give_up(self, request: Any) -> Set[BlockId]:
        """Nobody will report the load of this request, which is computed.  Returns the blocks that
        the load was to fill, as far as it is known."""
        self._cache.count(LOADS_LOST)
        if request.request_id in self.by_id:
            return self._finish(request.request_id).load.bad
        self.compute_from_now(request)
        return set()
