"""The histograms of one engine, in the header of its slot table.  A value falls into the bucket of
its number of significant bits, so a quantile is known to within a factor of two."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvshm import _native

from .layout import HISTOGRAM_BYTES, NUM_BUCKETS
from .segment import Segment
from .statistics import Histogram

_WORDS = struct.Struct(f"<{NUM_BUCKETS + 1}Q")
assert _WORDS.size == HISTOGRAM_BYTES


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values that one histogram has counted."""

    counts: tuple[int, ...]
    """By significant bits; the last also has all larger values."""
    total: int

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> int | None:
        """Return a bound that ``share`` of the values do not exceed; None without values."""
        wanted, seen = max(share * self.count, 1e-9), 0
        for bits, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return (1 << bits) - 1
        return None

    def since(self, before: Distribution) -> Distribution:
        """Return the values since ``before``; a smaller count is that of a new epoch."""
        counts = tuple(
            max(new - old, 0) for new, old in zip(self.counts, before.counts, strict=True)
        )
        return Distribution(counts, max(self.total - before.total, 0))

    def __add__(self, other: Distribution) -> Distribution:
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return Distribution(counts, self.total + other.total)


NO_VALUES = Distribution((0,) * NUM_BUCKETS, 0)


class HistogramValues:
    """Reads the histograms of one slot table."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def read(self, histogram: int) -> Distribution:
        """Its values now, not read at one moment.  KeyError for an unknown histogram."""
        *counts, total = _WORDS.unpack_from(
            self._segment.buffer, Histogram.REGISTRY[histogram].offset
        )
        return Distribution(tuple(counts), total)

    def snapshot(self) -> dict[str, Distribution]:
        return {histogram.label: self.read(histogram) for histogram in Histogram.REGISTRY.values()}


class Histograms(HistogramValues):
    """Reads and feeds the histograms of one slot table.  Any thread or process."""

    def observe(self, histogram: Histogram, value: int) -> None:
        """Count a value, not negative.  A reader may see the count before the sum."""
        _native.observe(self._segment.buffer, histogram.offset, value)
