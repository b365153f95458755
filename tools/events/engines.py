"""Asks an engine's API server for its event sockets, and which model it serves."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..exchange import exchange
from .sources import Endpoints

SECONDS = 2.0
MAX_ANSWER_BYTES = 1 << 20
_ODD_ANSWER = (
    OSError,
    HTTPException,
    ValueError,
    AttributeError,
    LookupError,
    TypeError,
    RecursionError,
)


class NoSources(Exception):
    """An engine that does not say where its events are; the message says why."""


class Refused(NoSources):
    """It answers with another status than 200."""


class Engine(NamedTuple):
    model: str
    """The folder or name that it was loaded from; empty if the server does not tell."""
    sources: tuple[Endpoints, ...]
    """Of each data-parallel rank."""


def ask(url: str, seconds: float = SECONDS) -> Engine:
    """Block for about twice ``seconds`` at most, however slowly it answers.  Raises NoSources."""
    try:
        configs = _get(f"{url}/kv_event_sources", seconds)
        sources = tuple(
            _endpoints(config, urlsplit(url).hostname or "") for config in configs.values()
        )
    except _ODD_ANSWER as exc:
        raise NoSources(f"{type(exc).__name__}: {exc}") from exc
    if not sources:
        raise NoSources("it publishes no events; start it with --kv-events-config")
    return Engine(_model(url, seconds), sources)


def _model(url: str, seconds: float) -> str:
    try:
        models = _get(f"{url}/v1/models", seconds)["data"]
        return str(next(m["root"] for m in models if m.get("parent") is None))
    except Refused:  # it wants an API key
        return ""
    except (*_ODD_ANSWER, StopIteration) as exc:
        raise NoSources(f"its /v1/models: {type(exc).__name__}: {exc}") from exc


def _get(url: str, seconds: float) -> Any:
    status, text = exchange(url, None, seconds, MAX_ANSWER_BYTES)
    if status != 200:
        raise Refused(f"HTTP {status}")
    return json.loads(text)


def _endpoints(config: dict[str, Any], host: str) -> Endpoints:
    replay = config["replay_endpoint"]
    return Endpoints(
        _reachable(config["endpoint"], host), _reachable(replay, host) if replay else None
    )


def _reachable(endpoint: str, host: str) -> str:
    """vLLM's endpoint, with the server's host in the place of a wildcard."""
    named = f"[{host}]" if ":" in host else host
    return endpoint.replace("//*:", f"//{named}:").replace("//[::]:", f"//{named}:")
