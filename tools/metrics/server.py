"""A small HTTP server that answers GET /metrics, on one event loop and one thread for reading.

However many clients connect, and however slowly they send or read, each is done with after
``CLIENT_SECONDS``, and takes no thread.  Every answer closes its connection.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import NamedTuple

from ..plain_text import clean

CLIENT_SECONDS = 10.0
"""From the beginning of a connection to its end; Prometheus itself waits as long."""
MAX_CLIENTS = 64
"""At once; more are hung up on."""
HEAD_BYTES = 16384
PLAIN = "text/plain; charset=utf-8"
HELP = b"kvshm metrics: see /metrics\n"
END_OF_HEAD = b"\r\n\r\n"

Scrape = Callable[[str], tuple[bytes, str]]
"""Takes an Accept header, returns the metrics and their content type."""


class Answer(NamedTuple):
    """What goes back to a client."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Connection: close",
            *self.headers,
        )
        return "\r\n".join(head).encode("ascii") + END_OF_HEAD + self.body


class MetricsServer:
    """Answers requests.  ``scrape`` is called on one thread, one call at a time."""

    def __init__(
        self,
        scrape: Scrape,
        client_seconds: float = CLIENT_SECONDS,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        self._scrape = scrape
        self._client_seconds, self._max_clients = client_seconds, max_clients
        self._clients = 0
        self._thread = ThreadPoolExecutor(1)

    async def serve(self, host: str, port: int) -> None:
        """Serve until SIGTERM or SIGINT.  Raises OSError if it cannot listen there."""
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        server = await asyncio.start_server(self._client, host, port, limit=HEAD_BYTES)
        for listening in server.sockets:
            address, number = listening.getsockname()[:2]
            shown = f"[{address}]" if ":" in address else address
            _say(f"serving http://{shown}:{number}/metrics")
        await ended.wait()
        server.close()
        self._thread.shutdown(cancel_futures=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._clients >= self._max_clients:
            writer.transport.abort()
            return
        self._clients += 1
        try:
            async with asyncio.timeout(self._client_seconds):
                await self._converse(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # the client is gone, or too slow
        except asyncio.CancelledError:
            pass  # the server ends; asyncio's streams would print a traceback
        finally:
            self._clients -= 1
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._answer(await reader.readuntil(END_OF_HEAD))
        except asyncio.LimitOverrunError:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            answer = Answer(status, b"the request is too long\n")
        writer.transport.set_write_buffer_limits(0)
        writer.write(answer.encoded())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def _answer(self, head: bytes) -> Answer:
        first, *rest = head.decode("latin-1").split("\r\n")
        match first.split(" "):
            case [method, target, version] if version.startswith("HTTP/1."):
                pass
            case _:
                return Answer(HTTPStatus.BAD_REQUEST, b"this is not HTTP/1\n")
        if method != "GET":
            refused = HTTPStatus.METHOD_NOT_ALLOWED
            return Answer(refused, b"only GET is answered\n", headers=("Allow: GET",))
        path = target.partition("?")[0]
        if "://" in path:  # as through a proxy
            path = "/" + path.partition("://")[2].partition("/")[2]
        if path == "/":
            return Answer(HTTPStatus.OK, HELP)
        if path != "/metrics":
            return Answer(HTTPStatus.NOT_FOUND, HELP)
        return await self._metrics(_accept(rest))

    async def _metrics(self, accept: str) -> Answer:
        loop = asyncio.get_running_loop()
        try:
            body, content_type = await loop.run_in_executor(self._thread, self._scrape, accept)
        except Exception as exc:  # any: the next scrape may succeed
            _say(f"a scrape failed: {type(exc).__name__}: {exc}")
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the scrape failed; see the log\n")
        return Answer(HTTPStatus.OK, body, content_type)


def _accept(headers: list[str]) -> str:
    """The value of the Accept header; empty if there is none."""
    pairs = (header.partition(":") for header in headers)
    return next((value.strip() for name, _, value in pairs if name.lower() == "accept"), "")


def _say(text: str) -> None:
    print("kvshm metrics:", clean(" ".join(text.split())), file=sys.stderr, flush=True)
