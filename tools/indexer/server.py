"""Serves POST /query_by_hash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from ..bounded_server import BoundedServer, StartResponse, asked_path
from ..listening import Place
from ..output import say
from .query import MAX_BODY, Answer, BadQuery, Query, parse

PATH = "/query_by_hash"


class Refused(Exception):
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class IndexerServer(BoundedServer):
    """Answers queries.  ``look`` is called by one thread at a time."""

    def __init__(self, look: Callable[[Query], Answer], place: Place) -> None:
        """Raises OSError if it cannot listen there."""
        self._look = look
        super().__init__(place)
        self.set_app(self._app)

    def _app(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        status, said = HTTPStatus.OK, {}
        try:
            said = self._answer(environ)
        except Refused as exc:
            status, said = exc.status, {"error": str(exc)}
        except Exception as exc:  # any: the next query may succeed
            say("indexer", f"a query failed: {type(exc).__name__}: {exc}")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            said = {"error": "the query failed; see the log"}
        text = json.dumps(said).encode()
        head = [("Content-Type", "application/json"), ("Content-Length", str(len(text)))]
        start_response(f"{status.value} {status.phrase}", head)
        return [text]

    def _answer(self, environ: dict[str, Any]) -> dict[str, Any]:
        if asked_path(environ) != PATH:
            raise Refused(HTTPStatus.NOT_FOUND, f"there is only POST {PATH}")
        if environ["REQUEST_METHOD"] != "POST":
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"send POST to {PATH}")
        try:
            query = parse(_body(environ))
        except BadQuery as exc:
            raise Refused(HTTPStatus.BAD_REQUEST, str(exc)) from None
        with self.in_turn() as is_in_time:
            if not is_in_time:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many queries; ask again")
            return self._look(query)


def _body(environ: dict[str, Any]) -> bytes:
    length = environ.get("CONTENT_LENGTH") or ""
    if not (length.isascii() and length.isdigit()):
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
    if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
        raise Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"send at most {MAX_BODY} bytes, not {length[:20]}"
        )
    body: bytes = environ["wsgi.input"].read(int(length))
    return body
