"""Serves GET /metrics by prometheus_client's server, for a bounded number of clients.

However slowly a client sends or reads, its connection is closed after ``CLIENT_SECONDS``.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from ..output import say
from ..signals import ending_signals
from .exposition import registry_of
from .samples import Samples

CLIENT_SECONDS = 10.0
"""As long as Prometheus itself waits."""
MAX_CLIENTS = 64
"""At once; the connections of more are closed."""
HELP = b"kvshm metrics: see /metrics\n"

StartResponse = Callable[[str, list[tuple[str, str]]], object]


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers requests.  ``read`` is called by one thread at a time."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(
        self,
        read: Callable[[], Samples],
        host: str,
        port: int,
        client_seconds: float = CLIENT_SECONDS,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """Raises OSError if it cannot listen there."""
        self._read, self._reading = read, threading.Lock()
        self._client_seconds, self._max_clients = client_seconds, max_clients
        self._began: dict[socket.socket, float] = {}
        self._of_thread = threading.local()
        self._ended = False
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        first = min(found, key=lambda each: each[0] != socket.AF_INET)
        self.address_family, address = first[0], first[4]
        try:
            super().__init__(address, _Handler)  # type: ignore[arg-type]  # IPv6 has four parts
        except OSError as exc:
            where = str(address[0]), port
            raise OSError(exc.errno, f"cannot listen on {where}: {exc.strerror}") from exc
        self.set_app(self._app)

    def serve(self) -> None:
        """Serve until SIGTERM or SIGINT.  Main thread only, since it handles signals."""
        host, port = str(self.server_address[0]), self.server_address[1]
        with ending_signals() as ended:
            say("metrics", f"serving http://{f'[{host}]' if ':' in host else host}:{port}/metrics")
            threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()
            ended.recv(1)
        self._ended = True
        self.shutdown()
        self.server_close()
        with self._reading:  # the reader's memory is unmapped after this, and ``_ended`` is set
            pass

    def server_bind(self) -> None:
        """Bind, and ask no name server for this machine's name."""
        if self.server_address[0] == "::":  # IPv6 alone, whatever the kernel's default is
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

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

    def _is_too_late(self) -> bool:
        return self._ended or time.monotonic() - self._of_thread.began > self._client_seconds

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

    # -- answers

    def _app(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if "://" in path:  # as through a proxy
            path = "/" + path.partition("://")[2].partition("/")[2]
        if path != "/metrics" and environ["REQUEST_METHOD"] == "GET":
            status = "200 OK" if path == "/" else "404 Not Found"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [HELP]
        environ |= {"PATH_INFO": path, "HTTP_ACCEPT": _usable(environ.get("HTTP_ACCEPT", ""))}
        registry = CollectorRegistry()
        try:
            if environ["REQUEST_METHOD"] == "GET":
                with self._reading:
                    if self._is_too_late():  # others were served first
                        start_response("503 Service Unavailable", [])
                        return []
                    registry = registry_of(self._read())
            app = make_wsgi_app(registry, disable_compression=True)
            answer: Iterable[bytes] = app(environ, start_response)
        except Exception as exc:  # any: the next scrape may succeed
            say("metrics", f"a scrape failed: {type(exc).__name__}: {exc}")
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"the scrape failed; see the log\n"]
        return answer


class _Handler(WSGIRequestHandler):
    """Logs nothing, and asks no name server for the client's name."""

    def log_message(self, *_: object) -> None:
        pass


def _usable(accept: str) -> str:
    """The Accept header, or an empty one if prometheus_client cannot read its version."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return ""
    return accept
