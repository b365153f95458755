"""The importer's side: which requests get blocks from another engine, and how that ends.

    new request      probe the replica for the blocks this engine lacks     (a pure look)
    blocks allocated lease them and plan the load; what is lost is a load error
    step built       the load travels to the ranks, which copy and re-check
    output arrives   good blocks count as computed; bad ones vLLM computes itself

Only whole blocks, never the prompt's last token, and never again for a request that lost one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from kvshm.config import Config, Share
from kvshm.engine.cache import SharedCache
from kvshm.engine.load_plan import NO_TICKET, Load, LoadFailure, LoadReport, Plan
from kvshm.ids import NO_LEASE_BIT, BlockId, Epoch
from kvshm.shm.counters import MISS_NO_ROOM

from .after_prefill import Loaded
from .at_once import AtOnce
from .pool_room import PoolRoom

LINGER_SECONDS = 0.002
SEPARATOR = "\0"
"""In the id of a load that a step waits for; no request's id has one."""
SECONDS_BEGUN = 0.02
"""Longest that the copies which one step begins, and does not wait for, may be estimated to take
together, unless it is a single one: whoever runs meanwhile shares memory and cores with them."""
STEPS_LOST = 2
"""By how many steps an asynchronous import comes later than a local hit, beside its copy."""
LATE_SECONDS = 10.0
"""For how long no step waits for a peer whose copy was too late: else each request would wait
in vain, and be preempted, while copies take longer than was learnt."""
MATCHES_IN_VAIN = 4
"""How often a request is matched without being scheduled.  vLLM leaves it out of a step for other
reasons than memory too; but one for which it has no room keeps all behind it waiting."""
TWIN_WAIT_SECONDS = 0.1
"""How long a request waits for another one's import of the same prefix."""


@dataclass(frozen=True)
class _Import:
    """A load under way."""

    request_id: str
    load: Load
    targets: tuple[BlockId, ...]
    first_index: int
    """Index of the first target in the request's block table."""
    chain: list[bytes]


@dataclass
class Landed:
    """What came of one request's import.  One that a step waited for has either ``good`` blocks
    or bad ones, or neither: then it is as bad."""

    load_id: str
    request_id: str
    good: Loaded
    bad: set[BlockId]


