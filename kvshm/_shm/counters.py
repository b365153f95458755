"""The counters of one engine, in the header of its slot table: tools read a dead engine's, too."""

from __future__ import annotations

from kvshm import _native

from .segment import Segment
from .statistics import BLOCKS_MATCHED, LOOKUP_HITS, LOOKUPS, Counter

_MATCH = (LOOKUPS.offset, 1, LOOKUP_HITS.offset, 1, BLOCKS_MATCHED.offset)


class CounterValues:
    """Reads the counters of one slot table."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def read(self, counter: int) -> int:
        """The current value.  KeyError for an unknown counter."""
        return _native.load(self._segment.buffer, Counter.REGISTRY[counter].offset)

    def snapshot(self) -> dict[str, int]:
        return {counter.label: self.read(counter) for counter in Counter.REGISTRY.values()}


class Counters(CounterValues):
    """Reads and increases the counters of one slot table."""

    def add(self, counter: int, amount: int = 1) -> None:
        """Add ``amount`` (not negative), atomically.  KeyError for an unknown counter."""
        number = Counter.REGISTRY[counter]
        if amount < 0:
            raise ValueError(f"{number.label} cannot count {amount}")
        _native.add(self._segment.buffer, number.offset, amount)

    def add_one_to_both(self, counter: Counter, other: Counter) -> None:
        _native.add(self._segment.buffer, counter.offset, 1, other.offset, 1)

    def add_match(self, num_blocks: int) -> None:
        """Count a lookup that has found ``num_blocks`` (not negative): in one call, since the
        scheduler waits for it."""
        _native.add(self._segment.buffer, *_MATCH, num_blocks)
