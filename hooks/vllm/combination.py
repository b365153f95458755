"""kvshm's part in a MultiConnector: which connector loads, what the others hear, and KV events.

vLLM's MultiConnector loads from the first connector that has anything, and tells the others of the
request's blocks before the load has filled them.  If the load then loses all of them, vLLM frees
the blocks and asks again; a store that remembers them from the first time (LMCache's) would store
the contents of other requests.  So kvshm wraps methods of the MultiConnector that it is one of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

KV_EVENTS = "get_kv_connector_kv_cache_events"

Match = tuple[int | None, bool]
"""What get_num_new_matched_tokens returns."""


class Offer(NamedTuple):
    """What one connector has of a prompt behind the local hit."""

    tokens: int
    asynchronous: bool
    """Whether vLLM must hold the request back for the load."""
    is_own: bool
    """Whether it is kvshm's, a copy in place."""


def choose(offers: Sequence[Offer], block_size: int) -> int | None:
    """Return the index of the offer to load; None if there is nothing to load.

    The longest.  One that is shorter by at most a block counts as equally long, because the last
    block of a prompt is computed anyway; of these kvshm's is the cheapest, then one for which the
    request is not held back, then the first.
    """
    longest = max((offer.tokens for offer in offers), default=0)
    if longest <= 0:
        return None
    near = [i for i, o in enumerate(offers) if o.tokens > 0 and o.tokens + block_size >= longest]
    return min(near, key=lambda i: (not offers[i].is_own, offers[i].asynchronous))


class Combination:
    """The loads of one MultiConnector.  Scheduler's thread."""

    def __init__(self, multi: Any, own: Any, block_size: int, *, longest: bool) -> None:
        """Wraps two methods of ``multi``, one connector of which is kvshm's ``own``.  ``longest``:
        whether the longest prefix is loaded, not that of the first connector that has one."""
        self._multi, self._own, self._block_size = multi, own, block_size
        # A class that decides by itself keeps its decision.
        by_vllm = (
            type(multi).get_num_new_matched_tokens is MultiConnector.get_num_new_matched_tokens
        )
        self._ask = self._ask_all if longest and by_vllm else multi.get_num_new_matched_tokens
        self._tell_all = multi.update_state_after_alloc
        self._held_back: str | None = None
        """The request that was asked about last, if an asynchronous load was found for it: what
        vLLM allocates next is for this load."""
        multi.get_num_new_matched_tokens = self._match
        multi.update_state_after_alloc = self._allocated

    def _match(self, request: Any, num_computed_tokens: int) -> Match:
        found: Match = self._ask(request, num_computed_tokens)
        self._held_back = request.request_id if found[0] and found[1] else None
        return found

    def _ask_all(self, request: Any, num_computed_tokens: int) -> Match:
        """In the place of MultiConnector's method: None from one connector stands for all."""
        offers = []
        for connector in self._multi.sub_connectors:
            tokens, asynchronous = connector.get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            if tokens is None:
                return None, False
            offers.append(Offer(tokens, asynchronous, connector is self._own))
        if (best := choose(offers, self._block_size)) is None:
            return 0, False
        self._multi._requests_to_connector[request.request_id] = best
        return offers[best].tokens, offers[best].asynchronous

    def _allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Tell only the connector that loads of blocks which its load has yet to fill, and kvshm,
        which remembers no blocks of others.  vLLM calls again when they are full."""
        chosen = self._multi._requests_to_connector.get(request.request_id)
        if chosen is None or num_external_tokens <= 0 or request.request_id != self._held_back:
            self._tell_all(request, blocks, num_external_tokens)
            return
        for index, connector in enumerate(self._multi.sub_connectors):
            if index == chosen:
                connector.update_state_after_alloc(request, blocks, num_external_tokens)
            elif connector is self._own:
                connector.update_state_after_alloc(request, blocks, 0)
            else:
                expect_new_contents(connector, blocks)


def expect_new_contents(connector: Any, blocks: Any) -> None:
    """Have vLLM's OffloadingConnector end its copies of these blocks before anything is loaded into
    them: it reads blocks of requests that have ended, unless it knows that others have got them."""
    scheduler = getattr(connector, "connector_scheduler", None)
    if (noted := getattr(scheduler, "_current_batch_allocated_block_ids", None)) is not None:
        noted.update(block for table in blocks.get_block_ids() for block in table if block)


def makes_events(connector: object) -> bool:
    """Whether a connector, or a class of them, collects KV cache events in the workers."""
    kind = connector if isinstance(connector, type) else type(connector)
    return getattr(kind, KV_EVENTS) is not getattr(KVConnectorBase_V1, KV_EVENTS)


def pass_events_on(multis: Iterable[Any]) -> None:
    """Have these MultiConnectors of a worker pass on the KV cache events of the first connector
    that collects any: vLLM's own does not.  The scheduler gives them to each connector."""
    for multi in multis:
        collects = next(filter(makes_events, multi.sub_connectors), None)
        if collects is not None and not makes_events(multi):
            multi.get_kv_connector_kv_cache_events = collects.get_kv_connector_kv_cache_events
