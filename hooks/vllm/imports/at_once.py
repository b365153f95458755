"""Loads at once: imports that the step they are scheduled in waits for, as fast as a local hit.

vLLM alone would deliver tokens that a step under way computes from bad blocks, and keep the bad
blocks' hashes.  So kvshm wraps two of its methods (decision 0012): the blocks get no hash
before the load has arrived, and the request of one that failed is preempted, with all its output
under way dropped, before vLLM handles that output.

If an attribute that this needs is missing in this vLLM, every import is asynchronous.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Set
from inspect import signature
from typing import Any

from kvshm._base.ids import Epoch
from kvshm._base.log import LogLimit, logger
from kvshm.halves import LoadFailure, LoadOrder, LoadReport

from ...log_lines import HookLine
from .request_import import RequestImport

log = logger(__name__)

SECONDS_PER_STEP = 0.004
"""Longest estimated time of the copies that one step waits for, its other requests included."""
SECONDS_ALONE = 0.05
"""The same if the engine has no other request."""
PATIENCE = 4.0
PATIENCE_SECONDS = 0.05
"""A step waits at most PATIENCE times the estimate plus PATIENCE_SECONDS; if longer, as long as
computing the blocks takes, PATIENCE_MOST seconds at most."""
PATIENCE_MOST = 0.25

LATE_SECONDS = 10.0
"""For how long no step waits for a peer whose copy was too late."""

_OF_SCHEDULER = ("running", "requests", "_preempt_request", "update_from_output")
_OF_REQUEST = (
    "drop_stale_output",
    "num_stale_output_tokens",
    "num_in_flight_tokens",
)
_OF_POOL = "cache_full_blocks"


def leave_to_loads(output: Any, loads: Iterable[LoadOrder]) -> None:
    """Have vLLM not zero the blocks that loads at once of this step fill: on a GPU the zeros might
    come behind the copy.  A connector may do so for blocks that it overwrites completely.  If a
    load fails, its request drops its blocks, and vLLM zeroes them when it hands them out again."""
    if (zeroed := getattr(output, "new_block_ids_to_zero", None)) and loads:
        filled = {block for load in loads for block in load.targets}
        output.new_block_ids_to_zero = [b for b in zeroed if b not in filled] or None


class AtOnce:
    """Withholds the hashes of blocks until they have arrived.  Scheduler's thread."""

    def __init__(self, imports: Mapping[str, RequestImport]) -> None:
        """``imports``: the newest of each request, by its id."""
        self.available = False
        self._imports = imports
        self._scheduler: Any = None
        self._log_limit = LogLimit()
        self._estimated = self._price = 0.0

    def watch(
        self,
        scheduler: Any,
        before_output: Callable[[Any, Any], None],
        available: bool = True,
        always: bool = False,
    ) -> None:
        """Wrap both methods: ``before_output`` gets the arguments of ``update_from_output`` before
        each call of it, or only of steps that wait for loads unless ``always``.  Wraps neither if
        an attribute is missing in this vLLM.  ``available``: whether steps may wait for loads."""
        pool = scheduler.kv_cache_manager.block_pool
        missing = [name for name in _OF_SCHEDULER if not hasattr(scheduler, name)]
        preempt = getattr(scheduler, "_preempt_request", None)
        if preempt and "drop_stale_output" not in signature(preempt).parameters:
            missing.append("_preempt_request(drop_stale_output=...)")
        if missing or not hasattr(pool, _OF_POOL):
            log.line(HookLine.ASYNCHRONOUS, missing or _OF_POOL)
            return
        give_hashes, update = pool.cache_full_blocks, scheduler.update_from_output

        def cache_full_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
            import_ = self._imports.get(request.request_id)
            if import_ is None or import_.withheld is None:
                return give_hashes(request, *args, **kwargs)
            import_.withheld.append(((request, *args), kwargs))
            return None

        def update_from_output(output: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            # Most steps wait for none.
            if always or getattr(output.kv_connector_metadata, "at_once", True):
                before_output(output, result)
            return update(output, result, *args, **kwargs)

        pool.cache_full_blocks, scheduler.update_from_output = cache_full_blocks, update_from_output
        self._scheduler, self._give_hashes = scheduler, give_hashes
        self.available = available

    @property
    def watches(self) -> bool:
        return self._scheduler is not None

    # -- scheduling

    @staticmethod
    def can_undo(request: Any) -> bool:
        """Whether a request that has begun on top of its import can begin again.  With a seed a
        dropped token may have an effect on later ones: the model runner may keep a generator that
        is then one draw ahead.  And vLLM sends its workers no image in a prefix that is there."""
        drawn = request.sampling_params.sampling_type.name == "RANDOM_SEED"
        return not (drawn or request.mm_features) and all(
            hasattr(request, name) for name in _OF_REQUEST
        )

    def accepts(self, seconds: float, alone: bool) -> bool:
        """Whether the step being built may wait for one more copy, of an estimated ``seconds``.
        ``alone``: the engine has no other request."""
        longest = SECONDS_ALONE if alone else SECONDS_PER_STEP
        return self.available and self._estimated + seconds <= longest

    def withhold_hashes(self, import_: RequestImport, seconds: float, price: float | None) -> None:
        """Give the request's blocks no hashes until ``arrived`` or ``failed``.  The copy takes an
        estimated ``seconds``, computing instead ``price`` seconds, None: not known yet."""
        self._estimated += seconds
        self._price += PATIENCE_MOST if price is None else price
        import_.withheld = []

    def step_built(self) -> float:
        """Return how many seconds the step, which is complete now, may wait for its copies."""
        seconds, price = self._estimated, self._price
        self._estimated = self._price = 0.0
        return max(PATIENCE_SECONDS + PATIENCE * seconds, min(price, PATIENCE_MOST))

    # -- results

    def give_withheld(self, import_: RequestImport) -> None:
        """Set the withheld hashes: the blocks have arrived, or vLLM wants nothing loaded."""
        calls, import_.withheld = import_.withheld, None
        for args, kwargs in calls or ():
            self._give_hashes(*args, **kwargs)

    def arrived(self, import_: RequestImport) -> None:
        if import_.request.status.name == "RUNNING":
            self.give_withheld(import_)
        import_.withheld = None

    def failed(self, import_: RequestImport) -> None:
        """Drop everything that the request has computed on top of its blocks, in steps under way
        too, and have vLLM compute it again.  If it was preempted and matched again since, nothing
        is withheld, and there is nothing to do."""
        if import_.withheld is not None:
            self.undo(import_.request)
            import_.withheld = None

    def undo(self, request: Any) -> None:
        """Drop everything that a request has computed, in steps under way too, and have vLLM
        compute it again."""
        is_there = self._scheduler.requests.get(request.request_id) is request
        if is_there and not request.is_finished():  # its id may be another's meanwhile
            # Set first, so that vLLM delivers no token whatever happens below.
            request.drop_stale_output = True
            if request.status.name == "RUNNING":  # otherwise preempted meanwhile
                self._preempt(request)

    def fail(self, request: Any) -> None:
        """End a request that cannot begin again with an error, and with none of its output under
        way; vLLM tells its client with the output that it is about to handle."""
        request.drop_stale_output = True
        request.num_stale_output_tokens = request.num_in_flight_tokens
        self._scheduler.encoder_cache_mismatch_reqs.add(request.request_id)

    def undo_all(self, imports: Iterable[RequestImport]) -> None:
        """Treat the loads of these imports, which steps under way wait for, as ``failed``."""
        for import_ in imports:
            try:
                self.failed(import_)
            except Exception:  # of vLLM's methods; the other requests must be undone too
                request, import_.withheld = import_.request, None
                if self._log_limit.allows(HookLine.NOT_PREEMPTED):
                    name = request.request_id
                    log.line(HookLine.NOT_PREEMPTED, name, exc_info=True)
                status = type(request.status).FINISHED_ERROR
                self._scheduler.finish_requests(request.request_id, status)

    def _preempt(self, request: Any) -> None:
        scheduler = self._scheduler
        request.num_stale_output_tokens = request.num_in_flight_tokens
        try:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        except Exception:  # any of vLLM's; raised again
            # The request would go on computing from blocks that did not arrive.
            scheduler.finish_requests(request.request_id, type(request.status).FINISHED_ERROR)
            raise
        # As after vLLM's own reset, the request must not count as part of the previous step.
        getattr(scheduler, "prev_step_scheduled_req_ids", set()).discard(request.request_id)


class ReadyPeers:
    """The peers for whose copies a step may wait.  Scheduler's thread."""

    def __init__(self, num_ranks: int, clock: Callable[[], float]) -> None:
        self._num_ranks = num_ranks
        self._clock = clock
        self.attached: dict[int, frozenset[Epoch]] = {}
        """Epochs of the peers that each rank reports as attached."""
        self._late_until: dict[Epoch, float] = {}

    @property
    def everywhere(self) -> frozenset[Epoch]:
        """The peers that all ranks have attached."""
        if len(self.attached) < self._num_ranks:
            return frozenset()
        return frozenset.intersection(*self.attached.values())

    def record_late(self, reports: Iterable[LoadReport]) -> None:
        """Note which peers were too late, by the reports of loads that a step waited for."""
        for failure in (failure for report in reports for failure in report.failures):
            if failure.reason is LoadFailure.TOO_LATE:
                self._late_until[failure.peer_epoch] = self._clock() + LATE_SECONDS

    def are_ready(self, peers: Set[Epoch]) -> bool:
        """Whether a step may wait for copies from all of these."""
        now = self._clock()
        self._late_until = {e: until for e, until in self._late_until.items() if now < until}
        return peers.isdisjoint(self._late_until) and peers <= self.everywhere
