"""Tells the service manager, if there is one, the coordinator's state (sd_notify(3))."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from . import logfmt
from .log_lines import Event

VARIABLE = "NOTIFY_SOCKET"
READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str, environ: Mapping[str, str]) -> None:
    """Send ``state`` to the socket that ``VARIABLE`` names, if any.  Never blocks or raises."""
    named = environ.get(VARIABLE, "")
    if not named:
        return
    address = "\0" + named[1:] if named.startswith("@") else named  # "@": an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.setblocking(False)
            manager.sendto(state.encode(), address)
    except OSError as exc:
        logfmt.write(Event.NOT_NOTIFIED, socket=named, reason=exc)
