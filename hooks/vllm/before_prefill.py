"""The import of blocks: which requests get blocks from another engine, and with what result.

    new request      look up the blocks this engine lacks in the replica    (read only)
    blocks allocated lease the blocks and plan the load; a lost block is a load error
    step built       the load travels to the ranks, which copy and re-check
    output arrives   good blocks count as computed; vLLM computes the bad blocks itself

Imports whole blocks only, never the prompt's last token, and nothing for a request that lost one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence, Set
from itertools import count
from typing import Any

from kvshm._ground.ids import BlockId, Epoch, LoadId
from kvshm.config import Config
from kvshm.halves import (
    LOADS_LOST,
    MISS_FAILED,
    MISS_NO_ROOM,
    MISS_NOT_IMPORTING,
    MISS_NOT_READ,
    MISS_NOT_SHARED,
    MISS_OWN,
    Counter,
    Groups,
    LoadOrder,
    LoadReport,
    Part,
    Plan,
    SchedulerHalf,
)

from .at_once import AtOnce
from .held_requests import HeldRequests
from .imports import Import, Tables, Way, loaded_blocks
from .lookups import Lookups
from .pool_room import NO_ROOM_SECONDS, PoolRoom
from .ready_peers import ReadyPeers
from .request_share import may_share
from .twins import Twins

LINGER_SECONDS = 0.002
SECONDS_BEGUN = 0.02
"""Longest estimated time of all asynchronous copies that one step begins, unless there is only one:
the requests that run meanwhile share memory and cores with these copies."""
STEPS_LOST = 2
"""How many steps later than a local hit an asynchronous import is ready, besides its copy."""


class RequestImporter:
    """Decides on imports, plans them and finishes them.  Scheduler's thread."""

    def __init__(
        self,
        cache: SchedulerHalf,
        config: Config,
        block_size: int,
        num_ranks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache, self._planner = cache, cache.planner
        self._config = config
        self._block_size = block_size  # tokens per hash
        self.room: PoolRoom | None = None
        """vLLM's pool, once it exists."""
        self.lookups = Lookups(self._planner, block_size, clock)
        self.has_news = False
        """Whether the step being built may have loads, or has used some of its budgets: vLLM has
        asked for a match, or allocated blocks, since ``step_dispatched``."""
        self.at_once = AtOnce()
        self.peers = ReadyPeers(num_ranks, clock)
        self.held = HeldRequests(clock)
        self._num_ranks, self._clock = num_ranks, clock
        self._attempts = count()
        self._begun = 0.0
        """Estimated seconds of the asynchronous copies that the step being built begins."""
        self._plans: dict[str, Plan] = {}
        self._imports: dict[LoadId, Import] = {}
        """Imports under way, by the ids of their loads."""
        self._new: dict[LoadId, Import] = {}
        """Those whose load the step being built hands over to the ranks."""
        self._twins = Twins(clock)
        self._failed: set[str] = set()
        self._had_no_room: dict[str, tuple[int, float]] = {}  # free blocks then, and until when
        self._ended: set[str] = set()
        """Requests that ended while their load was under way."""
        self.unscheduled: set[str] = set()
        """Requests whose load has ended and that vLLM has not scheduled since."""

    def use(self, room: PoolRoom, groups: Groups) -> None:
        """vLLM's pool exists: import into it, and look up what its groups need."""
        self.room, self.lookups.groups = room, groups
        self._planner.search.groups = groups
        self._planner.search.own_blocks = room.own_blocks

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        """Return how many tokens beyond the local hit can be imported.  None: ask again, because
        the same prefix is being imported, or because this step begins enough copies already.
        vLLM may call this again for the same request."""
        request_id = request.request_id
        start = num_local_tokens // self._block_size
        stop = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        possible = start < stop
        if not (self._plans or self.at_once.withheld or (possible and self._planner.has_peers())):
            return 0
        self.has_news = True
        self.at_once.forget(request_id)
        self._plans.pop(request_id, None)  # vLLM had another reason than room not to schedule it
        if not possible:
            return 0
        if (reason := self._why_not(request, start)) is not None:
            self._cache.count(reason)
            return 0
        return self._match_blocks(request, start, stop)

    def pass_over(self, request_id: str) -> None:
        """In place of ``match`` while nothing may be imported."""
        self._cache.count(MISS_NOT_IMPORTING)
        self.at_once.forget(request_id)

    def _why_not(self, request: Any, start: int) -> Counter | None:
        """Why nothing is imported for this request, whoever has its blocks; None: no reason."""
        if request.request_id in self._failed:
            return MISS_FAILED
        if not self.may_share(request):
            return MISS_NOT_SHARED
        if request.skip_reading_prefix_cache:
            return MISS_NOT_READ
        return MISS_OWN if self._holds(request.block_hashes[start]) else None

    def _match_blocks(self, request: Any, start: int, stop: int) -> int | None:
        """``match`` for blocks ``start`` to ``stop`` of a request that may import."""
        request_id = request.request_id
        if self._twins.waits(request_id, request.block_hashes[start]):
            return None
        if not self._fits(request, self.lookups.groups.blocks_at(start) + 1, (True, False)):
            return 0
        if (plan := self.lookups.find(request, start, stop)) is None:
            return 0
        seconds, costs = self._planner.costs.load_seconds(plan.nbytes), self._planner.costs
        alone = self.room is not None and self.room.is_alone(request)
        awaited = self.at_once.can_undo(request) and self._may_await(plan, seconds, alone)
        waiting = 0.0 if awaited else STEPS_LOST * costs.step_seconds()
        own = sum(run.num_blocks for run in plan.own_runs)
        blocks = self.lookups.groups.blocks_at(plan.start + plan.length) + own
        if not self._fits(request, blocks, (awaited,)):
            return 0
        if not self.lookups.is_worth(request, plan, waiting):
            return 0
        if not awaited and not self._within_copy_budget(seconds):
            return None  # the next step may begin it
        if own and self.room is not None:
            self.room.keep(plan.own_blocks())
        if awaited:
            price = costs.compute_seconds(plan.length * self._block_size)
            self.at_once.withhold_hashes(request, seconds, price)
        self._plans[request_id] = plan
        if self.room is not None:
            self.room.watch()
        return plan.length * self._block_size

    def _holds(self, block_hash: bytes) -> bool:
        """Whether the engine has the next block itself.  With several groups one block of one of
        them says nothing."""
        return (
            self.lookups.groups.one_full and self.room is not None and self.room.holds(block_hash)
        )

    def _within_copy_budget(self, seconds: float) -> bool:
        """Whether the step being built may begin one more asynchronous copy; counts that copy."""
        if self._begun and self._begun + seconds > SECONDS_BEGUN:
            return False
        self._begun += seconds
        return True

    def _may_await(self, plan: Plan, seconds: float, alone: bool) -> bool:
        """Whether the step may wait for the copy: it must be short, and its peers ready."""
        ready = self.peers.are_ready({Epoch(run.peer.info.epoch) for run in plan.runs})
        return ready and self.at_once.accepts(seconds + self._queued_seconds(), alone)

    def _queued_seconds(self) -> float:
        """Estimated seconds of the copies that earlier steps have begun: a rank makes one copy
        after the other."""
        begun = (self._imports[name].load for name in self.under_way() - self._new.keys())
        return sum(self._planner.load_seconds(load) for load in begun)

    def _fits(self, request: Any, blocks: int, awaited: tuple[bool, ...]) -> bool:
        """Whether vLLM would admit an import of so many blocks, awaited or not.  A request that
        vLLM does not admit blocks all requests behind it, while without the import it would be
        computed.  A refused request stays refused for a second, or until a block becomes free."""
        if (room := self.room) is None:
            return True
        free, request_id = room.free(), request.request_id
        had, until = self._had_no_room.get(request_id, (-1, 0.0))
        if free <= had and self._clock() < until:
            return False
        if any(free > blocks if way else room.admits(blocks, request) for way in awaited):
            return True
        self._refuse(request_id, free)
        return False

    def _refuse(self, request_id: str, free: int) -> None:
        """There is no room for the request's import: have it computed if there is room for that."""
        self._had_no_room[request_id] = free, self._clock() + NO_ROOM_SECONDS
        self._cache.count(MISS_NO_ROOM)

    def may_share(self, request: Any) -> bool:
        """Whether this request may share, in either direction."""
        return may_share(request, self._config.share)

    def allocated(self, request: Any, tables: Tables, num_external: int) -> None:
        """vLLM has allocated blocks: lease the external blocks and plan their load."""
        if num_external > 0 and not self.at_once.withholds(request.request_id):
            self.held.add(request.request_id)  # before anything can fail
        plan = self._plans.pop(request.request_id, None)
        self.lookups.forget(request.request_id)
        self.unscheduled.discard(request.request_id)
        self._had_no_room.pop(request.request_id, None)
        if num_external <= 0:
            self.at_once.refused(request.request_id)
            return
        # Register a load before anything can fail: from here on the request waits for a report.
        if plan is None or plan.length * self._block_size != num_external:
            self._register_lost(request, tables, num_external)
            return
        made = self._register(request, plan.start, plan.parts, tables)
        awaited, targets = self.at_once.withholds(request.request_id), made.load.lost
        made.load = self._planner.load(plan, made.load.load_id, targets, attached=awaited)

    def allocation_failed(self, request: Any, tables: Tables, num_external: int) -> None:
        """``allocated`` failed: register an empty load unless one was registered by then."""
        request_id = request.request_id
        if self.at_once.withholds(request_id) or request_id in self._imports:
            return  # ``loads`` registers an empty load for the former
        self._register_lost(request, tables, num_external)

    def _register_lost(self, request: Any, tables: Tables, num_external: int) -> None:
        """Register an import without a plan: nothing fills its blocks, the last of the tables."""
        groups = self.lookups.groups
        length = min(len(table) * g.scale for g, table in zip(groups.all, tables, strict=True))
        start = length - num_external // self._block_size
        self._register(request, start, groups.parts(start, length), tables)

    def _register(
        self, request: Any, start: int, parts: Iterable[Part] = (), tables: Tables = ()
    ) -> Import:
        """Register an import whose load has no copies yet: every target is a load error, so vLLM
        computes it.  The targets are the ``parts`` of the request's block ``tables``, behind a
        local hit of ``start`` hashes."""
        self.has_news = True
        chain = request.block_hashes
        blocks = loaded_blocks(chain, parts, tables)
        targets = tuple(block for part in blocks for block in part.blocks)
        request_id = request.request_id
        way = Way.AT_ONCE if self.at_once.withholds(request_id) else Way.ASYNCHRONOUS
        # vLLM knows an asynchronous load by its request's id, and does not know the others.
        load_id = request_id if way is Way.ASYNCHRONOUS else next(self._attempts)
        load = LoadOrder.of_nothing(load_id, targets)
        made = Import(request_id, way, load, chain, start, blocks)
        self._imports[load_id] = self._new[load_id] = made
        self._twins.begun(made)
        if way is Way.AT_ONCE:
            self.at_once.begun(request_id, load_id)
        return made

    def loads(self, scheduled: Container[str]) -> tuple[list[LoadOrder], list[LoadOrder]]:
        """Return the asynchronous loads and the loads at once of the step being built, which
        computes the requests ``scheduled``.  Keeps both until ``step_dispatched``."""
        if not (self._new or self.at_once.withheld):
            return [], []
        for request in self.at_once.without_load(scheduled):
            self._register(request, 0)
        return self._new_loads(Way.ASYNCHRONOUS), self._new_loads(Way.AT_ONCE)

    def _new_loads(self, way: Way) -> list[LoadOrder]:
        return [made.load for made in self._new.values() if made.way is way]

    @property
    def step_waits(self) -> bool:
        """Whether the step being built computes from blocks that a load has yet to fill."""
        return bool(self.at_once.withheld or self._new_loads(Way.AT_ONCE))

    def linger(self, begun: Sequence[LoadOrder], busy: bool) -> float:
        """Seconds that the end of the step being built may wait for loads under way: more than 0
        if all its copies are shorter than that, or if no other request runs."""
        short = bool(begun) and max(map(self._planner.load_seconds, begun)) <= LINGER_SECONDS
        return LINGER_SECONDS if short or (self._imports and not busy) else 0.0

    def step_dispatched(self) -> None:
        """The step with the loads is dispatched."""
        if self.has_news and self.room is not None:
            for request_id, free in self.room.unwatch().items():
                if request_id in self._plans:  # it blocks all requests behind it
                    self._refuse(request_id, free)
        self.has_news, self._new, self._begun = False, {}, 0.0

    def drop(self, load_ids: Iterable[LoadId]) -> None:
        """Forget these imports, still unfinished although all ranks have reported: something
        failed, and requests for the same prefix must not wait for them."""
        for load_id in load_ids:
            if (done := self._imports.pop(load_id, None)) is not None:
                self._twins.ended(done)
                self._failed.add(done.request_id)
                self._end(done.request_id)

    def undo_awaited(self) -> None:
        """What handles the loads that steps wait for has failed: treat all of them as failed."""
        self.at_once.undo_all()
        self.drop([name for name, each in self._imports.items() if each.way is Way.AT_ONCE])

    def finish_awaited(
        self, loads: Iterable[LoadOrder], reports: Sequence[LoadReport]
    ) -> list[Import]:
        """A step that waited for these loads has ended with these ``reports`` of its ranks.  A
        load counts only as a whole: its request has computed on top of all its blocks."""
        results = []
        for load in loads:
            if (done := self._imports.get(load.load_id)) is None:
                continue
            own = [report for report in reports if report.load_id == load.load_id]
            self.peers.record_late(own)
            heard = len(own) == self._num_ranks and bool(load.pieces) and not load.lost
            if not heard or any(report.bad for report in own):
                own.append(LoadReport(load.load_id, load.targets))
                self._failed.add(done.request_id)
            done.reports = own
            results.append(self._finish(load.load_id))
        return results

    def reported(self, reports: Iterable[LoadReport]) -> set[BlockId]:
        """Keep what ranks have reported; a load is finished only when vLLM calls ``finish``.
        Returns the blocks that must not be used."""
        bad = {block for report in reports for block in report.bad}
        for report in (r for r in reports if r.load_id in self._imports):
            made = self._imports[report.load_id]
            made.reports.append(report)
            if report.bad and not self.lookups.groups.one_full:
                bad.update(made.targets)
        return bad

    def finish(self, request_ids: Iterable[str]) -> list[Import]:
        """All ranks have reported these requests: finish their imports."""
        self.held.reported(request_ids)
        ended = [request_id for request_id in request_ids if request_id in self._imports]
        self.unscheduled.update(set(ended) - self._ended)
        return [self._finish(request_id) for request_id in ended]

    def _finish(self, load_id: LoadId) -> Import:
        """End an import.  A rank without a report has not filled any block."""
        done = self._imports.pop(load_id)
        self._twins.ended(done)
        if len(done.reports) < self._num_ranks:
            done.reports.append(LoadReport(load_id, done.targets))
        done.bad = self._planner.end_load(done.load, done.reports)
        if done.bad:
            self._failed.add(done.request_id)
        self._end(done.request_id)
        return done

    def _end(self, request_id: str) -> None:
        """A load has ended; if its request ended earlier, forget the request."""
        if request_id in self._ended:
            self._ended.discard(request_id)
            self._failed.discard(request_id)

    def under_way(self) -> set[str]:
        """Requests that vLLM holds back because not every rank has reported their load."""
        return {m.request_id for m in self._imports.values() if m.way is Way.ASYNCHRONOUS}

    def discard_loads(self, request_ids: Iterable[str]) -> None:
        """Finish loads that have ended and that no rank will report: they bring nothing."""
        for request_id in request_ids:
            self._finish(request_id)

    def give_up(self, request: Any) -> Set[BlockId]:
        """Nobody will report the load of this request, which is computed.  Returns the blocks that
        the load was to fill, as far as it is known."""
        self._cache.count(LOADS_LOST)
        if request.request_id in self._imports:
            return self._finish(request.request_id).bad
        if not request.is_finished():
            self._failed.add(request.request_id)
        return set()

    def request_finished(self, request_id: str) -> None:
        """The request has ended; its load goes on until all ranks have reported it."""
        self._plans.pop(request_id, None)
        self._had_no_room.pop(request_id, None)
        self._twins.forget(request_id)
        self.lookups.forget(request_id)
        self._failed.discard(request_id)
        self.unscheduled.discard(request_id)
        if any(each.request_id == request_id for each in self._imports.values()):
            self._ended.add(request_id)
        else:
            self.at_once.forget(request_id)
