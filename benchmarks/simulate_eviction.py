"""Which blocks should engines that share drop?  Their free queues simulated, without an engine.

    .venv/bin/python benchmarks/simulate_eviction.py [--trace conversation_trace.jsonl]

Each engine keeps vLLM's rules: it hands out the free block that has rested longest; a request frees
its blocks from the last to the first; a hit makes its blocks the youngest, and an import those of
the engine that it comes from.  An engine imports what it does not have and another has.  Orders:

    plain       engines that do not share, in vLLM's order
    vllm        engines that share, in vLLM's order
    duplicates  engines that share, and drop first what another one has, too, as
                hooks/vllm/exports/duplicates.py does
    ideal       one cache of the same size together, in vLLM's order

A trace has a request in each line, as Mooncake publishes them: ``input_length`` in tokens, and
``hash_ids`` of its blocks of 512 tokens.  Without one, requests for prefixes of 16 blocks that are
popular by Zipf's law are drawn, each with ``--tail`` blocks of its own.  Prints a line of JSON for
each size of cache: the share of prompt tokens that each order finds, of which imported, and what
``plain``, ``vllm`` and ``duplicates`` reach of ``ideal``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from load_traffic import zipf_weights
from measurement import report

PREFIX_BLOCKS = 16
TRACE_BLOCK_TOKENS = 512
RUNNING = 2
"""Requests of an engine that hold their blocks at a time."""
AHEAD = 64
"""Duplicates that an engine finds in one walk along its queue."""
REST_BLOCKS = 64
"""After a walk that found fewer, one block is dropped for so many walked before the next walk."""

Prompt = Sequence[int]
"""Ids of its blocks: equal id, equal prefix."""


class Found(NamedTuple):
    """Shares of all prompt blocks."""

    local: float
    imported: float

    @property
    def all(self) -> float:
        return self.local + self.imported


class Engine:
    """One engine's cache."""

    def __init__(self, num_blocks: int, parents: dict[int, int]) -> None:
        """``parents``: of each block the one before it in its prompts."""
        self.free: OrderedDict[int, None] = OrderedDict()
        """Free blocks with contents, the one that has rested longest first."""
        self.used: Counter[int] = Counter()
        """Blocks in use, by how many requests."""
        self._num_blocks = num_blocks
        self._parents = parents
        self._running: list[list[int]] = []
        self._uses: Counter[int] = Counter()
        """How many requests have begun with a block."""
        self._found: deque[tuple[int, int]] = deque()
        """Duplicates, each with how often it was used when it was found."""
        self._rest = 0
        """Blocks to drop before the next walk."""

    def has(self, block: int) -> bool:
        return block in self.free or block in self.used

    def run(self, prompt: Prompt, cached: int, elsewhere: Callable[[int], bool] | None) -> None:
        """Give a request its blocks, ``cached`` of which it begins with.  What does not fit is not
        kept.  ``elsewhere``: whether another engine has a block, if duplicates go first."""
        if len(self._running) == RUNNING:
            self._end(self._running.pop(0))
        held = []
        for block in prompt:
            if block in self.free:
                del self.free[block]
            elif block not in self.used and not self._make_room(elsewhere):
                break
            self.used[block] += 1
            held.append(block)
        self._uses.update(held[:cached])
        self._running.append(held)

    def _end(self, held: list[int]) -> None:
        for block in reversed(held):
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block]
                self.free[block] = None

    def _make_room(self, elsewhere: Callable[[int], bool] | None) -> bool:
        """Drop a block if there is no other room.  Whether there is room then."""
        if len(self.free) + len(self.used) < self._num_blocks:
            return True
        if not self.free:
            return False
        duplicate = self._duplicate(elsewhere) if elsewhere is not None else None
        dropped = next(iter(self.free)) if duplicate is None else duplicate
        del self.free[dropped], self._uses[dropped]
        return True

    def _duplicate(self, elsewhere: Callable[[int], bool]) -> int | None:
        self._rest -= 1
        if not self._found and self._rest < 0:
            self._found.extend(islice(self._walk(elsewhere), AHEAD))
            if len(self._found) < AHEAD:
                self._rest = len(self.free) // REST_BLOCKS
        while self._found:
            block, uses = self._found.popleft()
            if block in self.free and uses == self._uses[block] and elsewhere(block):
                return block
        return None

    def _walk(self, elsewhere: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        needed = set()
        for block in self.free:
            if block not in needed and elsewhere(block):
                yield block, self._uses[block]
            elif block in needed or self._uses[block]:
                needed.add(self._parents.get(block))


class Node:
    """Engines, and what they do with each other's blocks."""

    def __init__(
        self, num_engines: int, num_blocks: int, *, share: bool, duplicates_first: bool
    ) -> None:
        """``num_blocks``: of each engine."""
        self._parents: dict[int, int] = {}
        self._engines = [Engine(num_blocks, self._parents) for _ in range(num_engines)]
        self._share, self._duplicates_first = share, duplicates_first

    def ask(self, number: int, prompt: Prompt) -> tuple[int, int]:
        """Have an engine run a prompt; returns how many blocks it has, and how many it imports."""
        self._parents.update((block, before) for before, block in pairwise(prompt))
        engine = self._engines[number]
        others = [other for other in self._engines if other is not engine] if self._share else []
        local = _length(prompt, 0, [engine])
        end = _length(prompt, local, others)
        for block in reversed(prompt[local:end]):
            exporter = next(other for other in others if other.has(block))
            if block in exporter.free:
                exporter.free.move_to_end(block)

        def elsewhere(block: int) -> bool:
            return any(other.has(block) for other in others)

        engine.run(prompt, end, elsewhere if self._duplicates_first else None)
        return local, end - local


def _length(prompt: Prompt, start: int, engines: Sequence[Engine]) -> int:
    """Return the end of the run of blocks from ``start`` on that any of the engines has."""
    end = start
    while end < len(prompt) and any(engine.has(prompt[end]) for engine in engines):
        end += 1
    return end


ORDERS = ("plain", "vllm", "duplicates", "ideal")


def make_node(order: str, num_engines: int, num_blocks: int) -> Node:
    """``num_blocks``: of each engine."""
    if order == "ideal":
        num_engines, num_blocks = 1, num_engines * num_blocks
    first = order == "duplicates"
    return Node(num_engines, num_blocks, share=order != "plain", duplicates_first=first)


def simulate(order: str, prompts: Sequence[Prompt], num_engines: int, num_blocks: int) -> Found:
    """Run the prompts, each on an engine that is drawn."""
    node, drawn = make_node(order, num_engines, num_blocks), random.Random(1)
    whole = local = imported = 0
    for prompt in prompts:
        number = drawn.randrange(num_engines) if order != "ideal" else 0
        found = node.ask(number, prompt)
        whole, local, imported = whole + len(prompt), local + found[0], imported + found[1]
    return Found(local / whole, imported / whole)


# -- prompts


def read_trace(path: Path) -> Iterator[Prompt]:
    for line in path.read_text().splitlines():
        request = json.loads(line)
        yield request["hash_ids"][: request["input_length"] // TRACE_BLOCK_TOKENS]


def popular(prefixes: int, exponent: float, tail: int, seed: int = 3) -> Iterator[Prompt]:
    """Yield without end one of the prefixes, and ``tail`` blocks that no other request has."""
    drawn, weights = random.Random(seed), zipf_weights(prefixes, exponent)
    for number in count(prefixes * PREFIX_BLOCKS, tail or 1):
        first = drawn.choices(range(prefixes), weights)[0] * PREFIX_BLOCKS
        yield [*range(first, first + PREFIX_BLOCKS), *range(number, number + tail)]


def main() -> None:
    """Command line: print a line of JSON for each size of cache."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--blocks", type=int, nargs="+", default=[130, 260], help="of each engine")
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--tail", type=int, default=1)
    args = parser.parse_args()
    made = popular(args.prefixes, args.zipf, args.tail)
    source = read_trace(args.trace) if args.trace else made
    prompts = list(islice(filter(None, source), args.requests))
    for num_blocks in args.blocks:
        found = {order: simulate(order, prompts, args.engines, num_blocks) for order in ORDERS}
        shares = {
            order: {"found": round(of.all, 4), "imported": round(of.imported, 4)}
            for order, of in found.items()
        }
        reached = {
            f"{order}_of_ideal": round(found[order].all / found["ideal"].all, 4)
            for order in ORDERS[:-1]
        }
        report("eviction", engines=args.engines, blocks=num_blocks, **shares, **reached)


if __name__ == "__main__":
    main()
