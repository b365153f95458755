"""Servers of descriptors in a folder of their own, for the tests of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from kvshm._shm.fd_server import FdServer

from ..waiting import PATIENCE


@pytest.fixture
def path() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="kv-")
    yield f"{directory}/fds"
    shutil.rmtree(directory)


@pytest.fixture
def serve(path: str) -> Iterator[Callable[..., FdServer]]:
    servers = []

    def start(*fds: int, client_timeout: float = PATIENCE) -> FdServer:
        server = FdServer(path, lambda request: (b"re:" + request, list(fds)), client_timeout)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()
