"""Machines of their own, as far as the network goes: network namespaces on one wire.

A namespace has no name here: it lives as long as this process or one that was started in it, so a
run that is killed leaves nothing behind (``reaper`` ends what it has started).  To look into one:
``nsenter --net=/proc/PID/ns/net``, with the pid of anything that runs there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CLONE_NEWNET = 0x40000000
NEEDS = (
    "tests/beyond makes network namespaces: it needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN) and the "
    "command ip (iproute2)"
)
_libc = ctypes.CDLL(None, use_errno=True)


class Traffic(NamedTuple):
    """Bytes that crossed a machine's end of the wire, with the headers of the packets."""

    received: int
    sent: int

    def __sub__(self, other: tuple[int, ...]) -> Traffic:
        return Traffic(self.received - other[0], self.sent - other[1])


class Network:
    """One machine's network: a loopback interface and, on a wire, an address."""

    def __init__(self, address: str) -> None:
        """RuntimeError, which says what is missing, if this process may not make one."""
        self.address = address
        self._fd = _new_namespace()
        self._ip("link set lo up")

    @property
    def path(self) -> str:
        """By which other programs name the namespace."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Whatever this thread connects, listens to or starts in the ``with`` is on this machine;
        Python 3.11 has no ``os.setns``."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _enter(self._fd)
        try:
            yield
        finally:
            _enter(before)
            os.close(before)

    def plug_into(self, switch: Network, port: str) -> None:
        """Connect the machine to a switch's port, of that name, by a wire of its own."""
        self._ip(f"link add wire type veth peer name {port} netns {switch.path}")
        switch._ip(f"link set {port} master switch up")
        self._ip(f"addr add {self.address}/24 dev wire")
        self._ip("link set wire up")

    def become_switch(self) -> None:
        """Let other machines plug into this one, which has its address among them."""
        self._ip("link add switch type bridge")
        self._ip(f"addr add {self.address}/24 dev switch")
        self._ip("link set switch up")

    def traffic(self) -> Traffic:
        """What has crossed the machine's end of its wire so far."""
        with self.entered():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        counts = next(line.split() for line in lines if line.strip().startswith("wire:"))
        return Traffic(int(counts[1]), int(counts[9]))

    def close(self) -> None:
        os.close(self._fd)

    def _ip(self, arguments: str) -> None:
        with self.entered():
            subprocess.run(["ip", *arguments.split()], check=True)


def _new_namespace() -> int:
    """Return a descriptor of a new network namespace; this thread stays where it is."""
    made: list[int] = []

    def make() -> None:
        if _libc.unshare(CLONE_NEWNET) == 0:
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    if not made:
        raise RuntimeError(NEEDS)
    return made[0]


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter a network namespace: {NEEDS}")
