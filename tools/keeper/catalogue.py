"""What the engines of one fingerprint have published, and how often, as far as heard.  Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import NamedTuple

from kvshm.api import BlockName, News

MAX_REMEMBERED = 1 << 17
"""Names of which the number of uses is known, also of blocks that no engine has any more."""


class Use(NamedTuple):
    """An engine has computed or imported a block, and published it."""

    name: BlockName
    depth: int
    """Index in its prefix, in blocks."""


class _Copy(NamedTuple):
    """What an engine has in one of its blocks."""

    generation: int
    name: BlockName
    depth: int


class Catalogue:
    """Blocks by name, and the engines that have them."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._found: dict[int, dict[int, _Copy]] = {}
        """By the engine's epoch and the block's id."""
        self._holders: dict[BlockName, list[int]] = {}
        """An engine stands there once for each of its copies."""
        self._uses = OrderedDict[BlockName, int]()

    def hear(self, news: News, keepers: Collection[int]) -> Iterator[Use]:
        """Take note of news.  Yields each use: what a keeper publishes is none, nor is what is
        heard twice."""
        if not news.epoch:
            for epoch in list(self._found):
                self._forget(epoch)
        elif news.gone:
            self._forget(news.epoch)
        blocks = self._found.setdefault(news.epoch, {}) if news.changes else {}
        for block, generation, name, depth in news.changes:
            known = blocks.get(block)
            if known is not None and (
                known.generation > generation or known[:2] == (generation, name)
            ):
                continue
            if known is not None:
                del blocks[block]
                self._drop(known.name, news.epoch)
            if name is not None:
                blocks[block] = _Copy(generation, name, depth)
                self._holders.setdefault(name, []).append(news.epoch)
                if news.epoch not in keepers:
                    self._count(name)
                    yield Use(name, depth)

    def holders(self, name: BlockName) -> Collection[int]:
        """Return the epochs of the engines that have a block."""
        return self._holders.get(name, ())

    def names(self) -> Collection[BlockName]:
        """Return all blocks that engines have."""
        return self._holders.keys()

    def blocks_of(self, epoch: int) -> Iterator[tuple[BlockName, int]]:
        """Yield an engine's blocks, each with its depth."""
        for copy in self._found.get(epoch, {}).values():
            yield copy.name, copy.depth

    def uses(self, name: BlockName) -> int:
        """Return how often engines have published a block, as far as remembered."""
        return self._uses.get(name, 0)

    def __len__(self) -> int:
        """How many different blocks the engines have."""
        return len(self._holders)

    def _count(self, name: BlockName) -> None:
        self._uses[name] = self._uses.pop(name, 0) + 1
        if len(self._uses) > self._max_remembered:
            self._uses.popitem(last=False)

    def _forget(self, epoch: int) -> None:
        for copy in self._found.pop(epoch, {}).values():
            self._drop(copy.name, epoch)

    def _drop(self, name: BlockName, epoch: int) -> None:
        """One of an engine's copies has gone."""
        holders = self._holders[name]
        holders.remove(epoch)
        if not holders:
            del self._holders[name]
