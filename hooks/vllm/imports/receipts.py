"""Requests that come right after another engine has computed their prompt: they are looked up when
this engine has heard of that (docs/decisions/0041-a-request-brings-a-receipt.md)."""

from __future__ import annotations

from collections.abc import Callable

from kvshm._base.timing import TIMING
from kvshm.halves import SchedulerHalf

from ..request_options import options_of
from .request_import import RequestImport

PATIENCE_SECONDS = 20 * TIMING.awaited_delay_seconds
"""Longest wait of one request.  An event takes a tenth of it at most, unless the machine is busy;
one that was lost is noticed with the next tick only, and a prompt is computed sooner than that."""
PAUSE_SECONDS = TIMING.silence_seconds
"""For how long nothing is waited for after a wait in vain.  Then it is known if no coordinator is
there that would pass events on."""


class Receipts:
    """The waits of requests that bring a receipt.  Scheduler's thread."""

    def __init__(self, cache: SchedulerHalf, clock: Callable[[], float]) -> None:
        self._cache, self._clock = cache, clock
        self._paused_until = 0.0

    def wait_for(self, import_: RequestImport) -> bool:
        """Whether the request is to be looked up later, because events of which it brings a receipt
        are still on their way."""
        receipt = options_of(import_.request).after
        if receipt is None or not self._cache.is_to_hear(receipt):
            return False
        if (now := self._clock()) < self._paused_until:
            return False
        if import_.waits_for != receipt:
            import_.waits_for, import_.waits_until = receipt, now + PATIENCE_SECONDS
        if now < (import_.waits_until or now):
            return True
        self._paused_until = now + PAUSE_SECONDS
        return False
