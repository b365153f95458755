"""Coordinator and engines need no network, and open no socket of one."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from . import toys
from .processes import Node
from .sandbox import skip_unless_permitted

pytestmark = pytest.mark.multiprocess
WITHOUT_NETWORK = ("unshare", "--net")
"""Not even a loopback interface is up there."""
OF_A_NETWORK = ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp")


def network_sockets(pid: int) -> list[str]:
    """Return its sockets that could reach another machine, or be reached from one."""
    place = Path(f"/proc/{pid}")
    tables = [place / "net" / name for name in OF_A_NETWORK]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()]
    known = {f"socket:[{line.split()[9]}]" for line in lines if line.split()[0] != "sl"}
    held = []
    for each in os.listdir(place / "fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            held.append(os.readlink(place / "fd" / each))
    assert any(name.startswith("socket:") for name in held)
    return [name for name in held if name in known]


def test_engines_share_where_there_is_no_network(node: Node) -> None:
    skip_unless_permitted([WITHOUT_NETWORK])
    node.coordinator(python=(*WITHOUT_NETWORK, sys.executable))
    python = (*WITHOUT_NETWORK, sys.executable)
    results = [toys.result(each) for each in [toys.start(node, n, python=python) for n in (1, 2)]]
    assert all(result["imported"] > 0 for result in results)


def test_no_process_opens_a_socket_of_a_network(node: Node) -> None:
    coordinator = node.coordinator()
    engines = [toys.start(node, seed) for seed in (1, 2)]
    for each in engines:
        toys.result(each)
    for process in (coordinator, *engines):
        assert network_sockets(process.pid) == []
    with socket.create_server(("127.0.0.1", 0)):  # it would be seen
        assert len(network_sockets(os.getpid())) == 1
    toys.finish(engines)
