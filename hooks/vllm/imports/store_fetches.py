"""Requests that wait for a store beyond the node: for what no engine here has, and a keeper
fetches.

::

    ASKED     the keeper looks into the store; it answers within milliseconds, or not at all
    COMING    it fetches blocks, and publishes them; the request's lookups find them as they come
    ENDED     they are there, or the request waits no longer; it never asks again

A request that waits holds no blocks, and others are scheduled meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshm.halves import (
    STORE_ASKED,
    STORE_CAME,
    STORE_WAITED_US,
    Groups,
    Lacking,
    Plan,
    SchedulerHalf,
    StoreAsks,
)

from .at_once import PATIENCE

if TYPE_CHECKING:
    from .request_import import RequestImport

ANSWER_SECONDS = 0.25
"""How long an answer may take; a keeper that took longer is asked nothing for a while."""
LATE_SECONDS = 0.1
"""How much longer than PATIENCE times its estimate, or than computing takes, a fetch is waited for.
"""
MOST_SECONDS = 30.0
"""Longest wait of one request, whatever a keeper says, and where it is not known how long computing
takes."""
LOOK_SECONDS = 0.02
"""Between two lookups of a request that waits: with several groups each takes some time."""
LEAST_SECONDS = 0.01
"""What computes faster is not asked for: asking takes about a millisecond."""


@dataclass(slots=True)
class _Fetch:
    """What one request has asked for, and what it waits for."""

    number: int
    computing: float
    """Seconds that computing takes what it has asked for."""
    since: float
    until: float
    look_at: float = 0.0
    length: int | None = None
    """Hashes that the node will have; None before the answer."""
    ended: bool = False


class StoreFetches:
    """The fetches of one engine's requests.  Scheduler's thread."""

    def __init__(self, cache: SchedulerHalf, block_size: int, clock: Callable[[], float]) -> None:
        """``block_size``: tokens per hash."""
        self._cache = cache
        self._block_size = block_size
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}
        """By request, until it is finished."""

    def awaits(
        self, import_: RequestImport, plan: Plan | None, start: int, stop: int, groups: Groups
    ) -> bool:
        """Whether the request is to be asked for again later, because more of its hashes ``start``
        to ``stop`` is coming than ``plan``, which the node has."""
        found = start if plan is None else plan.start + plan.length
        fetch = self._fetches.get(import_.request_id)
        if fetch is None and found < stop and self._store.possible:
            fetch = self._ask(import_, Lacking(start, found, stop), groups)
        return fetch is not None and not fetch.ended and self._goes_on(import_, fetch, found)

    @property
    def _store(self) -> StoreAsks:
        return self._cache.planner.store

    def _ask(self, import_: RequestImport, lacking: Lacking, groups: Groups) -> _Fetch | None:
        """Return the fetch that begins; None if nothing is asked for."""
        epoch, planner = self._cache.epoch_state, self._cache.planner
        computing = planner.computing_seconds((lacking.stop - lacking.found) * self._block_size)
        if epoch is None or epoch.table.in_drain or computing < LEAST_SECONDS:
            return None
        hashes, fingerprint = import_.request.block_hashes, epoch.table.fingerprint
        number = self._store.ask(fingerprint, hashes, lacking, groups.all, computing)
        if number is None:
            return None
        self._cache.count(STORE_ASKED)
        now = self._clock()
        fetch = _Fetch(number, computing, now, now + ANSWER_SECONDS)
        self._fetches[import_.request_id] = fetch
        return fetch

    def _goes_on(self, import_: RequestImport, fetch: _Fetch, found: int) -> bool:
        now, answer = self._clock(), self._store.answer(fetch.number)
        if answer is not None and fetch.length is None and answer.length:
            fetch.length = answer.length
            longest = min(PATIENCE * answer.seconds, fetch.computing, MOST_SECONDS)
            fetch.until = now + LATE_SECONDS + longest
        came = fetch.length is not None and found >= fetch.length
        refused = answer is not None and not answer.length
        if not (came or refused) and now < fetch.until:
            if now >= fetch.look_at:
                import_.answer, fetch.look_at = None, now + LOOK_SECONDS
            return True
        if answer is None:
            self._store.give_up()
        self._end(fetch, came, now)
        return False

    def _end(self, fetch: _Fetch, came: bool, now: float) -> None:
        fetch.ended = True
        self._store.forget(fetch.number)
        self._cache.count(STORE_WAITED_US, int((now - fetch.since) * 1e6))
        if came:
            self._cache.count(STORE_CAME)

    def drop(self, request_id: str) -> None:
        """The request is finished."""
        if (fetch := self._fetches.pop(request_id, None)) is not None and not fetch.ended:
            self._end(fetch, False, self._clock())
