"""Asks an engine's API server for its event sockets, and which model it serves."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from .sources import Endpoints

SECONDS = 2.0
MAX_ANSWER_BYTES = 1 << 20


class NoSources(Exception):
    """An engine that does not say where its events are; the message says why."""


class Engine(NamedTuple):
    model: str
    """The folder or name that it was loaded from; empty if the server does not tell."""
    sources: tuple[Endpoints, ...]
    """Of each data-parallel rank."""


def ask(url: str, seconds: float = SECONDS) -> Engine:
    """Block for twice ``seconds`` at most.  Raises NoSources."""
    try:
        configs = _get(f"{url}/kv_event_sources", seconds)
        sources = tuple(
            _endpoints(config, urlsplit(url).hostname or "") for config in configs.values()
        )
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as exc:
        raise NoSources(f"{type(exc).__name__}: {exc}") from exc
    if not sources:
        raise NoSources("it publishes no events; start it with --kv-events-config")
    return Engine(_model(url, seconds), sources)


def _model(url: str, seconds: float) -> str:
    try:
        models = _get(f"{url}/v1/models", seconds)["data"]
        return str(next(m["root"] for m in models if m.get("parent") is None))
    except HTTPError:  # it wants an API key
        return ""
    except (OSError, ValueError, AttributeError, KeyError, TypeError, StopIteration) as exc:
        raise NoSources(f"its /v1/models: {type(exc).__name__}: {exc}") from exc


def _get(url: str, seconds: float) -> Any:
    opener = build_opener(ProxyHandler({}))  # the engine is on this machine
    with opener.open(url, timeout=seconds) as answer:
        return json.loads(answer.read(MAX_ANSWER_BYTES))


def _endpoints(config: dict[str, Any], host: str) -> Endpoints:
    replay = config["replay_endpoint"]
    return Endpoints(_reachable(config["endpoint"], host), replay and _reachable(replay, host))


def _reachable(endpoint: str, host: str) -> str:
    """vLLM's endpoint, with the server's host in the place of a wildcard."""
    named = f"[{host}]" if ":" in host else host
    return endpoint.replace("//*:", f"//{named}:").replace("//[::]:", f"//{named}:")