class Importer:
    """Decides, plans and accounts for imports.  Scheduler's thread."""

    def __init__(
        self,
        cache: SharedCache,
        config: Config,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        num_ranks: int = 1,
    ) -> None:
        self._cache, self._planner = cache, cache.planner
        self._config = config
        self._block_size = block_size
        self._clock = clock
        self.room: PoolRoom | None = None
        """vLLM's pool, once it exists."""
        self.stirred = False
        """Whether there may be loads for the step being built, or something of its budgets is
        used up: vLLM has asked for a match, or allocated blocks, since ``handed_over``."""
        self.at_once = AtOnce()
        self.attached: dict[int, frozenset[Epoch]] = {}
        """What each rank has said it can read at once."""
        self._num_ranks = num_ranks
        self._attempts = count()
        self._begun = 0.0
        """Seconds of copies, estimated, that the step being built begins without waiting."""
        self._plans: dict[str, Plan] = {}
        self._new: list[Load] = []
        self._imports: dict[str, _Import] = {}
        self._reports: dict[str, list[LoadReport]] = {}
        self._first_hashes: dict[bytes, str] = {}
        self._waiting_since: dict[str, float] = {}
        self._failed: set[str] = set()
        self._late_until: dict[Epoch, float] = {}
        self._had_no_room: dict[str, int] = {}
        """Free blocks when a request's import did not fit."""
        self._in_vain: dict[str, int] = {}
        """How often a request was matched and not scheduled."""
        self._ended: set[str] = set()
        """Requests that ended while their load goes on."""
        self.landed: set[str] = set()
        """Requests that vLLM has not scheduled since their load has ended."""

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        """Tokens beyond the local hit that another engine holds; None: ask again, the same
        prefix is being imported right now, or this step begins enough copies already.  May be
        called again for the same request."""
        request_id = request.request_id
        start = num_local_tokens // self._block_size
        stop = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        possible = start < stop
        if not (self._plans or self.at_once.withheld or (possible and self._planner.has_peers())):
            return 0
        self.stirred = True
        self.at_once.forget(request_id)
        if self._plans.pop(request_id, None) is not None:
            self._in_vain[request_id] = times = self._in_vain.get(request_id, 0) + 1
            if self.room is None or times >= MATCHES_IN_VAIN:
                self._failed.add(request_id)
        if not possible or request_id in self._failed or not self.wants(request):
            return 0
        return self._offer(request, start, stop)

    def _offer(self, request: Any, start: int, stop: int) -> int | None:
        """``match`` for blocks ``start`` to ``stop`` of a request that may import."""
        request_id, chain = request.request_id, request.block_hashes
        if request.skip_reading_prefix_cache or (self.room and self.room.holds(chain[start])):
            return 0  # vLLM does not want the block: it would take its own
        if self._twin_is_loading(request_id, chain, start):
            return None
        if not self._fits(request, start + 1, (True, False)):
            return 0
        plan = self._planner.probe(chain, start, stop)
        if plan is None:
            return 0
        seconds, costs = self._planner.costs.load_seconds(plan.nbytes), self._planner.costs
        alone = self.room is not None and self.room.is_alone(request)
        awaited = self.at_once.can_undo(request) and self._may_await(plan, seconds, alone)
        waiting = 0.0 if awaited else STEPS_LOST * costs.step_seconds()
        fits = self._fits(request, plan.start + plan.num_blocks, (awaited,))
        if not fits or not self._planner.worth(plan, waiting):
            return 0
        if awaited:
            price = costs.compute_seconds(plan.num_blocks * self._block_size)
            self.at_once.expect(request, seconds, price)
        elif not self._begins(seconds):
            return None  # the next step may
        self._plans[request_id] = plan
        return plan.num_blocks * self._block_size

    def _begins(self, seconds: float) -> bool:
        """Whether the step being built begins one copy more that it does not wait for."""
        if self._begun and self._begun + seconds > SECONDS_BEGUN:
            return False
        self._begun += seconds
        return True

    def now_attached(self, by_rank: Mapping[int, frozenset[Epoch]]) -> frozenset[Epoch]:
        """What these ranks say they can read at once; returns what all ranks can."""
        self.attached.update(by_rank)
        if len(self.attached) < self._num_ranks:
            return frozenset()
        return frozenset.intersection(*self.attached.values())

    def _may_await(self, plan: Plan, seconds: float, alone: bool) -> bool:
        """Whether the step may wait for the copy: a short one, from memory that is open."""
        peers, now = {Epoch(run.peer.info.epoch) for run in plan.runs}, self._clock()
        self._late_until = {e: until for e, until in self._late_until.items() if now < until}
        if not peers.isdisjoint(self._late_until):
            return False
        if not peers <= self.now_attached({}):
            return False
        return self.at_once.accepts(seconds + self._in_its_way(), alone)

    def _in_its_way(self) -> float:
        """Seconds, estimated, of the copies that earlier steps have begun: a rank makes one after
        the other."""
        new = {load.load_id for load in self._new}
        begun = (self._imports[name].load for name in self.under_way() - new)
        return sum(self._planner.load_seconds(load) for load in begun)

    def _fits(self, request: Any, blocks: int, awaited: tuple[bool, ...]) -> bool:
        """Whether vLLM would admit an import that occupies so many blocks, awaited or not.  One
        that it does not keeps everybody behind it waiting, where the same request is computed
        at once.  A refused request is refused until a block has become free."""
        if self.room is None:
            return True
        free, request_id = self.room.free(), request.request_id
        if free <= self._had_no_room.get(request_id, -1):
            return False
        room = self.room
        if any(free > blocks if way else room.lets_in(blocks, request) for way in awaited):
            return True
        self._had_no_room[request_id] = free
        self._cache.count(MISS_NO_ROOM)
        return False

    def wants(self, request: Any) -> bool:
        """Whether this request may share, in either direction."""
        if request.lora_request is not None:
            return False  # an adapter's name says nothing of its contents
        if request.mm_features:
            return False  # nor does an image's name, which may be the client's own
        if self._config.share is Share.SALTED_ONLY and request.cache_salt is None:
            return False
        params = request.kv_transfer_params
        return params is None or _asked_to_share(params)

    def allocated(self, request: Any, block_ids: list[BlockId], num_external: int) -> None:
        """Blocks were allocated: lease and plan the load of the external ones."""
        plan = self._plans.pop(request.request_id, None)
        self.landed.discard(request.request_id)
        self._had_no_room.pop(request.request_id, None)
        self._in_vain.pop(request.request_id, None)
        if num_external <= 0:
            self.at_once.refused(request.request_id)
            return
        count = num_external // self._block_size
        first = plan.start if plan else len(block_ids) - count
        targets = tuple(block_ids[first : first + count])
        load_id = self._load_id(request.request_id)
        # Registered before anything can fail: from here on the request waits for a report.
        self._register(request, first, self._empty(load_id, targets), targets)
        if plan is not None and plan.num_blocks == count:
            awaited = self.at_once.expects(request.request_id)
            load = self._planner.begin(plan, load_id, targets, attached=awaited)
            self._register(request, first, load, targets)

    def lost(self, request: Any, block_ids: list[BlockId], num_external: int) -> None:
        """``allocated`` failed: unless a load was registered by then, nothing will come."""
        request_id = request.request_id
        if self.at_once.expects(request_id) or request_id in self._imports:
            return  # ``loads`` sees to the former
        first = len(block_ids) - num_external // self._block_size
        targets = tuple(block_ids[first:])
        self._register(request, first, self._empty(request_id, targets), targets)

    def _load_id(self, request_id: str) -> str:
        """vLLM knows an asynchronous load by its request; of one that a step waits for it knows
        nothing, and a request may have had another that has not been answered."""
        if not self.at_once.expects(request_id):
            return request_id
        return f"{request_id}{SEPARATOR}{next(self._attempts)}"

    def _register(
        self, request: Any, first: int, load: Load, targets: tuple[BlockId, ...] = ()
    ) -> None:
        self.stirred = True
        request_id, chain = request.request_id, request.block_hashes
        self._imports[load.load_id] = _Import(request_id, load, targets, first, chain)
        if first < len(chain):
            self._first_hashes[chain[first]] = request_id
        self._new = [other for other in self._new if other.load_id != load.load_id] + [load]
        if SEPARATOR in load.load_id:
            self.at_once.begun(request_id, load.load_id)

    def loads(self, scheduled: Container[str]) -> tuple[list[Load], list[Load]]:
        """What to hand to the ranks with the step being built, which computes these requests:
        loads, and loads that it waits for.  They stay here until ``handed_over``."""
        if not (self._new or self.at_once.withheld):
            return [], []
        for request in self.at_once.without_load(scheduled):
            self._register(request, 0, self._empty(self._load_id(request.request_id), ()))
        asynchronous = [load for load in self._new if SEPARATOR not in load.load_id]
        return asynchronous, [load for load in self._new if SEPARATOR in load.load_id]

    def linger(self, begun: Sequence[Load], busy: bool) -> float:
        """How long the end of the step being built may wait for loads under way: a little while
        where that saves a step, which nobody else waits for, or lasts longer than the copy."""
        short = bool(begun) and max(map(self._planner.load_seconds, begun)) <= LINGER_SECONDS
        return LINGER_SECONDS if short or (self._imports and not busy) else 0.0

    def handed_over(self) -> None:
        """The step with these loads is dispatched."""
        self.stirred, self._new, self._begun = False, [], 0.0

    def drop(self, request_ids: Iterable[str]) -> None:
        """All ranks have reported these requests.  What has not landed by now never will:
        something failed before, and whoever wants the same prefix must not wait for it."""
        for request_id in request_ids:
            self._reports.pop(request_id, None)
            if (done := self._imports.pop(request_id, None)) is not None:
                self._forget_first(request_id, done)
                self._failed.add(request_id)
                self._end(request_id)

    def land_awaited(self, loads: Iterable[Load], reports: Sequence[LoadReport]) -> list[Landed]:
        """A step that waited for these loads has ended; ``reports`` is what its ranks said.  A
        load counts only as a whole: its request has computed on top of it."""
        landed = []
        for load in loads:
            if load.load_id not in self._imports:
                continue
            own = [report for report in reports if report.load_id == load.load_id]
            self._note_late(own)
            heard = len(own) == self._num_ranks and bool(load.pieces) and not load.lost
            if not heard or any(report.bad for report in own):
                targets = tuple(t for piece in load.pieces for t in piece.targets)
                own.append(LoadReport(load.load_id, targets))
                self._failed.add(self._imports[load.load_id].request_id)
            self._reports[load.load_id] = own
            landed.append(self._land(load.load_id))
        return landed

    def _note_late(self, reports: Iterable[LoadReport]) -> None:
        for failure in (failure for report in reports for failure in report.failures):
            if failure.reason is LoadFailure.TOO_LATE:
                self._late_until[failure.peer] = self._clock() + LATE_SECONDS

    def reported(self, reports: Iterable[LoadReport]) -> None:
        """What ranks said; a load has landed only when vLLM says all of them have."""
        for report in (r for r in reports if r.load_id in self._imports):
            self._reports.setdefault(report.load_id, []).append(report)

    def land(self, request_ids: Iterable[str]) -> list[Landed]:
        """All ranks have reported these requests: account for them."""
        ended = [request_id for request_id in request_ids if request_id in self._imports]
        self.landed.update(set(ended) - self._ended)
        return [self._land(request_id) for request_id in ended]

    def _land(self, load_id: str) -> Landed:
        done = self._imports.pop(load_id)
        request_id = done.request_id
        self._forget_first(request_id, done)
        reports = self._reports.pop(load_id, [])
        if len(reports) < self._num_ranks:
            reports.append(LoadReport(load_id, done.targets))
        bad = self._planner.end(done.load, reports)
        if bad:
            self._failed.add(request_id)
        self._end(request_id)
        # A block counts only if everything before it does.
        good = tuple(takewhile(lambda t: t not in bad, done.targets)) if bad else done.targets
        return Landed(load_id, request_id, Loaded(done.chain, done.first_index, good), bad)

    def _end(self, request_id: str) -> None:
        """A load has ended; if its request had before, nothing more is known of it."""
        if request_id in self._ended:
            self._ended.discard(request_id)
            self._failed.discard(request_id)

    def under_way(self) -> set[str]:
        """Requests that vLLM holds back for loads which not every rank has reported."""
        return {one for one in self._imports if SEPARATOR not in one}

    def given_up(self, request_ids: Iterable[str]) -> None:
        """These loads have ended, brought nothing, and will not be reported."""
        for request_id in request_ids:
            self.reported([LoadReport(request_id, self._imports[request_id].targets)])
            self._land(request_id)

    def finished(self, request_id: str) -> None:
        """The request has ended; a load under way goes on until its ranks report."""
        self._plans.pop(request_id, None)
        self._waiting_since.pop(request_id, None)
        self._had_no_room.pop(request_id, None)
        self._in_vain.pop(request_id, None)
        self._failed.discard(request_id)
        self.landed.discard(request_id)
        ours = self._imports and any(i.request_id == request_id for i in self._imports.values())
        if ours:
            self._ended.add(request_id)
        else:
            self.at_once.forget(request_id)

    def _twin_is_loading(self, request_id: str, chain: list[bytes], start: int) -> bool:
        """Whether to wait, boundedly, for another request's import of the same block."""
        other = self._first_hashes.get(chain[start]) if start < len(chain) else None
        if other is None or other == request_id:
            self._waiting_since.pop(request_id, None)
            return False
        since = self._waiting_since.setdefault(request_id, self._clock())
        return self._clock() - since < TWIN_WAIT_SECONDS

    def _forget_first(self, request_id: str, done: _Import) -> None:
        for first in done.chain[done.first_index : done.first_index + 1]:
            if self._first_hashes.get(first) == request_id:
                del self._first_hashes[first]

    @staticmethod
    def _empty(load_id: str, targets: tuple[BlockId, ...]) -> Load:
        """A load that brings nothing: every target is a load error, so vLLM computes it."""
        return Load(load_id, Epoch(0), NO_TICKET, NO_LEASE_BIT, (), targets)


def _asked_to_share(params: object) -> bool:
    """What a request says by ``kv_transfer_params={"kvshm": {"share": false}}``.  Comes from
    clients: whatever else than true it says instead, it is not taken for consent."""
    own = params.get("kvshm", {}) if isinstance(params, dict) else {}
    return isinstance(own, dict) and own.get("share", True) is True
