"""What looks at a node have found, one after the other, and what has changed between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..node.reader import NodeReader
from ..node.reading import NodeReading
from ..options import select
from .rates import measure
from .view import View, build_view

MINUTE_SECONDS = 60.0
_KEPT_SECONDS = 5.0


class NodeHistory:
    """Remembers the last look, and one every five seconds of the last minute.  One thread."""

    def __init__(self, reader: NodeReader, wanted: str | None = None) -> None:
        """``wanted``: the engine that is meant (None: all)."""
        self._read: Callable[[], NodeReading] = reader.read
        self._wanted = wanted
        self._last: NodeReading | None = None
        self._minute: deque[NodeReading] = deque()

    def look(self) -> View:
        """Look now.  The first time no rates are known, and the last minute is the whole time.
        Blocks as ``NodeReader.read`` does."""
        return self.look_and_read()[0]

    def look_and_read(self) -> tuple[View, NodeReading]:
        """As ``look``, and return what was read, too."""
        now, since_start = self._read(), self._last is None
        last = measure(now if self._last is None else self._last, now)
        minute = measure(None if since_start else self._minute[0], now)
        self._remember(now)
        return build_view(now, last, minute, measure(None, now), self._wanted), now

    def check_wanted(self) -> None:
        """Raises NoSuchEngine if the last look found no engine with the wanted name."""
        if self._last is not None:
            select(self._last, self._wanted)

    def look_once_more(self) -> View:
        """Look, with the whole time for the last minute: for a view that no other follows."""
        now = self._read()
        whole = measure(None, now)
        last = measure(now if self._last is None else self._last, now)
        return build_view(now, last, whole, whole, self._wanted)

    def _remember(self, now: NodeReading) -> None:
        self._last = now
        while self._minute and now.at_ns - self._minute[0].at_ns > MINUTE_SECONDS * 1e9:
            self._minute.popleft()
        if not self._minute or now.at_ns - self._minute[-1].at_ns >= _KEPT_SECONDS * 1e9:
            self._minute.append(now)
