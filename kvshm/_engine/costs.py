"""Estimates whether importing a prefix is faster than computing it.

Pure: the caller measures the times.  Two straight lines are fitted to the measurements::

    a step of n tokens      fixed + n * seconds per token       the slope is the cost of prefill
    a load of n bytes       latency + n / bytes per second
"""

from __future__ import annotations

import math
from math import frexp

DECAY = 0.97
"""Weight of an observation after the next one of its size."""
UNMEASURED_TOKENS = 256
"""Smallest import while no prefill was measured, and smallest step that counts as one."""
UNMEASURED_BYTES_PER_SECOND = 2e9
UNMEASURED_LATENCY = 0.0005
WARM_UP_STEPS = 8
"""The first steps compile, allocate and touch memory; their times are ignored."""
WARM_UP_LOADS = 1
OUTLIER_FACTOR = 4.0
"""A time is cut to this many times the expected one before it is learnt."""
IMPORTS_PER_TRIAL = 8, 64
"""Of imports in a row without a prefill, one in 8 is computed instead, to learn what computing
costs; one in 64 once a prefill was seen twice."""
REFUSALS_PER_TRIAL = 64
"""Every 64th import that is not worth it is done anyway, to measure loads again."""
MOST_BLOCKS = 1 << 20
"""So many are never imported."""
_MIN_SPREAD = 4.0
"""Smallest ratio of two counts from which a slope can be computed."""
_EMPTY = (0.0, 0.0, 0.0)


