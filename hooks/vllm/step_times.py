"""How long steps take, as the scheduler sees it: from ``build`` to the step's output."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvshm.halves import Costs

STEPS_PER_MEASURED = 8
"""Of the steps that only decode, every 8th is measured; once the cost of prefill is known, also
every 8th prefill step of about one size in which no request looked for peers."""
MAX_UNDER_WAY = 64
"""Most steps measured at a time, the latest: ranks may never report the end of a step."""


class StepTimes:
    """Gives ``costs`` the times of steps.  Scheduler's thread."""

    def __init__(self, costs: Costs, clock: Callable[[], float], limits: Any) -> None:
        """``limits``: vLLM's SchedulerConfig."""
        longest: int = limits.max_num_batched_tokens
        if threshold := getattr(limits, "long_prefill_token_threshold", 0):
            longest = min(longest, threshold)
        costs.prefill_tokens = min(costs.prefill_tokens, longest)
        self._costs = costs
        self._clock = clock
        self.measured: deque[tuple[int, float, int]] = deque(maxlen=MAX_UNDER_WAY)
        """Steps under way that are measured: number, time when built, tokens.  ``ended`` need not
        be called without any."""
        self._seen: dict[int, int] = {}
        """Number of steps by kind: 0 for decodes, quiet prefills by their size."""
        self._ended_at = 0.0
        self._unanswered = 0

    def built(self, step: int, tokens: int, requests: int, quiet: bool = False) -> None:
        """Note a step with this number of ``tokens`` and ``requests`` that is being dispatched;
        ``quiet``: none of them looked for peers."""
        decodes = tokens <= requests
        if decodes or (quiet and self._costs.known):
            # Count each kind separately: traffic is regular, and all steps of one kind may have
            # odd numbers.
            kind = 0 if decodes else tokens.bit_length()
            self._seen[kind] = seen = self._seen.get(kind, 0) + 1
            if seen % STEPS_PER_MEASURED:
                return
        self.measured.append((step, self._clock(), tokens))

    def ended(self, step: int) -> None:
        """Count the time of a step whose output has arrived: since it was built, or since the step
        before it ended."""
        self._unanswered = 0
        now, before = self._clock(), self._ended_at
        self._ended_at = now
        while self.measured and self.measured[0][0] <= step:
            number, at, tokens = self.measured.popleft()
            if number == step:
                self._costs.add_step(tokens, now - max(at, before))

    def unanswered(self) -> bool:
        """Note an output without a rank's report.  True after each MAX_UNDER_WAY of these with a
        step under way: no report will come."""
        self._unanswered += bool(self.measured)
        return bool(self.measured) and self._unanswered % MAX_UNDER_WAY == 0
