"""Beginning threads where there may be none to be had."""

from __future__ import annotations

import threading

from .errors import TransportError


def start(thread: threading.Thread) -> None:
    """Start it, or raise TransportError, which names the remedy: this user, this container or
    this service has as many as it may."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise TransportError(
            f"{thread.name}: {exc}; raise the limit of processes (ulimit -u, TasksMax, pids.max)"
        ) from exc
