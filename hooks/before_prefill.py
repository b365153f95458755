"""The importer's side: which requests get blocks from another engine, and how that ends.

    new request      probe the replica for the blocks this engine lacks     (a pure look)
    blocks allocated lease them and plan the load; what is lost is a load error
    step built       the load travels to the ranks, which copy and re-check
    output arrives   good blocks count as computed; bad ones vLLM computes itself

Only whole blocks, never the prompt's last token, and never again for a request whose load
failed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvshm.cache import SharedCache
from kvshm.config import Config, Share
from kvshm.plans import NO_TICKET, Load, LoadReport, Plan
from kvshm.terms import NO_LEASE_BIT, BlockId, Epoch

from .after_prefill import Written

TWIN_WAIT_SECONDS = 0.1
"""How long a request waits for another one's import of the same prefix."""


@dataclass(frozen=True)
class _Import:
    """A load under way."""

    load: Load
    targets: tuple[BlockId, ...]
    first_index: int
    """Index of the first target in the request's block table."""
    chain: list[bytes]


@dataclass
class Landed:
    """What came of one request's import."""

    request_id: str
    good: list[Written]
    bad: set[BlockId]


class Importer:
    """Decides, plans and accounts for imports.  Scheduler's thread."""

    def __init__(
        self,
        cache: SharedCache,
        config: Config,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._config = config
        self._block_size = block_size
        self._clock = clock
        self._plans: dict[str, Plan] = {}
        self._new: list[Load] = []
        self._imports: dict[str, _Import] = {}
        self._reports: dict[str, list[LoadReport]] = {}
        self._first_hashes: dict[bytes, str] = {}
        self._waiting_since: dict[str, float] = {}
        self._failed: set[str] = set()
        self._ended: set[str] = set()
        """Requests that ended while their load goes on."""

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        """Tokens beyond the local hit that another engine holds; None: ask again, the same
        prefix is being imported right now.  May be called again for the same request."""
        request_id = request.request_id
        self._plans.pop(request_id, None)
        start = num_local_tokens // self._block_size
        stop = (request.num_tokens - 1) // self._block_size
        if start >= stop or request_id in self._failed or not self.wants(request):
            return 0
        chain = request.block_hashes
        stop = min(stop, len(chain))
        if self._twin_is_loading(request_id, chain, start):
            return None
        plan = self._cache.probe(chain, start, stop)
        if plan is None:
            return 0
        self._plans[request_id] = plan
        return plan.num_blocks * self._block_size

    def wants(self, request: Any) -> bool:
        """Whether this request may share, in either direction."""
        if request.lora_request is not None:
            return False  # an adapter's name says nothing of its contents
        if request.mm_features:
            return False  # nor does an image's name, which may be the client's own
        if self._config.share is Share.SALTED_ONLY and request.cache_salt is None:
            return False
        return _asked_to_share(request.kv_transfer_params)

    def allocated(self, request: Any, block_ids: list[BlockId], num_external: int) -> None:
        """Blocks were allocated: lease and plan the load of the external ones."""
        plan = self._plans.pop(request.request_id, None)
        if num_external <= 0:
            return
        count = num_external // self._block_size
        first = plan.start if plan else len(block_ids) - count
        targets = tuple(block_ids[first : first + count])
        # Registered before anything can fail: from here on the request waits for a report.
        self._register(request, first, self._empty(request.request_id, targets))
        if plan is not None and plan.num_blocks == count:
            load = self._cache.begin_load(plan, request.request_id, targets)
            self._register(request, first, load)

    def _register(self, request: Any, first: int, load: Load) -> None:
        request_id, chain = request.request_id, request.block_hashes
        targets = tuple(t for piece in load.pieces for t in piece.targets) + load.lost
        self._imports[request_id] = _Import(load, targets, first, chain)
        if first < len(chain):
            self._first_hashes[chain[first]] = request_id
        self._new = [other for other in self._new if other.load_id != request_id] + [load]

    def take_loads(self) -> list[Load]:
        """Loads to hand to the ranks with the step being built."""
        loads, self._new = self._new, []
        return loads

    def reported(self, reports: Iterable[LoadReport]) -> None:
        """What ranks said; a load has landed only when vLLM says all of them have."""
        for report in (r for r in reports if r.load_id in self._imports):
            self._reports.setdefault(report.load_id, []).append(report)

    def land(self, request_ids: Iterable[str]) -> list[Landed]:
        """All ranks have reported these requests: account for them."""
        return [self._land(r) for r in request_ids if r in self._imports]

    def _land(self, request_id: str) -> Landed:
        done = self._imports.pop(request_id)
        self._forget_first(request_id, done)
        bad = self._cache.end_load(done.load, self._reports.pop(request_id, []))
        if bad and request_id not in self._ended:
            self._failed.add(request_id)
        self._ended.discard(request_id)
        good = []
        for offset, target in enumerate(done.targets):
            if target in bad:
                break  # a block counts only if everything before it does
            good.append(Written(target, done.first_index + offset, done.chain, True))
        return Landed(request_id, good, bad)

    def finished(self, request_id: str) -> None:
        """The request has ended; a load under way goes on until its ranks report."""
        self._plans.pop(request_id, None)
        self._waiting_since.pop(request_id, None)
        self._failed.discard(request_id)
        if request_id in self._imports:
            self._ended.add(request_id)

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
    def _empty(request_id: str, targets: tuple[BlockId, ...]) -> Load:
        """A load that brings nothing: every target is a load error, so vLLM computes it."""
        return Load(request_id, Epoch(0), NO_TICKET, NO_LEASE_BIT, (), targets)


def _asked_to_share(params: object) -> bool:
    """What a request says by ``kv_transfer_params={"kvshm": {"share": false}}``.  Comes from
    clients: whatever else than true it says instead, it is not taken for consent."""
    own = params.get("kvshm", {}) if isinstance(params, dict) else {}
    return isinstance(own, dict) and own.get("share", True) is True
