"""Runs the console's application with uvicorn, for a bounded number of clients."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..bounded_server import CLIENT_SECONDS, MAX_CLIENTS
from ..listening import Place, bind, remove
from ..output import say
from ..signals import ending_signals
from .app import Console
from .guard import Guard

END_SECONDS = 2
"""As long as answers under way may take at the end."""


class _Protocol(H11Protocol):  # type: ignore[misc]  # mypy does not see uvicorn
    """Closes connections of too many clients, and of those that send no head or body, or do not
    read, in time.  Each connection has one answer (``guard.HEADERS``)."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CLIENTS:
            transport.close()
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._next_look = self.loop.call_later(CLIENT_SECONDS, self._close_if_it_waits)

    def _close_if_it_waits(self) -> None:
        if self.cycle is None or self.cycle.more_body or self.flow.write_paused:
            self.transport.abort()
        else:
            self._look_again()


class _Server(uvicorn.Server):  # type: ignore[misc]  # nor here
    """Serves until a socket can be read, and lets pages end before it waits for them."""

    capture_signals = nullcontext

    def __init__(self, config: uvicorn.Config, console: Console, ended: socket.socket) -> None:
        super().__init__(config)
        self._console, self._ended = console, ended

    async def main_loop(self) -> None:
        """Without the ten looks a second of uvicorn's own, which would cost without any page."""
        await asyncio.get_running_loop().sock_recv(self._ended, 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._console.feed.end()
        await super().shutdown(sockets)


def serve(console: Console, guard: Guard, place: Place) -> None:
    """Serve there until SIGTERM or SIGINT.  Main thread only, since it handles signals.  Raises
    OSError."""
    config = uvicorn.Config(
        console.app(guard),
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",  # else any client could fill the log
        access_log=False,
        date_header=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=END_SECONDS,
    )
    with ending_signals() as ended, socket.socket(place.family, socket.SOCK_STREAM) as bound:
        ended.setblocking(False)
        bind(bound, place)
        bound.listen(MAX_CLIENTS)
        say("serve", f"serving {Place(place.family, bound.getsockname()).url}")
        try:
            asyncio.run(_Server(config, console, ended).serve(sockets=[bound]))
        finally:
            bound.close()
            remove(place)
