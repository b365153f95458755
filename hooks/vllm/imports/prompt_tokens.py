"""Where the tokens of each prompt came from, counted when vLLM schedules a request first.

local + peer + computed are the prompt tokens of the requests that were scheduled.  What an import
has not brought is taken off vLLM's numbers (docs/operations.md lists what differs from these).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvshm.halves import (
    PROMPT_TOKENS_COMPUTED,
    PROMPT_TOKENS_LOCAL,
    PROMPT_TOKENS_PEER,
    SchedulerHalf,
)

from ..request_options import AFTER, KVSHM, is_handed_over, options_of
from .request_import import RequestImport

if TYPE_CHECKING:
    from ..exports.block_tracker import BlockTracker


@dataclass(slots=True)
class Sources:
    """Where the tokens of a prompt came from, or those of several prompts."""

    local: int = 0  # from the engine's own cache, or another connector of the engine
    peer: int = 0  # from other engines
    computed: int = 0
    peers: dict[str, int] = field(default_factory=dict)
    """Of one prompt: how many from each engine, by name, if each token came from one engine."""

    def add(self, other: Sources) -> None:
        """Add the numbers of another prompt."""
        self.local += other.local
        self.peer += other.peer
        self.computed += other.computed

    def report(self) -> dict[str, Any]:
        """What an answer says of them."""
        said: dict[str, Any] = {
            "prompt_tokens": self.local + self.peer + self.computed,
            "local_tokens": self.local,
            "peer_tokens": self.peer,
            "computed_tokens": self.computed,
        }
        return {**said, "peers": self.peers} if self.peers else said


class FirstStep(NamedTuple):
    """The first step of a request, which waits for its import."""

    sources: Sources  # of all but the import's tokens
    external: int  # the import's tokens


class PromptTokens:
    """Counts where prompts came from, and reports it to requests that ask.  Scheduler's thread."""

    def __init__(
        self, cache: SchedulerHalf, imports: Mapping[str, RequestImport], block_size: int
    ) -> None:
        """``imports``: the newest of each request, by its id; ``block_size``: tokens per hash."""
        self._cache, self._imports = cache, imports
        self.names_peers = True
        """Whether each token comes from one engine, so that answers may name it."""
        self._block_size = block_size
        self.unsent: Sources | None = None
        """What was counted since the last ``take``; None: nothing."""
        self._reports: dict[str, Sources] = {}
        """Of the requests that ask for it."""

    def step_built(self, new: Sequence[Any], requests: Mapping[str, Any]) -> None:
        """Count the prompts whose first step is about to be dispatched.  ``new``: what vLLM sends
        its workers of requests that they do not know (NewRequestData); ``requests``: vLLM's."""
        counted = Sources()
        for scheduled in new:
            request = requests[scheduled.req_id]
            stats = request.prefill_stats
            if stats is None or request.num_preemptions:
                continue  # a session's next input, or a request that was scheduled before
            # vLLM's numbers are those of the lookup: a load may have brought less since.
            local = min(stats.num_local_cached_tokens, scheduled.num_computed_tokens)
            external = min(stats.num_external_cached_tokens, scheduled.num_computed_tokens - local)
            sources = Sources(local, 0, stats.num_prompt_tokens - local - external)
            import_ = self._imports.get(scheduled.req_id)
            if request.kv_transfer_params is not None and options_of(request).report:
                self._reports[scheduled.req_id] = sources
            if import_ is not None and import_.withheld is not None:
                import_.first_step = FirstStep(sources, external)
                continue
            if import_ is not None:
                stats.set(stats.num_prompt_tokens, local, external)
            if external:
                self._add_external(sources, external, import_)
            counted.add(sources)
        self._count(counted)

    def import_ended(self, import_: RequestImport) -> None:
        """Count the prompt of an import that its request's first step waited for."""
        first, import_.first_step = import_.first_step, None
        if first is None:
            return
        if import_.load.good:
            self._add_external(first.sources, first.external, import_)
        else:
            # Tell vLLM, too, which shows clients these numbers.
            if (stats := import_.request.prefill_stats) is not None:
                stats.set(stats.num_prompt_tokens, first.sources.local, 0)
            first.sources.computed += first.external
        self._count(first.sources)

    def finished(self, request: Any, tracker: BlockTracker | None) -> dict[str, Any] | None:
        """Return what the answer of a request that has ended is to contain: a report, if it has
        asked for one, and a receipt, also if another engine goes on with it.
        ``tracker``: of the engine's blocks, if it shows them."""
        sources = self._reports.pop(request.request_id, None)
        if sources is None and not is_handed_over(request.kv_transfer_params):
            return None
        report = sources.report() if sources is not None else {}
        block = tracker.last_of_prompt(request) if tracker is not None else None
        if block is not None and (receipt := self._cache.receipt(block)) is not None:
            report[AFTER] = str(receipt)
        # Routers send this on to the next engine, instead of what the client has asked.
        if not options_of(request).share:
            report["share"] = False
        return {KVSHM: report} if report else None

    def take(self) -> Sources:
        """Return what was counted since the last call."""
        unsent, self.unsent = self.unsent, None
        return unsent or Sources()

    def _add_external(self, sources: Sources, tokens: int, import_: RequestImport | None) -> None:
        """Add tokens that vLLM got by this import of kvshm's, or from another connector."""
        load = import_.load if import_ is not None and import_.has_load else None
        if load is None or all(p.peer_epoch == load.order.epoch for p in load.order.pieces):
            sources.local += tokens  # also copies of own blocks, for other KV cache groups
            return
        sources.peer += tokens
        if self.names_peers and (epoch := self._cache.epoch_state):
            for piece in load.order.pieces:
                brought = min(len(piece.targets) * self._block_size, tokens)
                name = epoch.peers.name_of(piece.peer_epoch)
                if brought and name:
                    sources.peers[name] = sources.peers.get(name, 0) + brought
                tokens -= brought

    def _count(self, sources: Sources) -> None:
        if not (sources.local or sources.peer or sources.computed):
            return
        for counter, tokens in (
            (PROMPT_TOKENS_LOCAL, sources.local),
            (PROMPT_TOKENS_PEER, sources.peer),
            (PROMPT_TOKENS_COMPUTED, sources.computed),
        ):
            if tokens:
                self._cache.count(counter, tokens)
        if self.unsent is None:
            self.unsent = Sources()
        self.unsent.add(sources)
