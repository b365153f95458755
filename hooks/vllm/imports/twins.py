"""Requests that wait for another request's import of the same prefix: copied once, it is theirs."""

from __future__ import annotations

from collections.abc import Callable

from .request_import import RequestImport

TWIN_WAIT_SECONDS = 0.1
"""How long a request waits for another request's import of the same prefix."""


class Twins:
    """The first block of each import under way.  Scheduler's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._importing: dict[bytes, RequestImport] = {}
        """By the hash of the first block."""

    def waits(self, import_: RequestImport, first_hash: bytes) -> bool:
        """Whether the request is to wait, for TWIN_WAIT_SECONDS at most, for another one's import
        of the block that it needs first."""
        other = self._importing.get(first_hash)
        if other is None or other.request_id == import_.request_id:
            import_.waits_since = None
            return False
        if import_.waits_since is None:
            import_.waits_since = self._clock()
        return self._clock() - import_.waits_since < TWIN_WAIT_SECONDS

    def begun(self, import_: RequestImport) -> None:
        """The blocks of an import are allocated."""
        if import_.load.first_hash is not None:
            self._importing[import_.load.first_hash] = import_

    def ended(self, import_: RequestImport) -> None:
        """The load of an import has ended."""
        first_hash = import_.load.first_hash
        if first_hash is not None and self._importing.get(first_hash) is import_:
            del self._importing[first_hash]
