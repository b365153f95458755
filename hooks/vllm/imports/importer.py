"""The import of blocks: which requests get blocks from another engine, and with what result."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvshm._base.ids import Epoch
from kvshm.config import Config
from kvshm.halves import (
    MISS_CHEAPER,
    MISS_FAILED,
    MISS_NO_ROOM,
    MISS_NOT_IMPORTING,
    MISS_NOT_READ,
    MISS_NOT_SHARED,
    MISS_OWN,
    Counter,
    Groups,
    LoadOrder,
    Part,
    Plan,
    SchedulerHalf,
)

from ..contents import Contents
from ..request_options import may_share
from .at_once import AtOnce, ReadyPeers
from .held_requests import HeldRequests
from .lookups import Lookups
from .pool_room import NO_ROOM_SECONDS, PoolRoom
from .request_import import NoRoom, RequestImport, Span, Stage, Tables, Way, loaded_blocks
from .running_loads import RunningLoads
from .twins import Twins

if TYPE_CHECKING:
    from .tracing import ImportTracer

LINGER_SECONDS = 0.002
SECONDS_BEGUN = 0.02
"""Longest estimated time of the asynchronous copies that one step begins, if there are several:
running requests share memory and cores with them."""
STEPS_LOST = 2
"""How many steps later than a local hit an asynchronous import is ready, besides its copy."""


@dataclass(slots=True)
class _Step:
    """What the step being built has of imports."""

    has_news: bool = False
    """Whether vLLM has asked for a match, or allocated blocks: it may have loads then."""
    imports: dict[str, RequestImport] = field(default_factory=dict)  # by request
    copy_seconds: float = 0.0
    """Estimated time of the asynchronous copies that it begins."""


class RequestImporter:
    """Decides on imports, plans them and finishes them.  Scheduler's thread."""

    def __init__(
        self,
        cache: SchedulerHalf,
        config: Config,
        block_size: int,
        num_ranks: int,
        clock: Callable[[], float],
        tracer: ImportTracer | None,
        contents: Contents,
    ) -> None:
        self._cache, self._config, self.contents = cache, config, contents
        self._block_size = block_size  # tokens per hash
        self.room: PoolRoom | None = None
        """vLLM's pool, once it exists."""
        self.lookups = Lookups(cache, block_size, clock)
        self.imports: dict[str, RequestImport] = {}
        """The newest import of each request that has had one, by request."""
        self.step = _Step()
        self.at_once = AtOnce(self.imports)
        self.peers = ReadyPeers(num_ranks, clock)
        self.held = HeldRequests(clock)
        self._clock, self._tracer = clock, tracer
        self.running = RunningLoads(cache, self.imports, self.peers, num_ranks, tracer)
        self.twins = Twins(self.running, cache.planner, block_size, clock)

    def use(self, room: PoolRoom, groups: Groups) -> None:
        """Import into vLLM's pool, and look up what its groups need."""
        self.room, self.lookups.groups, self.running.groups = room, groups, groups
        self.twins.room = room
        search = self._cache.planner.search
        search.groups, search.own_blocks, search.last_own = groups, room.own_blocks, room.last_own

    # -- matching

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        """Return how many tokens beyond the local hit can be imported.  None: ask again, because
        the same prefix is being imported, another engine's events are on their way, or this step
        begins enough copies already."""
        if (tracer := self._tracer) is None or not request.trace_headers:
            return self._match(request, num_local_tokens)
        start = tracer.now()
        found = self._match(request, num_local_tokens)
        import_ = self.imports.setdefault(request.request_id, RequestImport(request))
        tracer.matched(import_, num_local_tokens, start)
        return found

    def _match(self, request: Any, num_local_tokens: int) -> int | None:
        start = num_local_tokens // self._block_size
        stop = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        possible = start < stop
        known = request.request_id in self.imports
        if not (known or (possible and self._cache.planner.has_peers())):
            return 0
        self.step.has_news = True
        import_ = self._matching(request)
        if not possible:
            return 0
        if (reason := self._why_not(import_, start, stop)) is not None:
            self._cache.count(reason)
            return 0
        if request.kv_transfer_params is not None and self.lookups.receipts.wait_for(import_):
            return None
        return self._match_blocks(import_, start, stop)

    def _matching(self, request: Any) -> RequestImport:
        """Return the request's import without what the last match has found; a new one unless it
        was only matched yet."""
        import_ = self.imports.get(request.request_id)
        if import_ is None or import_.has_load:
            may_import = import_ is None or import_.may_import
            if import_ is not None:
                import_.withheld = None  # vLLM has freed its blocks
            import_ = self.imports[request.request_id] = RequestImport(request, may_import)
        import_.plan = import_.withheld = None
        return import_

    def pass_over(self, request_id: str) -> None:
        """In place of ``match`` while nothing may be imported."""
        self._cache.count(MISS_NOT_IMPORTING)
        if (import_ := self.imports.get(request_id)) is not None:
            import_.withheld = None

    def _why_not(self, import_: RequestImport, start: int, stop: int) -> Counter | None:
        """Why nothing is imported for this request, whoever has its blocks; None: no reason."""
        request = import_.request
        if not import_.may_import:
            return MISS_FAILED
        if not self.may_share(request):
            return MISS_NOT_SHARED
        if request.skip_reading_prefix_cache:
            return MISS_NOT_READ
        if self._holds(request.block_hashes[start]):
            return MISS_OWN
        return MISS_CHEAPER if self.twins.computes_sooner(import_, start, stop) else None

    def _match_blocks(self, import_: RequestImport, start: int, stop: int) -> int | None:
        """``match`` for blocks ``start`` to ``stop`` of a request that may import."""
        request, costs = import_.request, self._cache.planner.costs
        if not (ways := self.twins.ways(import_, start, stop)):
            return None
        if not self._fits(import_, self.lookups.groups.blocks_at(start) + 1, ways):
            return 0
        plan = self._find(import_, start, stop)
        if not isinstance(plan, Plan):
            return plan
        seconds = costs.load_seconds(plan.nbytes)
        import_.way = self._way_of(request, plan, seconds)
        at_once = import_.way is Way.AT_ONCE
        own = sum(run.num_blocks for run in plan.own_runs)
        blocks = self.lookups.groups.blocks_at(plan.start + plan.length) + own
        if import_.way in ways and not self._fits(import_, blocks, (import_.way,)):
            return 0
        if not self.lookups.is_worth(
            import_, plan, 0.0 if at_once else STEPS_LOST * costs.step_seconds()
        ):
            return 0
        if import_.way not in ways or not (at_once or self._within_copy_budget(seconds)):
            return None  # the next step may begin it
        if own and self.room is not None:
            self.room.keep(plan.own_blocks())
        if at_once:
            price = costs.compute_seconds(plan.length * self._block_size)
            self.at_once.withhold_hashes(import_, seconds, price)
        import_.plan = plan
        self.step.imports[import_.request_id] = import_
        if self.room is not None:
            self.room.watch()
        return plan.length * self._block_size

    def _find(self, import_: RequestImport, start: int, stop: int) -> Plan | int | None:
        """Return a plan for what the node has, or 0; None if more is coming from a store."""
        plan = self.lookups.find(import_, start, stop)
        if self.lookups.fetches.awaits(import_, plan, start, stop, self.lookups.groups):
            return None
        return plan or 0

    def _holds(self, block_hash: bytes) -> bool:
        """Whether the engine has the next block itself; with several groups one block proves
        nothing."""
        return (
            self.lookups.groups.is_single_full_attention
            and self.room is not None
            and self.room.holds(block_hash)
        )

    def _within_copy_budget(self, seconds: float) -> bool:
        """Whether the step being built may begin one more asynchronous copy; counts that copy."""
        others = self.step.copy_seconds
        if others and others + seconds > SECONDS_BEGUN:
            return False
        self.step.copy_seconds += seconds
        return True

    def _way_of(self, request: Any, plan: Plan, seconds: float) -> Way:
        """At once only if the copy is short, its peers are ready, and the request can be undone."""
        if not self.at_once.can_undo(request):
            return Way.ASYNCHRONOUS
        alone = self.room is not None and self.room.is_alone(request)
        ready = self.peers.are_ready({Epoch(run.peer.info.epoch) for run in plan.runs})
        accepted = ready and self.at_once.accepts(seconds + self.running.queued_seconds(), alone)
        return Way.AT_ONCE if accepted else Way.ASYNCHRONOUS

    def _fits(self, import_: RequestImport, blocks: int, ways: tuple[Way, ...]) -> bool:
        """Whether vLLM would admit an import of ``blocks`` blocks in one of these ways.  If not,
        the request would block all requests behind it; it stays refused for a second, or until a
        block becomes free."""
        if (room := self.room) is None:
            return True
        free, refused = room.free(), import_.no_room
        if refused is not None and free <= refused.free and self._clock() < refused.until:
            return False
        if Way.AT_ONCE in ways and free > blocks:
            return True
        if Way.ASYNCHRONOUS in ways and room.admits(blocks, import_.request):
            return True
        self._refuse(import_, free)
        return False

    def _refuse(self, import_: RequestImport, free: int) -> None:
        """Have the request computed, because there is no room for its import."""
        import_.no_room = NoRoom(free, self._clock() + NO_ROOM_SECONDS)
        self._cache.count(MISS_NO_ROOM)

    def holds_back(self, request_id: str) -> bool:
        """Whether vLLM must hold the request back for what ``match`` has found."""
        import_ = self.imports.get(request_id)
        return import_ is None or import_.withheld is None

    def may_share(self, request: Any) -> bool:
        """Whether this request may share, in either direction."""
        return may_share(request, self._config.share) and self.contents.covered(request)

    # -- allocation

    def allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        """Lease the blocks that vLLM has allocated for an import, and plan their load."""
        import_ = self.imports.get(request.request_id)
        if num_external > 0 and (import_ is None or import_.withheld is None):
            self.held.add(request.request_id)  # before anything can fail
        if self._tracer is None or import_ is None or import_.trace is None:
            self._allocated(request, tables, num_external)
            return
        plan, start = import_.plan, self._tracer.now()
        self._allocated(request, tables, num_external)
        self._tracer.leased(import_, plan, start)

    def _allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        import_ = self.imports.get(request.request_id)
        if num_external <= 0:
            if import_ is not None:
                self._scheduled(import_)
            return
        # Register a load before anything can fail: from here on the request waits for a report.
        plan = import_.plan if import_ is not None else None
        if plan is None or plan.length * self._block_size != num_external:
            self._register_lost(request, tables, num_external)
            return
        stop = plan.start + plan.length
        import_ = self._register(request, plan.start, stop, plan.parts, tables)
        nothing, at_once = import_.load.order, import_.way is Way.AT_ONCE
        import_.load.order = self._cache.planner.load(
            plan, nothing.load_id, nothing.lost, attached=at_once
        )

    def _scheduled(self, import_: RequestImport) -> None:
        """Handle a request that vLLM schedules with nothing to load, or another connector loads."""
        if import_.plan is not None and import_.way is Way.ASYNCHRONOUS:
            seconds = self._cache.planner.costs.load_seconds(import_.plan.nbytes)
            self.step.copy_seconds = max(self.step.copy_seconds - seconds, 0.0)  # not begun
        self.at_once.give_withheld(import_)
        import_.forget_match()
        if import_.stage is Stage.LOADED:
            import_.move_to(Stage.ENDED)
        elif not import_.has_load and import_.may_import:
            del self.imports[import_.request_id]

    def allocation_failed(self, request: Any, tables: Tables, num_external: int) -> None:
        """Register an empty load unless ``allocated`` had registered one before it failed."""
        import_ = self.imports.get(request.request_id)
        if import_ is not None and (
            import_.withheld is not None or import_.stage is Stage.ALLOCATED
        ):
            return  # ``loads`` registers an empty load for the former
        self._register_lost(request, tables, num_external)

    def _register_lost(self, request: Any, tables: Tables, num_external: int) -> None:
        """Register an import without a plan: nothing fills its blocks, the last of the tables."""
        groups = self.lookups.groups
        length = min(len(table) * g.scale for g, table in zip(groups.all, tables, strict=True))
        start = length - num_external // self._block_size
        self._register(request, start, length, groups.parts(start, length), tables)

    def _register(
        self,
        request: Any,
        start: int,
        stop: int,
        parts: Iterable[Part] = (),
        tables: Tables = (),
    ) -> RequestImport:
        """Register a load without copies, every target of which is a load error.  The targets are
        the ``parts`` of the request's block ``tables``, for its hashes ``start`` to ``stop``."""
        self.step.has_news = True
        request_id, chain = request.request_id, request.block_hashes
        import_ = self.imports.get(request_id)
        if import_ is None or import_.has_load:
            import_ = self._matching(request)
        import_.way = Way.ASYNCHRONOUS if import_.withheld is None else Way.AT_ONCE
        span = Span.of(chain, start, stop)
        self.running.begin(import_, span, loaded_blocks(chain, parts, tables))
        import_.forget_match()
        self.step.imports[request_id] = import_
        return import_

    # -- the step

    def loads(self, scheduled: Container[str]) -> tuple[list[LoadOrder], list[LoadOrder]]:
        """Return the asynchronous loads and the loads at once of the step being built, which
        computes the requests ``scheduled``.  May be called again until ``step_dispatched``."""
        for request_id, import_ in list(self.step.imports.items()):
            if import_.withheld is None or import_.has_load:
                continue
            if request_id in scheduled:  # kvshm has failed: no load will fill its blocks
                self._register(import_.request, 0, 0)
            else:
                import_.withheld = None
        return self._new_loads(Way.ASYNCHRONOUS), self._new_loads(Way.AT_ONCE)

    def _new_loads(self, way: Way) -> list[LoadOrder]:
        return [i.load.order for i in self.step.imports.values() if i.has_load and i.way is way]

    @property
    def step_waits(self) -> bool:
        """Whether the step being built computes from blocks that a load has yet to fill."""
        return any(import_.way is Way.AT_ONCE for import_ in self.step.imports.values())

    def linger(self, loads: Sequence[LoadOrder], busy: bool) -> float:
        """Seconds that the end of the step with these ``loads`` may wait for loads under way: more
        than 0 if all its copies are shorter than that, or if no other request runs."""
        load_seconds = self._cache.planner.load_seconds
        short = bool(loads) and max(map(load_seconds, loads)) <= LINGER_SECONDS
        return LINGER_SECONDS if short or (self.running.by_id and not busy) else 0.0

    def step_dispatched(self) -> None:
        if self.step.has_news and self.room is not None:
            for request_id, free in self.room.unwatch().items():
                import_ = self.imports.get(request_id)
                if import_ is not None and import_.plan is not None:
                    self._refuse(import_, free)  # it blocks all requests behind it
        for import_ in self.step.imports.values():
            if import_.stage is Stage.ALLOCATED:
                import_.move_to(Stage.LOADING)
        self.step = _Step()

    # -- the end of loads

    def roll_back(self) -> list[RequestImport]:
        """Treat all loads that steps wait for as failed; returns their imports."""
        known = dict.fromkeys((*self.running.by_id.values(), *self.imports.values()))
        imports = [i for i in known if i.has_load and i.can_roll_back]
        self.at_once.undo_all(imports)
        by_id = self.running.by_id
        self.running.drop([name for name, i in by_id.items() if i.way is Way.AT_ONCE])
        for import_ in imports:  # also those that have ended: some of it may have been handled
            import_.load.bad = set(import_.load.targets)
        return imports

    def finish(self, request_ids: Iterable[str]) -> list[RequestImport]:
        """Finish the imports of these requests, which all ranks have reported."""
        self.held.reported(request_ids)
        return self.running.finish(request_ids)

    @property
    def unscheduled(self) -> set[str]:
        """Requests whose load has ended and that vLLM has not scheduled since."""
        return {name for name, i in self.imports.items() if i.stage is Stage.LOADED}

    def waits_for(self, request: Any) -> RequestImport | None:
        """Return the asynchronous import for which vLLM holds a request back, or that has ended and
        after which vLLM has not scheduled it."""
        import_ = self.imports.get(request.request_id)
        if import_ is None or import_.way is not Way.ASYNCHRONOUS:
            return None
        return import_ if import_.stage in (Stage.LOADING, Stage.LOADED) else None

    def has_imported(self, request: Any) -> bool:
        """Whether a request goes on from blocks that were imported for it."""
        import_ = self.imports.get(request.request_id)
        return import_ is not None and import_.stage is Stage.ENDED and bool(import_.load.good)

    def request_finished(self, request_id: str) -> None:
        """Forget a request that has ended; its load goes on until all ranks have reported it."""
        import_ = self.imports.pop(request_id, None)
        self.lookups.fetches.drop(request_id)
        if import_ is not None and import_.stage is Stage.MATCHING:
            self.running.tell_tracer(import_)
