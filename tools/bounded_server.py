"""An HTTP server for a bounded number of clients, whose answers read shared memory.

However slowly a client sends or reads, its connection is closed after ``CLIENT_SECONDS``.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvshm._base.rundir import SOCKET_PATH_BYTES
from kvshm._shm.fds import is_served

from .output import say
from .signals import ending_signals

CLIENT_SECONDS = 10.0
"""As long as Prometheus itself waits."""
MAX_CLIENTS = 64
"""At once; the connections of more are closed."""
ONLY_OWNER = 0o177

StartResponse = Callable[[str, list[tuple[str, str]]], object]


def resolved(host: str, port: int) -> tuple[int, Any]:
    """Return the family and address to listen at, IPv4 if there is a choice.  Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    first = min(found, key=lambda each: each[0] != socket.AF_INET)
    return first[0], first[4]


class BoundedServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application, until its end is signalled."""

    daemon_threads = True
    request_queue_size = 100

    def __init__(
        self,
        family: int,
        address: Any,
        client_seconds: float = CLIENT_SECONDS,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """``address``: for AF_UNIX a path.  Raises OSError if it cannot listen there."""
        self._reading = threading.Lock()
        self._client_seconds, self._max_clients = client_seconds, max_clients
        self._began: dict[socket.socket, float] = {}
        self._of_thread = threading.local()
        self._ended = False
        self._bound: Path | None = None
        self.address_family = family
        try:
            super().__init__(address, _Handler)
        except OSError as exc:
            where = address if family == socket.AF_UNIX else (str(address[0]), address[1])
            raise OSError(exc.errno, f"cannot listen on {where}: {exc.strerror}") from exc

    @property
    def url(self) -> str:
        if self._is_local:
            return f"unix:{self.server_address}"
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def serve(self, command: str, path: str) -> None:
        """Serve until SIGTERM or SIGINT.  Main thread only, since it handles signals."""
        with ending_signals() as ended:
            say(command, f"serving {self.url}{path}")
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

    @property
    def _is_local(self) -> bool:
        return self.address_family == socket.AF_UNIX

    def server_bind(self) -> None:
        """Bind, and ask no name server for this machine's name."""
        if self._is_local:
            self._bind_path(Path(str(self.server_address)))
        else:
            if self.server_address[0] == "::":  # IPv6 alone, whatever the kernel's default is
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            TCPServer.server_bind(self)
        self.server_name = ""
        self.server_port = 0 if self._is_local else self.server_address[1]
        self.setup_environ()

    def _bind_path(self, path: Path) -> None:
        """Bind for this user only, in the place of a socket that a killed process has left."""
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            most = f"the path of a Unix socket has {SOCKET_PATH_BYTES} bytes at most"
            raise OSError(errno.ENAMETOOLONG, most)
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not is_served(path):
                path.unlink()
        before = os.umask(ONLY_OWNER)
        try:
            self.socket.bind(str(path))
            self._bound = path
        finally:
            os.umask(before)

    def get_request(self) -> tuple[socket.socket, Any]:
        client, address = super().get_request()
        return client, address or ("", 0)  # of a Unix socket

    def server_close(self) -> None:
        super().server_close()
        if self._bound is not None:
            self._bound.unlink(missing_ok=True)

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
