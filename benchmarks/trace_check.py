"""The same replay once more, in dicts: what ``bench_traces.py`` must find, to the block.

Written apart from the other ``trace_*.py`` and using none of them, nor kvshm, nor vLLM: only what
their contracts say.  Engines hand out blocks without contents first, then the one that has rested
longest; a request lets go of its blocks from the last to the first; a block counts as the engine's
own from when it is taken, and as another's to import from when its prompt is computed.  It knows
vLLM's order only, and events that are everywhere at once.  Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Ask(NamedTuple):
    """A request: ``keys`` of its full blocks, where equal keys mean equal prefixes."""

    at: int
    tokens: int
    answer: int
    keys: Sequence[object]
    session: int


class Times(NamedTuple):
    """Nanoseconds of a computed token, an imported block, a prompt, and a decoded token."""

    token: int
    block: int
    prompt: int
    decode: int


@dataclass
class Cache:
    """One pool of blocks.  A copy is a block with contents, by a number that no other one gets."""

    blank: int
    """Free blocks without contents."""
    key_of: dict[int, object] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    copies: dict[object, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Of each key, the oldest first: hits are on that."""
    resting: OrderedDict[int, None] = field(default_factory=OrderedDict)
    shown: set[int] = field(default_factory=set)
    """Copies that others may import."""
    offered: dict[object, int] = field(default_factory=lambda: defaultdict(int))
    """How many of these there are, by key."""

    def prefix(self, keys: Sequence[object]) -> list[int]:
        found = []
        for key in keys:
            if not self.copies.get(key):
                break
            found.append(self.copies[key][0])
        return found

    def room_for(self, more: int, hits: Sequence[int]) -> bool:
        rested = sum(copy in self.resting for copy in hits)
        return more <= self.blank + len(self.resting) - rested

    def use(self, copy: int) -> None:
        self.resting.pop(copy, None)
        self.users[copy] += 1

    def take(self) -> None:
        if self.blank:
            self.blank -= 1
            return
        copy, _ = self.resting.popitem(last=False)
        key = self.key_of.pop(copy)
        self.copies[key].remove(copy)
        del self.users[copy]
        if copy in self.shown:
            self.shown.remove(copy)
            self.offered[key] -= 1

    def fill(self, copy: int, key: object) -> None:
        self.key_of[copy], self.users[copy] = key, 1
        self.copies[key].append(copy)

    def show(self, copy: int) -> None:
        if copy not in self.shown:
            self.shown.add(copy)
            self.offered[self.key_of[copy]] += 1

    def let_go(self, copy: int) -> None:
        self.users[copy] -= 1
        if not self.users[copy]:
            self.resting[copy] = None


class Result(NamedTuple):
    """Of each request, in the order in which they came."""

    local: list[int]
    imported: list[int]
    first_token: list[int]


class Simulation:
    """One run of a trace.  ``mode``: alone, order (they share) or ideal (one cache)."""

    def __init__(
        self, asks: Sequence[Ask], engines: int, blocks: int, block_tokens: int, times: Times
    ) -> None:
        """``blocks``: of each engine."""
        self.asks, self.engines, self.blocks = asks, engines, blocks
        self.block_tokens, self.times = block_tokens, times

    def run(self, mode: str, routing: str) -> Result:
        single = mode == "ideal"
        size = self.engines * self.blocks if single else self.blocks
        self._caches = [Cache(size) for _ in range(1 if single else self.engines)]
        self._of = [0 if single else engine for engine in range(self.engines)]
        self._shares = mode == "order"
        self._lines: list[list[int]] = [[] for _ in range(self.engines)]
        self._works: list[int | None] = [None] * self.engines
        self._held: dict[int, tuple[list[int], int]] = {}
        self._next_copy = 0
        count = len(self.asks)
        self._result = Result([0] * count, [0] * count, [0] * count)
        self._agenda = [(ask.at, 2, number, -1) for number, ask in enumerate(self.asks)]
        heapq.heapify(self._agenda)
        while self._agenda:
            now, what, number, engine = heapq.heappop(self._agenda)
            if what == 2:
                self._lines[self._choose(number, routing)].append(number)
            elif what == 1:
                self._is_computed(now, number, engine)
            else:
                self._has_ended(number, engine)
            for each in range(self.engines):
                self._start(now, each)
        return self._result

    def _choose(self, number: int, routing: str) -> int:
        ask, turn = self.asks[number], number % self.engines
        if routing == "rr":
            return turn
        if routing == "sticky":
            return (abs(ask.session) * 0x9E3779B97F4A7C15 % 2**64 // 2**32) % self.engines
        loads = [
            len(line) + (w is not None) for line, w in zip(self._lines, self._works, strict=True)
        ]
        best, best_rank = -1, (0, 0, 0)
        for engine in range(self.engines):
            if loads[engine] > min(loads) + 2:
                continue
            known = len(self._caches[self._of[engine]].prefix(ask.keys[: self._most(ask)]))
            behind = (engine - turn) % self.engines
            rank = (max(known - 1, 0), -loads[engine], -behind)
            if best < 0 or rank > best_rank:
                best, best_rank = engine, rank
        return best

    def _most(self, ask: Ask) -> int:
        return (ask.tokens - 1) // self.block_tokens

    def _start(self, now: int, engine: int) -> None:
        if self._works[engine] is not None or not self._lines[engine]:
            return
        number = self._lines[engine][0]
        ask, cache = self.asks[number], self._caches[self._of[engine]]
        hits = cache.prefix(ask.keys[: self._most(ask)])
        more = -(-(ask.tokens + ask.answer) // self.block_tokens) - len(hits)
        if not cache.room_for(more, hits):
            return
        del self._lines[engine][0]
        imported = self._importable(ask, engine, len(hits))
        for copy in hits:
            cache.use(copy)
        for _ in range(more):
            cache.take()
        held = list(hits)
        for key in ask.keys[len(hits) :]:
            cache.fill(self._next_copy, key)
            held.append(self._next_copy)
            self._next_copy += 1
        self._held[number] = held, more - (len(held) - len(hits))
        self._works[engine] = number
        computed = ask.tokens - (len(hits) + imported) * self.block_tokens
        spent = self.times.prompt + computed * self.times.token + imported * self.times.block
        heapq.heappush(self._agenda, (now + spent, 1, number, engine))
        self._result.local[number], self._result.imported[number] = len(hits), imported
        self._result.first_token[number] = now + spent - ask.at

    def _importable(self, ask: Ask, engine: int, start: int) -> int:
        others = [c for place, c in enumerate(self._caches) if place != engine]
        found = start
        while self._shares and found < self._most(ask):
            if not any(other.offered.get(ask.keys[found]) for other in others):
                break
            found += 1
        return found - start

    def _is_computed(self, now: int, number: int, engine: int) -> None:
        self._works[engine] = None
        for copy in self._held[number][0]:
            self._caches[self._of[engine]].show(copy)
        over = now + self.asks[number].answer * self.times.decode
        heapq.heappush(self._agenda, (over, 0, number, engine))

    def _has_ended(self, number: int, engine: int) -> None:
        copies, blank = self._held.pop(number)
        cache = self._caches[self._of[engine]]
        cache.blank += blank
        for copy in reversed(copies):
            cache.let_go(copy)
