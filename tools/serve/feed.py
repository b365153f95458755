"""One look at the node for all pages that are open; without a page only now and then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

from kvshm.errors import KvshmError

from ..output import Json, say
from .hour import POINT_SECONDS, Point

INTERVAL_SECONDS = 1.0
LEAST_SECONDS = 0.25
"""Between two looks, however often pages come and go."""


class Look(NamedTuple):
    """What one look found."""

    status: Json
    """As ``kvshm status --json`` prints it."""
    top: Json
    """As ``kvshm top --json`` prints it."""


class Feed:
    """What pages are sent.  All methods are for one event loop."""

    def __init__(
        self,
        look: Callable[[], Awaitable[Look]],
        points_since: Callable[[int], tuple[int, list[Point]]],
        interval: float = INTERVAL_SECONDS,
        idle_interval: float = POINT_SECONDS,
    ) -> None:
        """``points_since``: of the last hour, as ``Hour.since`` returns them."""
        self._look, self._points_since = look, points_since
        self._interval, self._idle_interval = interval, idle_interval
        self._changed = asyncio.Condition()
        self._came = asyncio.Event()
        self._number, self._text = 0, ""
        self._said = ""
        self._ended = False
        self.pages = 0
        """How many are open."""

    @property
    def has_looked(self) -> bool:
        return self._number > 0

    async def run(self) -> None:
        """Look, again and again, until this is cancelled."""
        while True:
            text = await self._events()
            async with self._changed:
                self._number, self._text = self._number + 1, text
                self._changed.notify_all()
            self._came.clear()
            await asyncio.sleep(LEAST_SECONDS)
            pause = self._interval if self.pages else self._idle_interval
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), max(pause - LEAST_SECONDS, 0.0))

    async def end(self) -> None:
        """Let all pages end."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def events(self) -> AsyncIterator[str]:
        """Yield what a page is sent, for as long as it reads: whoever is late misses frames."""
        self.pages += 1
        if self.pages == 1:
            self._came.set()
        seen = points = 0
        try:
            while (frame := await self._next(seen)) is not None:
                seen, text = frame
                points, new = self._points_since(points)
                yield text + (event("hour", [p._asdict() for p in new]) if new else "")
        finally:
            self.pages -= 1

    async def _next(self, seen: int) -> tuple[int, str] | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended or self._number > seen)
            return None if self._ended else (self._number, self._text)

    async def _events(self) -> str:
        try:
            found = await self._look()
        except (KvshmError, OSError) as exc:
            self._say(text := f"the engines cannot be read: {exc}")
            return event("failed", text)
        except Exception as exc:  # any: the next look may succeed
            self._say(f"a look failed: {type(exc).__name__}: {exc}")
            return event("failed", "a look at the node failed; see the log of kvshm serve")
        self._said = ""
        return event("status", found.status) + event("top", found.top)

    def _say(self, text: str) -> None:
        if text != self._said:
            say("serve", text)
        self._said = text


def event(name: str, data: Any) -> str:
    """Return a server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html);
    JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
