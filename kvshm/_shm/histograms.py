"""The histograms: one registry of stable ids, and the values of one engine.

Like the counters they lie in the header of an engine's slot table.  A value falls into the bucket
of its number of significant bits, so a bucket is twice as wide as the one before, and an observed
quantile is known to within a factor of two.  Ids are positions in shared memory: they are never
reused or renumbered.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvshm import _native

from .layout import HISTOGRAM_BYTES, HISTOGRAMS_OFFSET, NUM_BUCKETS, NUM_HISTOGRAMS
from .segment import Segment

REGISTRY: dict[int, Histogram] = {}
"""All histograms by id."""
_WORDS = struct.Struct(f"<{NUM_BUCKETS + 1}Q")
assert _WORDS.size == HISTOGRAM_BYTES


class Histogram(int):
    """One histogram; its number is its id."""

    label: str
    unit: str
    meaning: str
    offset: int
    """Where its words lie in a slot table."""

    def __new__(cls, number: int, label: str, unit: str, meaning: str) -> Histogram:
        """Register histogram ``number`` of values in ``unit`` ("ns" or "tokens").  ValueError if
        the id is taken or out of range."""
        if number in REGISTRY or not 0 <= number < NUM_HISTOGRAMS:
            raise ValueError(f"histogram id {number} is taken or not below {NUM_HISTOGRAMS}")
        histogram = super().__new__(cls, number)
        histogram.label, histogram.unit, histogram.meaning = label, unit, meaning
        histogram.offset = HISTOGRAMS_OFFSET + HISTOGRAM_BYTES * number
        REGISTRY[number] = histogram
        return histogram

    def __repr__(self) -> str:
        return f"<Histogram {int(self)} {self.label}>"


# -- importer's side: loads on their slowest rank, by the slowest path of their copies
_LOADS = "Time of loads whose slowest copies were made"
IMPORT_OWN = Histogram(0, "import_own", "ns", f"{_LOADS} within the own cache.")
IMPORT_SAME_GPU = Histogram(1, "import_same_gpu", "ns", f"{_LOADS} on one GPU.")
IMPORT_SHM = Histogram(2, "import_shm", "ns", f"{_LOADS} by a CPU out of shared memory.")
IMPORT_NVLINK = Histogram(3, "import_nvlink", "ns", f"{_LOADS} between GPUs by NVLink.")
IMPORT_PCIE = Histogram(4, "import_pcie", "ns", f"{_LOADS} between GPUs by PCIe.")
IMPORT_STAGED = Histogram(5, "import_staged", "ns", f"{_LOADS} through host memory.")
IMPORT_OTHER = Histogram(6, "import_other", "ns", f"{_LOADS} in a way that is not known.")
MATCH_LENGTH = Histogram(
    8, "match_length", "tokens", "Length of the prefixes found in other engines."
)

# -- exporter's side
DRAIN_WAIT = Histogram(10, "drain_wait", "ns", "Wait of a step for leases on blocks it reuses.")

# -- what kvshm takes of the engine's own time, by hook
HOOK_MATCH = Histogram(16, "hook_match", "ns", "Scheduler: looking for a prefix elsewhere.")
HOOK_ALLOCATED = Histogram(17, "hook_allocated", "ns", "Scheduler: planning a load.")
HOOK_BUILD = Histogram(18, "hook_build", "ns", "Scheduler: before a step, its drain wait included.")
HOOK_OUTPUT = Histogram(19, "hook_output", "ns", "Scheduler: after a step.")
HOOK_FINISHED = Histogram(20, "hook_finished", "ns", "Scheduler: at the end of a request.")
HOOK_BEGIN = Histogram(21, "hook_begin", "ns", "Worker: before a step with work for kvshm.")
HOOK_LOAD_AT_ONCE = Histogram(
    22, "hook_load_at_once", "ns", "Worker: waiting for the loads that its step needs."
)
HOOK_COLLECT = Histogram(23, "hook_collect", "ns", "Worker: after a step with work for kvshm.")

HOOKS = {
    histogram.label.removeprefix("hook_"): histogram
    for histogram in REGISTRY.values()
    if histogram.label.startswith("hook_")
}
"""The histograms of hooks, by the hook's name."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values that one histogram has counted."""

    counts: tuple[int, ...]
    """By significant bits; the last also has all larger values."""
    total: int
    """Sum of the values."""

    @property
    def count(self) -> int:
        """How many values."""
        return sum(self.counts)

    def quantile(self, share: float) -> int | None:
        """Return a bound that ``share`` (0 to 1) of the values do not exceed: less than twice the
        true quantile, unless it lies in the last bucket.  None if there are no values."""
        wanted, seen = max(share * self.count, 1e-9), 0
        for bits, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return (1 << bits) - 1
        return None

    def since(self, before: Distribution) -> Distribution:
        """Return the values that have come since ``before``; a smaller count than before, that of
        another epoch, counts from 0."""
        counts = tuple(
            max(new - old, 0) for new, old in zip(self.counts, before.counts, strict=True)
        )
        return Distribution(counts, max(self.total - before.total, 0))

    def __add__(self, other: Distribution) -> Distribution:
        """Return the values of both."""
        counts = tuple(map(sum, zip(self.counts, other.counts, strict=True)))
        return Distribution(counts, self.total + other.total)


NO_VALUES = Distribution((0,) * NUM_BUCKETS, 0)


class HistogramValues:
    """Reads the histograms of one slot table."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def read(self, histogram: int) -> Distribution:
        """Its values now, not read at one moment.  KeyError for an unknown histogram."""
        *counts, total = _WORDS.unpack_from(self._segment.buffer, REGISTRY[histogram].offset)
        return Distribution(tuple(counts), total)

    def snapshot(self) -> dict[str, Distribution]:
        """All values by label, in the order of their ids."""
        return {histogram.label: self.read(histogram) for histogram in REGISTRY.values()}


class Histograms(HistogramValues):
    """Reads and feeds the histograms of one slot table.  Any thread or process."""

    def observe(self, histogram: Histogram, value: int) -> None:
        """Count a value, not negative.  A reader may see the count before the sum."""
        _native.observe(self._segment.buffer, histogram.offset, value)
