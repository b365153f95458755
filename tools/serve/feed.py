"""One look at the node for all pages that are open; without a page only now and then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from kvshm.errors import KvshmError

from ..output import Json, say
from .hour import POINT_SECONDS, Point

INTERVAL_SECONDS = 2.0
MOST_PAGES = 48
"""Of the connections (``MAX_CLIENTS``); the others are for what ends soon."""
LEAST_SECONDS = 0.25
"""Between two looks, however often pages come and go."""


class Feed:
    """What pages are sent.  All methods are for one event loop."""

    def __init__(
        self,
        look: Callable[[], Awaitable[tuple[Json, Json]]],
        points_since: Callable[[int], tuple[int, list[Point]]],
    ) -> None:
        """``look``, ``points_since``: see ``Node``."""
        self._look, self._points_since = look, points_since
        self._changed = asyncio.Condition()
        self._came = asyncio.Event()
        self._number, self._text = 0, ""
        self.trouble = "the console has not looked at the node yet"
        """Why pages show nothing new; empty: they do."""
        self._ended = False
        self.pages = 0
        """How many are open."""

    async def run(self) -> None:
        """Look, again and again, until this is cancelled."""
        while True:
            text = await self._events()
            async with self._changed:
                self._number, self._text = self._number + 1, text
                self._changed.notify_all()
            self._came.clear()
            await asyncio.sleep(LEAST_SECONDS)
            pause = INTERVAL_SECONDS if self.pages else POINT_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(self._came.wait(), max(pause - LEAST_SECONDS, 0.0))

    async def end(self) -> None:
        """Let all pages end."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def events(self) -> AsyncIterator[str]:
        """Yield what a page is sent, for as long as it reads: whoever is late misses frames."""
        if self.pages >= MOST_PAGES:
            yield event("failed", f"{MOST_PAGES} pages are open already")
            return
        self.pages += 1
        seen = points = 0
        if self.pages == 1:  # what the last look found may be half a minute old
            seen = self._number
            self._came.set()
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
            status, top = await self._look()
        except (KvshmError, OSError) as exc:
            return self._failed(f"the engines cannot be read: {exc}")
        except Exception as exc:  # any: the next look may succeed
            return self._failed(f"a look failed: {type(exc).__name__}: {exc}")
        self.trouble = ""
        return event("status", status) + event("top", top)

    def _failed(self, why: str) -> str:
        if why != self.trouble:
            say("serve", why)
        self.trouble = why
        return event("failed", why)


def event(name: str, data: Any) -> str:
    """Return a server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html);
    JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
