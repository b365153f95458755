"""Where the tokens of each prompt came from, counted when vLLM schedules a request first.

::

    load ended     of a request that waits for it: remember what it has brought
    step built     first step of a request: vLLM's numbers of it are final now, unless the step
                   waits for its import
    import ended   that import: its tokens came from other engines, or have to be computed

local + peer + computed are the prompt tokens of the requests that were scheduled.  vLLM counts the
same with a request's first output, as it was planned: what an import has not brought is taken off
vLLM's numbers here.  docs/operations.md lists what differs from vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvshm._ground.ids import LoadId
from kvshm.halves import (
    PROMPT_TOKENS_COMPUTED,
    PROMPT_TOKENS_LOCAL,
    PROMPT_TOKENS_PEER,
    SchedulerHalf,
)

from .before_prefill import RequestImporter
from .imports import Import
from .request_share import KVSHM, options_of


@dataclass(slots=True)
class Sources:
    """Where the tokens of a prompt came from, or those of several prompts."""

    local: int = 0
    """From the engine's own cache, or another connector of the engine."""
    peer: int = 0
    """From other engines."""
    computed: int = 0
    peers: dict[str, int] = field(default_factory=dict)
    """Of one prompt: those from each engine, by name, if each token came from one engine."""

    def add(self, other: Sources) -> None:
        """Add the numbers of another prompt."""
        self.local += other.local
        self.peer += other.peer
        self.computed += other.computed


class PromptTokens:
    """Counts where prompts came from, and tells it to requests that ask.  Scheduler's thread."""

    def __init__(self, cache: SchedulerHalf, importer: RequestImporter, block_size: int) -> None:
        """``block_size``: tokens per hash."""
        self._cache, self._importer = cache, importer
        self._block_size = block_size
        self.untold: Sources | None = None
        """What was counted since the last ``take``; None: nothing."""
        self._imported: dict[str, Import] = {}
        """The ended import of each request that vLLM has not scheduled yet."""
        self._awaited: dict[LoadId | None, tuple[Any, Sources, int]] = {}
        """By the ids of the loads that the first steps of requests wait for: the request, all but
        the import's tokens, and how many these are."""
        self._reports: dict[str, Sources] = {}
        """Of the requests that ask for it."""

    def load_ended(self, done: Import) -> None:
        """A load that its request waited for has ended."""
        if done.request_id in self._importer.unscheduled:  # else the request has ended, too
            self._imported[done.request_id] = done

    def step_built(self, new: Sequence[Any], requests: Mapping[str, Any]) -> None:
        """A step is about to be dispatched.  ``new``: what vLLM tells its workers of the requests
        that they do not know (NewRequestData); ``requests``: vLLM's, by id."""
        counted = Sources()
        for told in new:
            request = requests[told.req_id]
            stats = request.prefill_stats
            if stats is None or request.num_preemptions:
                continue  # a session's next input, or a request that was scheduled before
            # vLLM's numbers are those of the lookup: a load may have brought less since.
            local = min(stats.num_local_cached_tokens, told.num_computed_tokens)
            external = min(stats.num_external_cached_tokens, told.num_computed_tokens - local)
            sources = Sources(local, 0, stats.num_prompt_tokens - local - external)
            done = self._imported.pop(told.req_id, None)
            if request.kv_transfer_params is not None and options_of(request).report:
                self._reports[told.req_id] = sources
            if (held := self._importer.at_once.withheld.get(told.req_id)) is not None:
                self._awaited[held.load_id] = request, sources, external
                continue
            if done is not None:
                stats.set(stats.num_prompt_tokens, local, external)
            if external:
                self._add_external(sources, external, done)
            counted.add(sources)
        self._count(counted)

    def import_ended(self, done: Import) -> None:
        """An import that a step waited for has ended."""
        if (first := self._awaited.pop(done.load.load_id, None)) is None:
            return  # of a request that was scheduled before
        request, sources, external = first
        if done.good:
            self._add_external(sources, external, done)
            self._count(sources)
        else:
            self._import_failed(request, sources, external)

    def imports_failed(self) -> None:
        """What handles the imports that steps wait for has failed: all are computed."""
        for first in self._awaited.values():
            self._import_failed(*first)
        self._awaited.clear()

    def _import_failed(self, request: Any, sources: Sources, tokens: int) -> None:
        """The import that a request's first step waited for has failed: tell vLLM, too, which
        shows clients these numbers."""
        if (stats := request.prefill_stats) is not None:
            stats.set(stats.num_prompt_tokens, sources.local, 0)
        sources.computed += tokens
        self._count(sources)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The request has ended; returns what its answer is to say, if it has asked."""
        self._imported.pop(request.request_id, None)
        if (found := self._reports.pop(request.request_id, None)) is None:
            return None
        told: dict[str, Any] = {
            "prompt_tokens": found.local + found.peer + found.computed,
            "local_tokens": found.local,
            "peer_tokens": found.peer,
            "computed_tokens": found.computed,
        }
        if found.peers:
            told["peers"] = found.peers
        # Routers send this on to the next engine, in the place of what the client has said.
        if not options_of(request).share:
            told["share"] = False
        return {KVSHM: told}

    def take(self) -> Sources:
        """Return what was counted since the last call."""
        untold, self.untold = self.untold, None
        return untold or Sources()

    def _add_external(self, sources: Sources, tokens: int, done: Import | None) -> None:
        """Add tokens that vLLM got from a connector.  ``done``: kvshm's import of them; None: they
        came from another connector."""
        pieces = () if done is None else done.load.pieces
        if done is None or all(piece.peer_epoch == done.load.epoch for piece in pieces):
            sources.local += tokens  # also copies of own blocks, for other KV cache groups
            return
        sources.peer += tokens
        if self._importer.lookups.groups.one_full and (epoch := self._cache.epoch_state):
            for piece in pieces:
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
        if self.untold is None:
            self.untold = Sources()
        self.untold.add(sources)
