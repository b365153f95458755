"""A Mooncake Store on a machine of its own: its master, and one client that gives it memory.

The nodes give none, so that whatever they store or fetch crosses their wire and can be counted.
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.request
from pathlib import Path

from .networks import Network
from .services import Service

MOONCAKE = Path(os.environ.get("MOONCAKE", Path(sys.prefix) / "mooncake"))
"""Where it is installed: ``make test-beyond`` does that."""
MASTER_PORT, MEMORY_PORT, METRICS_PORT = 50051, 50052, 9003
LEASE_MS = 1000
"""How long what somebody has looked up stays in the store at least."""


class Store:
    """The store's two programs, and what its master says of it."""

    def __init__(self, network: Network, folder: Path, size_gb: float = 1) -> None:
        self.network = network
        self.size = round(size_gb * 2**30)
        self.master = self._program(
            "mooncake_master",
            MASTER_PORT,
            folder,
            rpc_address=network.address,
            rpc_port=MASTER_PORT,
            metrics_host=network.address,
            metrics_port=METRICS_PORT,
            default_kv_lease_ttl=LEASE_MS,
        )
        self.memory = self._program(
            "mooncake_client",
            MEMORY_PORT,
            folder,
            host=network.address,
            port=MEMORY_PORT,
            master_server_address=self.address,
            metadata_server="P2PHANDSHAKE",
            global_segment_size=self.size,
            protocol="tcp",
        )

    @property
    def address(self) -> str:
        """Of the master: all that a client needs to know."""
        return f"{self.network.address}:{MASTER_PORT}"

    def keys(self) -> int:
        """How many objects lie in the store, copies of an object not counted."""
        return self.metric("master_key_count")

    def stored(self) -> int:
        """How many objects were stored since the master started, lost and evicted ones included;
        one that is there already is not stored again."""
        return self.metric("master_batch_put_end_items_total")

    def metric(self, name: str) -> int:
        url = f"http://{self.network.address}:{METRICS_PORT}/metrics"
        with self.network.entered(), urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return next(int(float(line.split()[1])) for line in lines if line.startswith(f"{name} "))

    def _program(self, name: str, serves_at: int, folder: Path, **options: str | int) -> Service:
        program = str(MOONCAKE / "mooncake" / name)
        told = [f"--{option}={value}" for option, value in options.items()]
        address = self.network.address
        return Service(
            name,
            self.network,
            [program, *told, "--logtostderr"],
            folder / f"{name}.log",
            lambda: accepts(address, serves_at),
        )


def accepts(address: str, port: int) -> bool:
    """Whether somebody listens there, seen from this thread's network."""
    try:
        socket.create_connection((address, port), 1).close()
    except OSError:
        return False
    return True
