"""What the console answers to which path, as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from h11 import LocalProtocolError
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvshm.errors import KvshmError

from ..indexer.query import MAX_BODY, BadQuery, parse
from ..metrics.exposition import CONTENT_TYPE, as_text
from ..output import say
from .feed import Feed
from .guard import HEADERS, Guard
from .node import Node

ASSETS = {
    "/": ("index.html", "text/html"),
    "/console.css": ("console.css", "text/css"),
    "/console.js": ("console.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class Console:
    """The console of a node.  ``feed``: sends pages what it finds."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.feed = Feed(node.look, node.points_since)
        self._reads_body = False  # one at a time, as each may have megabytes

    def app(self, guard: Guard) -> ASGIApp:
        routes = [Route(path, _asset(*of)) for path, of in ASSETS.items()]
        routes += [
            Route("/events", self._events),
            Route("/status", self._status),
            Route("/doctor", self._doctor),
            Route("/prefix", self._prefix, methods=["POST"]),
            Route("/metrics", self._metrics),
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
        ]
        handlers = {HTTPException: _as_text, KvshmError: _as_text, OSError: _as_text}
        return Guarded(
            Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers), guard
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(self.feed.run())
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self.feed.events(), media_type="text/event-stream")

    async def _status(self, _: Request) -> Response:
        return JSONResponse(await self._node.status())

    async def _doctor(self, _: Request) -> Response:
        return JSONResponse(await self._node.checks())

    async def _prefix(self, request: Request) -> Response:
        if self._reads_body:
            raise HTTPException(503, "another request is read; ask again")
        self._reads_body = True
        try:
            query = parse(await _body(request))
        except BadQuery as exc:
            raise HTTPException(400, str(exc)) from None
        finally:
            self._reads_body = False
        return JSONResponse(await self._node.holders(query))

    async def _metrics(self, _: Request) -> Response:
        return Response(as_text(await self._node.samples()), media_type=CONTENT_TYPE)

    async def _healthz(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, _: Request) -> Response:
        """Whether a page would show anything."""
        if self.feed.trouble:
            raise HTTPException(503, self.feed.trouble)
        return PlainTextResponse("ok\n")


def _asset(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (Path(__file__).parent / "assets" / name).read_bytes()

    async def send(_: Request) -> Response:
        return Response(content, media_type=kind)

    return send


async def _body(request: Request) -> bytes:
    """Read no more than a query may have.  Raises HTTPException."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"send at most {MAX_BODY} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the request ended early") from None  # nobody reads this
    return bytes(body)


async def _as_text(_: Request, exc: Exception) -> Response:
    if isinstance(exc, HTTPException):
        return PlainTextResponse(f"{exc.detail}\n", exc.status_code, exc.headers)
    return PlainTextResponse(f"the engines cannot be read: {exc}\n", 503)


class Guarded:
    """An application that answers only whom a guard lets in, and always with its headers."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard, self._said = app, guard, ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the start and the end of the server
            await self._app(scope, receive, send)
            return
        refused = self._guard.refusal(scope["path"], Headers(scope=scope))
        app = self._app
        if refused is not None:
            asks = {"WWW-Authenticate": 'Basic realm="kvshm"'} if refused.status == 401 else {}
            app = PlainTextResponse(f"{refused.why}\n", refused.status, asks)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            with suppress(LocalProtocolError):  # the client has broken off, or sent nonsense
                await send(message)

        try:
            await app(scope, receive, send_with_headers)
        except Exception as exc:  # any: Starlette has answered with 500, the next one may succeed
            text = f"a request failed: {type(exc).__name__}: {exc}"
            if text != self._said:
                say("serve", text)
            self._said = text