class LinearFit:
    """``seconds = fixed + each * count``, fitted to one mean for each power of two of ``count``, in
    which the latest observation weighs most."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float, float]] = {}  # weight, count, seconds
        self._all = _EMPTY
        self._fit: tuple[float, float] | None = None
        self._is_current = True
        """Whether ``_fit`` covers all observations; it is read several times for each ``add``."""

    def add(self, count: float, seconds: float) -> None:
        """Add an observation: ``count`` tokens or bytes, more than 0, took ``seconds``."""
        size = frexp(count)[1]
        weight, counts, total = self._sizes.get(size, _EMPTY)
        if weight:
            mean = total / weight
            seconds = min(seconds, OUTLIER_FACTOR * mean)
            if OUTLIER_FACTOR * seconds < mean:  # no accident makes it quick: the mean was too slow
                weight, counts, total = _EMPTY
        self._is_current = False
        self._sizes[size] = weight * DECAY + 1.0, counts * DECAY + count, total * DECAY + seconds
        weight, counts, total = self._all
        self._all = weight * DECAY + 1.0, counts * DECAY + count, total * DECAY + seconds

    def fit(self) -> tuple[float, float] | None:
        """Fixed seconds and seconds for each, neither below 0; None while all sizes are alike."""
        if not self._is_current:
            self._fit = self._compute_fit()
            self._is_current = True
        return self._fit

    def means(self) -> list[tuple[float, float]]:
        return [(count / weight, total / weight) for weight, count, total in self._sizes.values()]

    def _compute_fit(self) -> tuple[float, float] | None:
        means = self.means()
        most, longest = max(means, default=(0.0, 0.0))
        small = [(seconds, count) for count, seconds in means if count * _MIN_SPREAD <= most]
        if not small:
            return None
        # The quickest of them: a larger count takes no less time, unless the small one was held up.
        shortest, least = min(small)
        each = max((longest - shortest) / (most - least), 0.0)
        return max(shortest - each * least, 0.0), each

    @property
    def mean(self) -> tuple[float, float] | None:
        weight, count, seconds = self._all
        return (count / weight, seconds / weight) if weight else None


class Costs:
    """The estimates of one engine.  Used by one thread."""

    def __init__(self) -> None:
        self._steps = LinearFit()
        self._seen = 0
        self._loads = LinearFit()
        self._loaded = 0
        self._refused = 0
        self._in_a_row = 0
        self.prefill_tokens = UNMEASURED_TOKENS
        """The fewest tokens of a step that counts as a prefill.  The caller lowers it if the
        engine's limit of tokens per step is lower."""
        self._prefills = 0
        self.known = False
        """Whether a prefill was measured at least twice; the first one may be slow."""

    def add_step(self, tokens: int, seconds: float) -> None:
        """A step computed ``tokens`` in ``seconds``."""
        if tokens <= 0 or seconds <= 0:
            return
        self._seen += 1
        if self._seen > WARM_UP_STEPS:
            self._steps.add(tokens, seconds)
            if tokens >= self.prefill_tokens:
                self._prefills += 1
                self._in_a_row = 0
                self.known = self._prefills > 1

    def add_load(self, nbytes: int, seconds: float) -> None:
        """A load of ``nbytes`` per rank took ``seconds``, from its start to its re-check, alone."""
        if nbytes <= 0 or seconds <= 0:
            return
        self._loaded += 1
        if self._loaded > WARM_UP_LOADS:
            self._loads.add(nbytes, min(seconds, OUTLIER_FACTOR * self.load_seconds(nbytes)))

    def compute_seconds(self, tokens: int) -> float | None:
        """Seconds by which ``tokens`` more make a prefill longer; None before the first one."""
        if self._prefills == 0:
            return None
        if (line := self._steps.fit()) is not None:
            return line[1] * tokens
        most, longest = max(self._steps.means())
        return longest / most * tokens

    def step_seconds(self) -> float:
        """Mean seconds of a step; 0 before the first."""
        mean = self._steps.mean
        return mean[1] if mean else 0.0

    def load_seconds(self, nbytes: int) -> float:
        """Seconds a load of ``nbytes`` takes; assumed until loads were measured."""
        line, mean = self._loads.fit(), self._loads.mean
        if line is not None:
            return line[0] + line[1] * nbytes
        if mean is not None:  # one size only: more bytes take the assumed rate
            return mean[1] + max(nbytes - mean[0], 0.0) / UNMEASURED_BYTES_PER_SECOND
        return UNMEASURED_LATENCY + nbytes / UNMEASURED_BYTES_PER_SECOND

    def import_ratio(self, tokens: int, nbytes: int) -> float:
        """What importing takes, divided by what computing the same takes: of a load of the mean
        size, or else of these tokens in ``nbytes``.  Besides its copy an import costs about a short
        step: it is looked up, handed to ranks, and published.  0 before a prefill was measured."""
        if mean := self._loads.mean:  # loads of one size do not show what a shorter one takes
            tokens, nbytes = round(tokens * mean[0] / nbytes), round(mean[0])
        computing = self.compute_seconds(tokens)
        if computing is None:
            return 0.0
        line = self._steps.fit()
        importing = self.load_seconds(nbytes) + (line[0] if line else 0.0)
        return importing / computing if computing else math.inf

    def least_blocks(self, tokens: int, nbytes: int) -> int:
        """The fewest blocks, each of these tokens and bytes, that are imported sooner than
        computed, or up to twice as many."""
        if self.compute_seconds(tokens) is None:
            return -(-UNMEASURED_TOKENS // tokens)
        blocks = 1
        while blocks < MOST_BLOCKS:
            if self.load_seconds(blocks * nbytes) < (self.compute_seconds(blocks * tokens) or 0.0):
                return blocks
            blocks *= 2
        return blocks

    def worth(self, tokens: int, nbytes: int, waiting: float) -> bool:
        """Whether to import rather than compute these tokens, at times False as a trial.
        ``waiting``: seconds that the request loses besides the copy."""
        computing = self.compute_seconds(tokens)
        if computing is None:
            worth = tokens >= UNMEASURED_TOKENS
        else:
            worth = self.load_seconds(nbytes) + waiting < computing
        self._in_a_row += worth
        return worth and self._in_a_row % IMPORTS_PER_TRIAL[self.known] != 0

    def try_anyway(self) -> bool:
        """Whether to do an import that is not worth it, as a trial (REFUSALS_PER_TRIAL)."""
        self._refused = (self._refused + 1) % REFUSALS_PER_TRIAL
        return self._refused == 0
