"""What an engine knows of its own speed: whether to import a prefix or to compute it.

Pure: who feeds it has the clock.  Two straight lines are drawn through what was seen::

    a step of n tokens      fixed + n * seconds per token       the slope is prefill's price
    a load of n bytes       latency + n / bytes per second
"""

from __future__ import annotations

from math import frexp

DECAY = 0.97
"""What an observation weighs after the next one of its size."""
UNMEASURED_TOKENS = 256
"""Least import while nothing is known: more than the steps it may cost, on most hardware.  A
smaller step may be one of decodes alone, and says nothing of prefill."""
UNMEASURED_BYTES_PER_SECOND = 2e9
UNMEASURED_LATENCY = 0.0005
WARM_UP_STEPS = 8
"""The first steps of an engine compile, allocate and touch memory: they say nothing."""
WARM_UP_LOADS = 1
OUTLIER_FACTOR = 4.0
"""What took more than so many times what was expected is learnt as if it had not."""
IMPORTS_PER_TRIAL = 8, 64
"""An engine that finds everything elsewhere would never learn, or unlearn, what computing costs:
of so many imports in a row, without a prefill, one is computed instead; until that has been seen
twice, and then."""
REFUSALS_PER_TRIAL = 64
"""After so many imports that were not worth it one is tried: no load, no better estimate."""
_MIN_SPREAD = 4.0
"""How far apart two counts have to lie for a slope to mean something."""
_EMPTY = (0.0, 0.0, 0.0)
"""Weight, count and seconds before anything was seen."""


class LinearFit:
    """``seconds = fixed + each * count``, through the means of what was seen.

    One mean for each power of two, the latest of its size weighing most: however often one size
    is seen, what is known of another one stays."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[float, float, float]] = {}  # weight, count, seconds
        self._all = _EMPTY
        self._fit: tuple[float, float] | None = None
        self._is_current = True
        """Whether ``_fit`` is of all that was seen: asked for several times for each addition."""

    def add(self, count: float, seconds: float) -> None:
        """``count`` of something, more than 0, took so many seconds."""
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

    @property
    def largest(self) -> tuple[float, float] | None:
        """Mean count and mean seconds of the largest size seen; None before any."""
        return max(self._means(), default=None)

    def fit(self) -> tuple[float, float] | None:
        """Fixed seconds and seconds for each, neither below 0; None without a spread."""
        if not self._is_current:
            self._fit, self._is_current = self._compute_fit(), True
        return self._fit

    def _means(self) -> list[tuple[float, float]]:
        return [(count / weight, total / weight) for weight, count, total in self._sizes.values()]

    def _compute_fit(self) -> tuple[float, float] | None:
        means = self._means()
        most, longest = max(means, default=(0.0, 0.0))
        small = [(seconds, count) for count, seconds in means if count * _MIN_SPREAD <= most]
        if not small:
            return None
        # The quickest: more of something takes no less, unless an accident slowed the less down.
        shortest, least = min(small)
        each = max((longest - shortest) / (most - least), 0.0)
        return max(shortest - each * least, 0.0), each

    @property
    def mean(self) -> tuple[float, float] | None:
        """Mean count and mean seconds; None before anything was seen."""
        weight, count, seconds = self._all
        return (count / weight, seconds / weight) if weight else None


class Costs:
    """Estimates of one engine.  One thread."""

    def __init__(self) -> None:
        self._steps = LinearFit()
        self._seen = 0
        self._loads = LinearFit()
        self._loaded = 0
        self._refused = 0
        self._in_a_row = 0
        """Imports since a prefill was seen."""
        self.prefill_tokens = UNMEASURED_TOKENS
        """A step of so many tokens is a prefill, not decodes alone: a step's limit may be lower
        than what is assumed."""
        self._prefills = 0
        self.known = False
        """Whether prefill's price was seen, and seen again: a first step may be slow."""

    def step(self, tokens: int, seconds: float) -> None:
        """A step that computed so many tokens took so long."""
        if tokens <= 0 or seconds <= 0:
            return
        self._seen += 1
        if self._seen > WARM_UP_STEPS:
            self._steps.add(tokens, seconds)
            if tokens >= self.prefill_tokens:
                self._prefills += 1
                self._in_a_row = 0
                self.known = self._prefills > 1

    def load(self, nbytes: int, seconds: float) -> None:
        """A load of so many bytes per rank took so long, from its begin to its re-check, with no
        other load's copies in its way."""
        if nbytes <= 0 or seconds <= 0:
            return
        self._loaded += 1
        if self._loaded > WARM_UP_LOADS:
            self._loads.add(nbytes, min(seconds, OUTLIER_FACTOR * self.copying(nbytes)))

    def computing(self, tokens: int) -> float | None:
        """Seconds by which so many tokens more make a prefill longer; None while no prefill has
        been seen.  While all steps were of about one size: as if nothing of a step were fixed."""
        if self._prefills == 0:
            return None
        if (line := self._steps.fit()) is not None:
            return line[1] * tokens
        most = self._steps.largest
        return most[1] / most[0] * tokens if most else None

    def step_seconds(self) -> float:
        """A typical step; 0 while none was seen."""
        mean = self._steps.mean
        return mean[1] if mean else 0.0

    def copying(self, nbytes: int) -> float:
        """Seconds a load of so many bytes takes; assumed while little is known."""
        line, mean = self._loads.fit(), self._loads.mean
        if line is not None:
            return line[0] + line[1] * nbytes
        if mean is not None:  # one size only: what is larger takes longer as assumed
            return mean[1] + max(nbytes - mean[0], 0.0) / UNMEASURED_BYTES_PER_SECOND
        return UNMEASURED_LATENCY + nbytes / UNMEASURED_BYTES_PER_SECOND

    def worth(self, tokens: int, nbytes: int, waiting: float) -> bool:
        """Whether to import these tokens rather than to compute them.  ``waiting``: seconds
        the request loses beside the copy.  Before prefill's price is known: whether they
        are at least UNMEASURED_TOKENS.  But for a trial now and then."""
        computing = self.computing(tokens)
        if computing is None:
            worth = tokens >= UNMEASURED_TOKENS
        else:
            worth = self.copying(nbytes) + waiting < computing
        self._in_a_row += worth
        return worth and self._in_a_row % IMPORTS_PER_TRIAL[self.known] != 0

    def try_anyway(self) -> bool:
        """An import is not worth it: whether it is tried all the same, to see."""
        self._refused = (self._refused + 1) % REFUSALS_PER_TRIAL
        return self._refused == 0
