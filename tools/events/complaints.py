"""What went wrong, counted, with a line for operators once in a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from .follower import Trouble

SECONDS_BETWEEN_LINES = 60.0
"""About one engine and one kind of trouble."""


class Complaints:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._counts: Counter[tuple[str, Trouble]] = Counter()
        self._said_at: dict[tuple[str, Trouble], float] = {}

    def note(self, engine: str, trouble: Trouble, now: float, more: str = "") -> None:
        about = engine, trouble
        self._counts[about] += 1
        if now - self._said_at.get(about, -SECONDS_BETWEEN_LINES) >= SECONDS_BETWEEN_LINES:
            self._said_at[about] = now
            times = f" ({self._counts[about]} times)" if self._counts[about] > 1 else ""
            self._say(f"{engine}: {trouble.value}{times}{more and ': '}{more}")

    def lines(self) -> list[str]:
        """Return what was counted, for the end."""
        return [
            f"{engine}: {trouble.value}: {count} times"
            for (engine, trouble), count in sorted(
                self._counts.items(), key=lambda item: (item[0][0], item[0][1].name)
            )
        ]
