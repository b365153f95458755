"""What steps take, measured where the scheduler sees them: from built to answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from kvshm.engine.costs import Costs

STEPS_PER_MEASURED = 8
"""Of so many steps that only decode the time of one is taken; and so it is, once prefill's price is
known, of prefills in which nobody was looked for to import from."""
MAX_UNDER_WAY = 64
"""Steps whose time is taken at once; of ranks that never say that a step has ended only the latest
so many are kept."""


_Built: TypeAlias = tuple[int, float, int]
"""A step under way: its number, when it was built, and its tokens."""


class StepTimes:
    """Feeds ``costs`` with the times of steps.  Scheduler's thread."""

    def __init__(self, costs: Costs, clock: Callable[[], float], limits: Any) -> None:
        """``limits``: vLLM's SchedulerConfig."""
        longest: int = limits.max_num_batched_tokens
        if threshold := getattr(limits, "long_prefill_token_threshold", 0):
            longest = min(longest, threshold)
        costs.prefill_tokens = min(costs.prefill_tokens, longest)
        self._costs = costs
        self._clock = clock
        self.measured: deque[_Built] = deque(maxlen=MAX_UNDER_WAY)
        """Steps under way whose time is taken.  While there are none, ``ended`` need not be
        called."""
        self._every = STEPS_PER_MEASURED
        self._seen: dict[int, int] = {}
        """Steps by their kind: decodes 0, prefills in which nobody was looked for by their size."""
        self._ended_at = 0.0
        self._unanswered = 0

    def built(self, step: int, tokens: int, requests: int, quiet: bool = False) -> None:
        """A step of so many tokens, for so many requests, is being dispatched; ``quiet``: one in
        which nobody was looked for to import from."""
        decodes = tokens <= requests
        if decodes or (quiet and self._costs.known):
            # Each kind is counted on its own: traffic is regular, and all steps of one kind may
            # have odd numbers.
            kind = 0 if decodes else tokens.bit_length()
            self._seen[kind] = seen = self._seen.get(kind, 0) + 1
            if seen % self._every:
                return
        self.measured.append((step, self._clock(), tokens))

    def ended(self, step: int) -> None:
        """The output of a step is there.  It had the device to itself from when it was built,
        or from when the one before it had ended."""
        self._unanswered = 0
        now, before = self._clock(), self._ended_at
        self._ended_at = now
        while self.measured and self.measured[0][0] <= step:
            number, at, tokens = self.measured.popleft()
            if number == step:
                self._costs.add_step(tokens, now - max(at, before))

    def unanswered(self) -> bool:
        """An output is there without a rank's word on its step.  Whether there were so many, with a
        step under way, that there will be none; said again after as many more."""
        self._unanswered += bool(self.measured)
        return bool(self.measured) and self._unanswered % MAX_UNDER_WAY == 0
