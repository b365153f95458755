"""A trace played at its own times, by a clock of its own: who serves which request when.  Pure.

The model of one engine, the same for every cache that is compared:

- It computes one prompt at a time, in the order in which they came: each computed token and each
  imported block takes its time, and each prompt some more.
- The first token is there when the prompt is computed; from then on each token of the answer takes
  its time, whatever else the engine does.
- A request holds the blocks of its prompt and answer from the beginning of its computing until the
  answer's last token.  One for which there is no room waits, and those behind it.

Of what happens at one moment, answers that end come first, then prompts that are computed, then
requests that arrive, and each of these in the order of the requests.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from trace_requests import Request

MOST_AHEAD = 2
"""By how many requests an engine may have more to do than the one with the least, and still get one
because of its prefix."""


@dataclass(frozen=True)
class Service:
    """What takes how long on each engine, in whole nanoseconds, so that sums are exact."""

    token_ns: int
    """A token that is computed."""
    block_ns: int
    """A block that is imported."""
    prompt_ns: int
    """A prompt, besides its tokens."""
    decode_ns: int
    """A token of an answer."""

    def prompt(self, tokens: int, imported: int) -> int:
        return self.prompt_ns + tokens * self.token_ns + imported * self.block_ns


class Found(NamedTuple):
    """Where the blocks of a prompt come from."""

    local: int
    imported: int
    lost: int = 0
    """Blocks that another engine seemed to have, and had no more."""


class Caches(Protocol):
    """The caches of all engines, in one mode."""

    def cached(self, engine: int, request: Request) -> int:
        """How many blocks of a prompt the engine itself has."""
        ...

    def begin(self, engine: int, request: Request) -> Found | None:
        """Give a request its blocks; None without room for them."""
        ...

    def computed(self, engine: int, request: Request) -> None:
        """Its prompt is computed."""
        ...

    def end(self, engine: int, request: Request) -> None:
        """It needs its blocks no more."""
        ...

    def next_due(self) -> int | None:
        """When ``deliver`` has something to do, in nanoseconds."""
        ...

    def deliver(self) -> None:
        """Bring the engines what is under way and due now."""
        ...


@dataclass
class Clock:
    """The time of a replay, in nanoseconds."""

    ns: int = 0

    def seconds(self) -> float:
        return self.ns / 1e9

    def whole_ns(self) -> int:
        return self.ns


# -- routers: (request, requests that wait or are computed by each engine, blocks of the prompt that
# an engine has) -> the engine's number

Router = Callable[[Request, Sequence[int], Callable[[int], int]], int]


def round_robin(request: Request, busy: Sequence[int], cached: Callable[[int], int]) -> int:
    return request.number % len(busy)


def sticky(request: Request, busy: Sequence[int], cached: Callable[[int], int]) -> int:
    """By the session; a request without one by its number."""
    mixed = (abs(request.session) * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF) >> 32
    return mixed % len(busy)


def prefix_aware(request: Request, busy: Sequence[int], cached: Callable[[int], int]) -> int:
    """The engine with the longest prefix, if it has not much more to do than others; of several the
    one with the least to do, and of these in turns.  The block with which every prompt begins is
    no reason."""
    least = min(busy)
    allowed = [number for number, load in enumerate(busy) if load <= least + MOST_AHEAD]
    known = {number: max(cached(number) - 1, 0) for number in allowed}
    turn = request.number % len(busy)
    return min(allowed, key=lambda n: (-known[n], busy[n], (n - turn) % len(busy)))


ROUTERS: dict[str, Router] = {"rr": round_robin, "sticky": sticky, "prefix": prefix_aware}


class _Kind(IntEnum):
    ENDED = 0
    COMPUTED = 1
    ARRIVED = 2


@dataclass
class Played:
    """What became of the requests, in the order in which their prompts were begun."""

    requests: list[Request] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    first_token_ns: list[int] = field(default_factory=list)
    """From a request's arrival to its first token."""
    engines: list[int] = field(default_factory=list)


class Replay:
    """One trace on some engines."""

    def __init__(
        self,
        caches: Caches,
        engines: int,
        service: Service,
        route: Router,
        clock: Clock,
        block_tokens: int,
    ) -> None:
        self._caches, self._service, self._route, self._clock = caches, service, route, clock
        self._block_tokens = block_tokens
        self._queues: list[deque[Request]] = [deque() for _ in range(engines)]
        self._computing: list[Request | None] = [None] * engines
        self._due: list[tuple[int, int, int, int, Request]] = []
        self.played = Played()

    def run(self, requests: Sequence[Request]) -> Played:
        """Raises ValueError for a request that never fits."""
        for request in requests:
            heapq.heappush(self._due, (request.at_ns, _Kind.ARRIVED, request.number, -1, request))
        while self._due:
            at, kind, _, engine, request = heapq.heappop(self._due)
            while (due := self._caches.next_due()) is not None and due < at:
                self._clock.ns = max(self._clock.ns, due)
                self._caches.deliver()
            self._clock.ns = at
            self._happen(_Kind(kind), engine, request)
            for number in range(len(self._queues)):
                self._begin_next(number)
        if left := next((queue[0] for queue in self._queues if queue), None):
            raise ValueError(
                f"request {left.number} of {left.tokens} tokens never fits: more blocks"
            )
        return self.played

    def _happen(self, kind: _Kind, engine: int, request: Request) -> None:
        if kind is _Kind.ARRIVED:
            busy = [
                len(queue) + (one is not None)
                for queue, one in zip(self._queues, self._computing, strict=True)
            ]
            chosen = self._route(request, busy, lambda n: self._caches.cached(n, request))
            self._queues[chosen].append(request)
        elif kind is _Kind.COMPUTED:
            self._computing[engine] = None
            self._caches.computed(engine, request)
            until = self._clock.ns + request.answer * self._service.decode_ns
            self._push(until, _Kind.ENDED, engine, request)
        else:
            self._caches.end(engine, request)

    def _begin_next(self, engine: int) -> None:
        queue = self._queues[engine]
        if not queue or self._computing[engine] is not None:
            return
        if (found := self._caches.begin(engine, queue[0])) is None:
            return
        request = self._computing[engine] = queue.popleft()
        computed = request.tokens - (found.local + found.imported) * self._block_tokens
        until = self._clock.ns + self._service.prompt(computed, found.imported)
        self._push(until, _Kind.COMPUTED, engine, request)
        self.played.requests.append(request)
        self.played.found.append(found)
        self.played.first_token_ns.append(until - request.at_ns)
        self.played.engines.append(engine)

    def _push(self, at: int, kind: _Kind, engine: int, request: Request) -> None:
        heapq.heappush(self._due, (at, kind, request.number, engine, request))
