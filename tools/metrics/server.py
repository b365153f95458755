"""Serves GET /metrics by prometheus_client's application."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from ..bounded_server import (
    CLIENT_SECONDS,
    MAX_CLIENTS,
    BoundedServer,
    StartResponse,
    asked_path,
)
from ..listening import resolved
from ..output import say
from .exposition import registry_of
from .samples import Samples

HELP = b"kvshm metrics: see /metrics\n"


class MetricsServer(BoundedServer):
    """Answers requests.  ``read`` is called by one thread at a time."""

    def __init__(
        self,
        read: Callable[[], Samples],
        host: str,
        port: int,
        client_seconds: float = CLIENT_SECONDS,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """Raises OSError if it cannot listen there."""
        self._read = read
        super().__init__(resolved(host, port), client_seconds, max_clients)
        self.set_app(self._app)

    def _app(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        path = asked_path(environ)
        if path != "/metrics" and environ["REQUEST_METHOD"] == "GET":
            status = "200 OK" if path == "/" else "404 Not Found"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
            return [HELP]
        environ |= {"PATH_INFO": path, "HTTP_ACCEPT": _usable(environ.get("HTTP_ACCEPT", ""))}
        registry = CollectorRegistry()
        try:
            if environ["REQUEST_METHOD"] == "GET":
                with self.in_turn() as is_in_time:
                    if not is_in_time:
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


def _usable(accept: str) -> str:
    """The Accept header, or an empty one if prometheus_client cannot read its version."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return ""
    return accept
