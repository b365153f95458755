"""How much may be copied now: so many bytes a second, and no more than a moment's worth at once.
Pure."""

from __future__ import annotations

LEAST_BLOCK_BYTES = 512 << 10
"""What a block counts at least: most of the time of a small one is not its bytes'."""


class Pace:
    """A bucket that fills with time, up to ``burst_seconds`` worth of bytes."""

    def __init__(self, bytes_per_second: float, now: float, burst_seconds: float = 0.05) -> None:
        self._rate, self._burst = bytes_per_second, burst_seconds
        self._filled, self._at = 0.0, now

    def blocks(self, block_bytes: int, now: float) -> int:
        """Return how many blocks may be copied now.  The first may always follow once the time of
        what was copied before is over, however large a block is."""
        self._fill(now)
        cost = max(block_bytes, LEAST_BLOCK_BYTES)
        full = self._filled >= self._rate * self._burst
        return max(int(self._filled // cost), int(full))

    def copied(self, blocks: int, block_bytes: int) -> None:
        """Blocks are being copied: what is left may be less than nothing."""
        self._filled -= blocks * max(block_bytes, LEAST_BLOCK_BYTES)

    def _fill(self, now: float) -> None:
        self._filled += max(0.0, now - self._at) * self._rate
        self._filled, self._at = min(self._filled, self._rate * self._burst), now
