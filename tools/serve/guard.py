"""Who may ask the console: which names it answers to, who needs a token, what a page may do.

A web page of anybody, open in a browser on this machine, can send requests to a loopback address.
It cannot read the answers, as no header permits that, unless its own name is made to lead here (DNS
rebinding): hence only names that lead nowhere else are answered to, and addresses, which no name
server can change.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvshm.errors import ConfigError

LEAST_TOKEN, MOST_TOKEN = 16, 4096
"""Characters."""
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""For probes, which have no token: they tell nothing of the engines."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Connection": "close",
}
"""Of every answer."""


class Refusal(NamedTuple):
    status: int
    why: str


@dataclass(frozen=True)
class Guard:
    names: frozenset[str] = frozenset()
    """That lead here, beside ``localhost``; lower case."""
    token: str = ""
    """Empty: none is needed."""

    def refusal(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Return why a request is not answered.  ``headers``: with names in lower case."""
        name = host_name(headers.get("host", ""))
        if not name or not (name in self.names or name == "localhost" or _is_address(name)):
            why = f"the console does not answer to the name {name[:80]!r}: see kvshm serve --host"
            return Refusal(421, why)
        origin = headers.get("origin", "").rpartition("://")[2]
        site = headers.get("sec-fetch-site", "none")
        foreign = site not in ("none", "same-origin") and path != "/"
        if foreign or origin not in ("", headers["host"]):
            return Refusal(403, "the console answers to its own page only")
        if self.token and path not in OPEN_PATHS and not self._knows(headers):
            return Refusal(401, "the console needs its token, as the password or as a bearer token")
        return None

    def _knows(self, headers: Mapping[str, str]) -> bool:
        kind, _, value = headers.get("authorization", "").partition(" ")
        given = value.strip() if kind.lower() == "bearer" else ""
        if kind.lower() == "basic":
            with suppress(ValueError):
                given = base64.b64decode(value, validate=True).decode().partition(":")[2]
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def host_name(host: str) -> str:
    """Return the name in a Host header, without its port; nothing if it is none."""
    found = re.fullmatch(r"(?:\[([^][]+)\]|([^][:]+))(?::\d*)?", host)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def read_name(text: str) -> str:
    """Return a name to answer to as browsers send it.  Raises ConfigError."""
    with suppress(UnicodeError):
        name = text.encode("idna").decode().lower().removesuffix(".")
        if name and host_name(name) == name:
            return name
    raise ConfigError(f"--host={text!r} is no name of a host: give it without scheme and port")


def read_token(path: Path) -> str:
    """Return the token in a file that only its owner can read.  Raises ConfigError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            is_file = stat.S_ISREG(found.st_mode)
            token = file.read(MOST_TOKEN).decode("ascii").strip() if is_file else ""
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--token-file={str(path)!r} cannot be read: {exc}") from exc
    if is_file and found.st_mode & 0o077:
        raise ConfigError(f"--token-file={str(path)!r} can be read by other users: chmod 600 it")
    if len(token) < LEAST_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-file={str(path)!r} has no word of {LEAST_TOKEN} characters or more: "
            "openssl rand -hex 32 makes one"
        )
    return token
