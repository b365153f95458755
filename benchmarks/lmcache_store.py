"""LMCache's server (its MP mode, as its documentation starts it), and its connector's settings.

LMCache is installed in a folder of its own, so that only what needs it sees it: ``pip install
--no-deps --target FOLDER -r requirements/lmcache.txt``; `make test-all` does that.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_node import clean_environment, free_port, offline, wait_until

CONNECTOR = "LMCacheMPConnector"
SERVER_TIMEOUT_S = 120.0
UNTRACKED = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Store:
    """A server that listens."""

    environment: Mapping[str, str]
    """Of the engines that use it."""
    port: int
    health_port: int

    @property
    def connector(self) -> dict[str, Any]:
        """The connector's transfer configuration.  How bytes move is left to LMCache: on a CPU its
        ``lmcache_driven`` moves the KV cache to memory that kvshm cannot share."""
        settings = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self.port,
            "lmcache.mp.mq_timeout": 30,
        }
        return {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }

    def status(self) -> dict[str, int]:
        """What it says of its memory, such as how many chunks lie there (``total_object_count``),
        and how many of them are still written (``staging_object_count``) or locked for a request
        that has asked for them (``read_locked_count``)."""
        url = f"http://127.0.0.1:{self.health_port}/status"
        with urllib.request.urlopen(url, timeout=SERVER_TIMEOUT_S) as answer:
            memory: dict[str, int] = json.load(answer)["storage_manager"]["l1_manager"]
        return memory


@contextmanager
def lmcache_store(folder: Path, size_gb: float, chunk_size: int = 128) -> Iterator[Store]:
    """Start the server of the LMCache in ``folder``, and end it on leaving.  ``size_gb``: of its
    memory; it takes whole numbers only.  ``chunk_size``: tokens that it keeps together."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    environment = {"PYTHONPATH": path, **UNTRACKED, **offline()}
    store = Store(environment, free_port(), free_port())
    command = server_command(store, free_port(), size_gb, chunk_size)
    with _serving(command, {**clean_environment(), **environment}, store.port):
        yield store


def server_command(store: Store, metrics_port: int, size_gb: float, chunk_size: int) -> list[str]:
    """Return what starts a server that listens where ``store`` says."""
    options = {
        "host": "127.0.0.1",
        "port": store.port,
        "http-host": "127.0.0.1",
        "http-port": store.health_port,
        "prometheus-port": metrics_port,
        "chunk-size": chunk_size,
        "l1-size-gb": f"{size_gb:g}",
        "l1-init-size-gb": f"{size_gb:g}",
        "eviction-policy": "LRU",
        "supported-transfer-mode": "auto",
    }
    command = [sys.executable, "-m", "lmcache.cli.main", "server"]
    return command + [text for name, value in options.items() for text in (f"--{name}", str(value))]


@contextmanager
def _serving(command: list[str], environment: Mapping[str, str], port: int) -> Iterator[None]:
    """Run a server until the end of the context; begins once it listens."""
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in wait_until("LMCache's server listens", SERVER_TIMEOUT_S):
                if listens(port):
                    break
                if server.poll() is not None:
                    said.seek(0)
                    raise RuntimeError(
                        f"LMCache's server has ended:\n{said.read().decode()[-2000:]}"
                    )
            yield
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def listens(port: int) -> bool:
    """Whether a process listens at a TCP port of this machine: state 0A in the kernel's list."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(f":{port:04X}" in line.split()[1] and line.split()[3] == "0A" for line in lines)
