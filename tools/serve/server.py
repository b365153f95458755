"""Runs the console's application with uvicorn, for a bounded number of clients."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..bounded_server import CLIENT_SECONDS, MAX_CLIENTS
from ..listening import Place, bind
from ..output import say
from ..signals import ending_signals
from .app import Console
from .guard import Guard

END_SECONDS = 2.0
"""As long as answers under way may take at the end."""


class _Protocol(H11Protocol):  # type: ignore[misc]  # see overrides of mypy
    """Closes connections of too many clients, and of those that send no whole head in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CLIENTS:
            transport.close()
        self._head_due = self.loop.call_later(CLIENT_SECONDS, self._close_if_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_due.cancel()
        super().connection_lost(exc)

    def _close_if_late(self) -> None:
        if self.cycle is None:
            self.transport.close()


class _Server(uvicorn.Server):  # type: ignore[misc]  # as above
    """Lets pages end before it waits for them."""

    def __init__(self, config: uvicorn.Config, console: Console) -> None:
        super().__init__(config)
        self._console = console

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._console.feed.end()
        await super().shutdown(sockets)


@contextmanager
def listening(place: Place) -> Iterator[socket.socket]:
    """Yield a socket that listens there; that of a path is removed.  Raises OSError."""
    with socket.socket(place.family, socket.SOCK_STREAM) as found:
        bind(found, place)
        found.listen(MAX_CLIENTS)
        try:
            yield found
        finally:
            if place.is_path:
                Path(place.address).unlink(missing_ok=True)


def serve(console: Console, guard: Guard, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT.  Main thread only, since it handles signals."""
    config = uvicorn.Config(
        console.app(guard),
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CLIENTS,
        timeout_graceful_shutdown=round(END_SECONDS),
    )
    server = _Server(config, console)
    over, ends = socket.socketpair()

    def run() -> None:
        with ends:
            server.run(sockets=[bound])

    with over, ending_signals() as ended:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        say("serve", f"serving {Place(bound.family, bound.getsockname()).url}")
        select.select([ended, over], [], [])
    server.should_exit = True
    thread.join(2 * END_SECONDS)
    if not server.started:
        raise OSError("the server did not start; see above")
