"""The loads of imports while they are under way: what ranks report of them, and how they end.

A request may wait for another one's import of its prefix: copied once, it is theirs (twins.py)."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence, Set
from itertools import count
from typing import TYPE_CHECKING, Any

from kvshm._base.ids import BlockId, LoadId
from kvshm.halves import LOADS_LOST, ONE_FULL_GROUP, LoadOrder, LoadReport, SchedulerHalf

from .at_once import ReadyPeers
from .request_import import Load, LoadedBlocks, RequestImport, Span, Stage, Way

if TYPE_CHECKING:
    from .tracing import ImportTracer


class RunningLoads:
    """Scheduler's thread."""

    def __init__(
        self,
        cache: SchedulerHalf,
        imports: MutableMapping[str, RequestImport],
        peers: ReadyPeers,
        num_ranks: int,
        tracer: ImportTracer | None,
    ) -> None:
        """``imports``: the newest of each request, by its id."""
        self._cache, self._imports = cache, imports
        self._peers, self._num_ranks = peers, num_ranks
        self._tracer = tracer
        self.groups = ONE_FULL_GROUP
        self.by_id: dict[LoadId, RequestImport] = {}
        """The imports whose loads are under way.  A request may have several: the report of one
        that it was preempted under comes later."""
        self._by_first_hash: dict[bytes, RequestImport] = {}
        """The newest of these for each hash of a first block."""
        self._attempts = count()

    def begin(self, import_: RequestImport, span: Span, blocks: tuple[LoadedBlocks, ...]) -> None:
        """Give an import a load without copies yet, and count it as under way.  The load has its
        request's id if it is one that vLLM knows."""
        is_asynchronous = import_.way is Way.ASYNCHRONOUS
        load_id = import_.request_id if is_asynchronous else next(self._attempts)
        targets = tuple(block for part in blocks for block in part.blocks)
        import_.load = Load(LoadOrder.of_nothing(load_id, targets), span, blocks)
        import_.move_to(Stage.ALLOCATED)
        self.by_id[load_id] = import_
        if span.first_hash is not None:
            self._by_first_hash[span.first_hash] = import_

    def of_block(self, block_hash: bytes) -> RequestImport | None:
        """Return the import under way, if there is one, that begins with this block.  Not one whose
        request has ended: vLLM gives its blocks no hashes."""
        found = self._by_first_hash.get(block_hash)
        return None if found is None or found.request.is_finished() else found

    def queued_seconds(self) -> float:
        """Estimated seconds of the copies that a new one waits for: a rank makes one at a time."""
        return sum(
            self._cache.planner.load_seconds(import_.load.order)
            for import_ in self.by_id.values()
            if import_.way is Way.ASYNCHRONOUS and import_.stage is Stage.LOADING
        )

    def seconds_left(self, import_: RequestImport) -> float:
        """Estimated seconds of the copies up to that of an asynchronous import under way, and of
        those that have been begun before it."""
        total = 0.0
        for other in self.by_id.values():
            if other.way is Way.ASYNCHRONOUS:
                total += self._cache.planner.load_seconds(other.load.order)
            if other is import_:
                break
        return total

    def drop(self, load_ids: Iterable[LoadId]) -> None:
        """Forget imports that an error has left unfinished although all ranks have reported, so
        that no request waits for them."""
        for load_id in load_ids:
            if (import_ := self.by_id.pop(load_id, None)) is not None:
                import_.load.bad = set(import_.load.targets)
                self._end(import_)
                self.compute_from_now(import_.request)  # also if it was to fill no block

    def finish_at_once(
        self, loads: Iterable[LoadOrder], reports: Sequence[LoadReport]
    ) -> list[RequestImport]:
        """Finish the loads that a step waited for, which its ranks have reported.  A load counts
        only as a whole: its request has computed on top of all its blocks."""
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
        """Keep the ranks' reports until ``finish``; returns the blocks that must not be used."""
        bad = {block for report in reports for block in report.bad}
        for report in reports:
            if (import_ := self.by_id.get(report.load_id)) is None:
                continue
            import_.load.reports.append(report)
            if report.bad and not self.groups.is_single_full_attention:
                bad.update(import_.load.targets)
        return bad

    def finish(self, request_ids: Iterable[str]) -> list[RequestImport]:
        """Finish the imports of these requests, which all ranks have reported."""
        return [self._finish(name) for name in request_ids if name in self.by_id]

    def _finish(self, load_id: LoadId) -> RequestImport:
        """A rank without a report has not filled any block."""
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
        if self._tracer is not None and import_.trace is not None:
            self._tracer.ended(import_)

    def _end(self, import_: RequestImport) -> None:
        first_hash = import_.load.span.first_hash
        if first_hash is not None and self._by_first_hash.get(first_hash) is import_:
            del self._by_first_hash[first_hash]
        waits = import_.way is Way.ASYNCHRONOUS and self._imports.get(import_.request_id) is import_
        import_.move_to(Stage.LOADED if waits else Stage.ENDED)

    def compute_from_now(self, request: Any) -> None:
        """Import nothing more for a request that has lost blocks of an import."""
        if not request.is_finished():
            known = self._imports.setdefault(request.request_id, RequestImport(request))
            known.may_import = False

    def under_way(self) -> set[str]:
        """Requests that vLLM holds back because not every rank has reported their load."""
        return {i.request_id for i in self.by_id.values() if i.way is Way.ASYNCHRONOUS}

    def spoil(self, import_: RequestImport) -> Sequence[BlockId]:
        """Use nothing of what an import brings, or has brought; returns all of its blocks."""
        load = import_.load
        load.reports.append(LoadReport(load.order.load_id, load.targets))
        load.bad = set(load.targets)
        return load.targets

    def give_up(self, request: Any) -> Set[BlockId]:
        """Finish a request's load that no rank will report; returns the blocks that it was to fill,
        if it is known."""
        self._cache.count(LOADS_LOST)
        if request.request_id in self.by_id:
            return self._finish(request.request_id).load.bad
        self.compute_from_now(request)
        return set()
