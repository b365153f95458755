"""Requests that wait for another request's import of the same prefix: copied once, it is theirs."""

from __future__ import annotations

from collections.abc import Callable

from .imports import Import

TWIN_WAIT_SECONDS = 0.1
"""How long a request waits for another request's import of the same prefix."""


class Twins:
    """The first block of each import under way, and who waits for it.  Scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._importing: dict[bytes, str] = {}
        """By the hash of an import's first block: its request."""
        self._waiting_since: dict[str, float] = {}

    def waits(self, request_id: str, first_hash: bytes) -> bool:
        """Whether the request is to wait, for TWIN_WAIT_SECONDS at most, for another one's import
        of the block that it needs first."""
        other = self._importing.get(first_hash)
        if other is None or other == request_id:
            self._waiting_since.pop(request_id, None)
            return False
        since = self._waiting_since.setdefault(request_id, self._clock())
        return self._clock() - since < TWIN_WAIT_SECONDS

    def begun(self, made: Import) -> None:
        """An import begins."""
        for block_hash in made.chain[made.start : made.start + 1]:
            self._importing[block_hash] = made.request_id

    def ended(self, done: Import) -> None:
        """An import has ended."""
        for block_hash in [h for h, name in self._importing.items() if name == done.request_id]:
            del self._importing[block_hash]

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._waiting_since.pop(request_id, None)
