"""One HTTP request to a server, which may answer as slowly as it likes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit


def exchange(
    url: str, body: bytes | None, seconds: float, max_bytes: int | None = None
) -> tuple[int, bytes]:
    """Return status and content of the answer, or raise OSError, HTTPException or ValueError, all
    within about ``seconds``.  ``max_bytes``: no more is read."""
    parts, until = urlsplit(url), time.monotonic() + seconds
    kind = {"http": HTTPConnection, "https": HTTPSConnection}.get(parts.scheme)
    if kind is None or not parts.hostname:
        raise ValueError("wanted http://HOST:PORT")
    with closing(kind(parts.hostname, parts.port, timeout=seconds)) as connection:
        connection.connect()
        with _shut_down_at(until, connection.sock) as late:
            try:
                headers = {"Content-Type": "application/json"}
                connection.request("GET" if body is None else "POST", parts.path, body, headers)
                reply = connection.getresponse()
                text = reply.read(max_bytes)
            except (OSError, HTTPException, ValueError):
                if not late.is_set():
                    raise
        if late.is_set():
            raise TimeoutError(f"no whole answer in {seconds:g} s")
        return reply.status, text


@contextmanager
def _shut_down_at(until: float, sock: socket.socket) -> Iterator[threading.Event]:
    """End whatever waits for this socket at a time, and set the event.  A socket's own timeout is
    for each read: a server that sends a byte now and then never meets it."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # of TLS too: nothing more is sent

    timer = threading.Timer(max(0.0, until - time.monotonic()), end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join()
