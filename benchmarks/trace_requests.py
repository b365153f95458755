"""Requests of a trace, read or drawn.  Pure.

A trace has a request in each line, as Mooncake publishes them: ``timestamp`` in milliseconds,
``input_length`` and ``output_length`` in tokens, ``hash_ids`` of the prompt's blocks of 512 tokens,
the last one perhaps not full.  Equal id means equal prefix up to and including that block.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from load_traffic import zipf_weights

TRACE_BLOCK_TOKENS = 512
GRID_MS = 3000
"""Times of a drawn trace are multiples of this, as those of the published one are."""


class Request(NamedTuple):
    """One request of a trace."""

    number: int
    at_ns: int
    """When it comes, after the first one."""
    tokens: int
    """Of the prompt, at least one."""
    answer: int
    """Tokens that are decoded."""
    ids: tuple[int, ...]
    """Of the blocks of its prompt."""

    @property
    def session(self) -> int:
        """What a router can know a conversation by: its first block behind the one with which
        every prompt begins.  A prompt without such a block has a session of its own, below 0."""
        return self.ids[1] if len(self.ids) > 1 else -1 - self.number

    def cacheable(self, block_tokens: int) -> int:
        """The most blocks that a cache can give it: vLLM computes at least one token."""
        return (self.tokens - 1) // block_tokens


def read(lines: Iterable[str]) -> Iterator[Request]:
    """Yield a trace's requests.  Raises ValueError for a line that is none, or lacks a block."""
    for number, line in enumerate(lines):
        try:
            one = json.loads(line)
            at_ns, tokens = round(one["timestamp"] * 1_000_000), int(one["input_length"])
            ids, answer = tuple(map(int, one["hash_ids"])), int(one["output_length"])
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"line {number + 1} is no request of a trace: {exc!r}") from exc
        if tokens < 1 or answer < 0 or len(ids) < tokens // TRACE_BLOCK_TOKENS:
            raise ValueError(f"line {number + 1}: {tokens} tokens in {len(ids)} blocks")
        yield Request(number, at_ns, tokens, answer, ids)


def draw(rate: float, seed: int = 5) -> Iterator[Request]:
    """Yield without end a trace of the same form: conversations whose turns come some tens of
    seconds apart, each with all that was said so far.  All begin with one block, and a third of
    them with one of 64 documents, by Zipf's law.  ``rate``: requests a second."""
    drawn, fresh = random.Random(seed), count(1)
    weights = zipf_weights(64, 1.0)
    documents = [[next(fresh) for _ in range(drawn.randint(4, 24))] for _ in weights]
    waiting: list[tuple[float, list[int]]] = []
    at = 0.0
    for number in count():
        at += drawn.expovariate(rate)
        ready = [place for place, (due, _) in enumerate(waiting) if due <= at]
        said = waiting.pop(ready[0])[1] if ready else [0]
        if len(said) == 1 and drawn.random() < 1 / 3:
            said = said + drawn.choices(documents, weights)[0]
        ids = said + [next(fresh) for _ in range(1 + int(drawn.expovariate(1 / 8)))]
        if drawn.random() < 0.6:
            waiting.append((at + drawn.uniform(10, 120), ids))
        tokens = len(ids) * TRACE_BLOCK_TOKENS - drawn.randrange(TRACE_BLOCK_TOKENS)
        at_ns = int(at * 1000 / GRID_MS) * GRID_MS * 1_000_000
        yield Request(number, at_ns, tokens, drawn.randint(10, 600), tuple(ids))


def unlimited_hits(requests: Iterable[Request]) -> float:
    """The share of all prompt tokens that a cache without a limit of its size would have."""
    seen: Counter[int] = Counter()
    hit = tokens = 0
    for request in requests:
        blocks = request.ids[: request.cacheable(TRACE_BLOCK_TOKENS)]
        hit += next((i for i, one in enumerate(blocks) if not seen[one]), len(blocks))
        tokens += request.tokens
        seen.update(request.ids[: request.tokens // TRACE_BLOCK_TOKENS])
    return hit * TRACE_BLOCK_TOKENS / tokens


class Hashes:
    """Block hashes as vLLM has them, for blocks of ``512 / split`` tokens."""

    def __init__(self, split: int) -> None:
        """Raises ValueError if 512 is not divided by ``split``."""
        if split < 1 or TRACE_BLOCK_TOKENS % split:
            raise ValueError(f"a block of {TRACE_BLOCK_TOKENS} tokens is not cut in {split}")
        self.block_tokens = TRACE_BLOCK_TOKENS // split
        self._of = lru_cache(1 << 14)(lambda one: _parts(one, split))

    def of(self, request: Request) -> list[bytes]:
        """The hashes of its full blocks."""
        parts = [part for one in request.ids for part in self._of(one)]
        return parts[: request.tokens // self.block_tokens]


def _parts(one: int, split: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (one, part)).digest() for part in range(split)]
