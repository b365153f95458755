"""An HTTP server for a bounded number of clients, whose answers read shared memory.

However slowly a client sends or reads, its connection is closed after ``CLIENT_SECONDS``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from .listening import Place, bind, remove
from .output import say
from .signals import ending_signals

CLIENT_SECONDS = 10.0
"""As long as Prometheus itself waits."""
MAX_CLIENTS = 64
"""At once; the connections of more are closed."""

StartResponse = Callable[[str, list[tuple[str, str]]], object]


class BoundedServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application, until its end is signalled."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(
        self,
        place: Place,
        client_seconds: float = CLIENT_SECONDS,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """Raises OSError if it cannot listen there."""
        self._reading = threading.Lock()
        self._client_seconds, self._max_clients = client_seconds, max_clients
        self._began: dict[socket.socket, float] = {}
        self._of_thread = threading.local()
        self._ended = False
        self._place = place
        self._is_bound = False
        self.address_family = place.family
        super().__init__(place.address, _Handler)

    def serve(self, command: str, path: str) -> None:
        """Serve until SIGTERM or SIGINT.  Main thread only, since it handles signals."""
        with ending_signals() as ended:
            say(command, f"serving {self._place.url}{path}")
            threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()
            ended.recv(1)
        self._ended = True
        self.shutdown()
        self.server_close()
        with self._reading:  # the reader's memory is unmapped after this, and ``_ended`` is set
            pass

    @contextmanager
    def in_turn(self) -> Iterator[bool]:
        """One thread at a time is in here.  False: others were served first, for too long."""
        with self._reading:
            late = time.monotonic() - self._of_thread.began > self._client_seconds
            yield not (late or self._ended)

    # -- the socket

    def server_bind(self) -> None:
        """Bind, and ask no name server for this machine's name."""
        bind(self.socket, self._place)
        self._is_bound = True
        self._place = Place(self._place.family, self.socket.getsockname())
        self.server_address = self._place.address
        self.server_name = ""
        self.server_port = 0 if self._place.is_path else self._place.address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        client, address = super().get_request()
        return client, address or ("", 0)  # of a Unix socket

    def server_close(self) -> None:
        super().server_close()
        if self._is_bound:
            remove(self._place)

    # -- clients

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, unless there are too many clients."""
        if len(self._began) >= self._max_clients:
            self.shutdown_request(request)
            return
        self._began[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._of_thread.began = self._began.get(request, 0.0)
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._began.pop(request, None)

    def service_actions(self) -> None:
        """Close the connections of slow clients; their threads end by that."""
        oldest = time.monotonic() - self._client_seconds
        for request in [each for each, began in list(self._began.items()) if began < oldest]:
            with suppress(OSError):  # it has been closed meanwhile
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the client has gone, or was too slow."""


class _Handler(WSGIRequestHandler):
    """Logs nothing, and asks no name server for the client's name."""

    def log_message(self, *_: object) -> None:
        pass


def asked_path(environ: dict[str, Any]) -> str:
    """Return the path that is asked for, also where a proxy asks with the whole URL."""
    path = str(environ["PATH_INFO"])
    return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path
