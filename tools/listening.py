"""Where a command listens: at an address, or at a Unix socket that only its user can use."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvshm._base.rundir import SOCKET_PATH_BYTES
from kvshm._shm.fds import is_served

DEFAULT_ADDRESS = "127.0.0.1"
ONLY_OWNER = 0o177


class Place(NamedTuple):
    family: int
    address: Any
    """As ``socket.bind`` takes it: for AF_UNIX a path."""

    @property
    def is_path(self) -> bool:
        return self.family == socket.AF_UNIX

    @property
    def is_of_this_machine(self) -> bool:
        """Whether no other machine can reach it."""
        if self.is_path:
            return True
        address = ipaddress.ip_address(self.address[0])
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    @property
    def url(self) -> str:
        if self.is_path:
            return f"unix:{self.address}"
        host, port = self.address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Return address and port of ``[ADDR:]PORT``, as an argparse type."""
    address, colon, port = text.rpartition(":")
    plain = address.removeprefix("[").removesuffix("]") if address.startswith("[") else address
    known = port.isascii() and port.isdigit() and int(port) < 65536
    if not known or (colon and not plain) or (":" in plain and plain == address):
        wrong = f"{text!r} is not a port (9402), an address and port (10.0.0.1:9402, [::1]:9402)"
        raise argparse.ArgumentTypeError(wrong)
    return plain or DEFAULT_ADDRESS, int(port)


def parse_place(text: str) -> Place:
    """Return the place of a path, which has a / in it, or of an address, as an argparse type."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is a URL: give a path, or [ADDR:]PORT")
    if "/" in text:
        return Place(socket.AF_UNIX, text)
    host, port = parse_address(text)
    try:
        return resolved(host, port)
    except (OSError, UnicodeError) as exc:
        raise argparse.ArgumentTypeError(f"{host!r} is not an address: {exc}") from exc


def resolved(host: str, port: int) -> Place:
    """Return where to listen, IPv4 if there is a choice.  Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    first = min(found, key=lambda each: each[0] != socket.AF_INET)
    return Place(first[0], first[4])


def bind(unbound: socket.socket, place: Place) -> None:
    """Bind there, a Unix socket as ``_bind_path`` does.  Raises OSError, which names the place."""
    try:
        if place.is_path:
            _bind_path(unbound, Path(place.address))
            return
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if place.address[0] == "::":  # IPv6 alone, whatever the kernel's default is
            unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        unbound.bind(place.address)
    except OSError as exc:
        where = place.address if place.is_path else tuple(place.address[:2])
        raise OSError(exc.errno, f"cannot listen on {where}: {exc.strerror}") from exc


def remove(place: Place) -> None:
    """Remove the socket of a path that no longer listens, unless another process does by now."""
    if place.is_path and not is_served(Path(place.address)):
        Path(place.address).unlink(missing_ok=True)


def _bind_path(unbound: socket.socket, path: Path) -> None:
    """Bind for this user only, in the place of a socket that a killed process has left."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        most = f"the path of a Unix socket has {SOCKET_PATH_BYTES} bytes at most"
        raise OSError(errno.ENAMETOOLONG, most)
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is something else than a socket")
        if not is_served(path):
            path.unlink()
    before = os.umask(ONLY_OWNER)
    try:
        unbound.bind(str(path))
    finally:
        os.umask(before)
