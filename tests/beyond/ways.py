"""The ways to connect a node to the store that are tested here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from lmcache_store import UNTRACKED, server_command
from lmcache_store import Store as LMCacheServer
from local_node import offline

from ..vllm.engines import TOOL
from .nodes import Attachment, Machine
from .services import Service
from .store import MOONCAKE, Store, accepts

LMCACHE = Path(os.environ.get("LMCACHE", Path(sys.prefix) / "lmcache"))
PORT, HEALTH_PORT, METRICS_PORT = 5555, 8080, 9090
"""The same on each machine: nobody else uses them there."""
CHUNK = 1
"""Blocks in a chunk of LMCache's."""
BLOCK_SIZE = 128


def plain(_machine: Machine, _store: Store) -> Attachment:
    """Engines that compute everything themselves."""
    return Attachment(environment={"KVSHM_ENABLE": "0"})


def keeper(machine: Machine, store: Store, memory: str = "256M") -> Attachment:
    """A keeper on the node, as the store's one client; the engines share by kvshm alone."""
    settings = machine.run_dir / "mooncake.json"
    settings.write_text(json.dumps({"master_server_address": store.address}))
    log = machine.run_dir / "keeper.log"
    service = Service(
        "keeper",
        machine.network,
        [*TOOL, "keeper", "--memory", memory, "--store", str(settings)],
        log,
        lambda: "connected to the store" in log.read_text(),
        {**machine.environment, "PYTHONPATH": os.pathsep.join([*_path(), str(MOONCAKE)])},
    )
    return Attachment({"keeper": service})


def lmcache(machine: Machine, store: Store) -> Attachment:
    """LMCache's server on the node, with the store as its second tier; the engines know nothing
    of kvshm."""
    return _beside_lmcache(machine, store, {"KVSHM_ENABLE": "0"})


def kvshm_and_lmcache(machine: Machine, store: Store) -> Attachment:
    """The same, and the engines of the node share by kvshm, in a MultiConnector."""
    return _beside_lmcache(machine, store, {"KVSHM_BESIDE": "1"})


def _beside_lmcache(machine: Machine, store: Store, settings: dict[str, str]) -> Attachment:
    path = os.pathsep.join([*_path(), str(LMCACHE), str(MOONCAKE), str(Path(__file__).parent)])
    environment = {"PYTHONPATH": path, **UNTRACKED, **offline()}
    server = LMCacheServer(environment, PORT, HEALTH_PORT)
    size_gb = 1
    command = server_command(server, METRICS_PORT, size_gb, CHUNK * BLOCK_SIZE)
    service = Service(
        "lmcache",
        machine.network,
        [
            *command,
            "--l2-adapter",
            json.dumps(_second_tier(machine, store)),
            "--l2-prefetch-policy",
            "retain",  # else each engine of a node fetches what another one has fetched
        ],
        machine.run_dir / "lmcache.log",
        lambda: accepts("127.0.0.1", PORT) and accepts("127.0.0.1", HEALTH_PORT),
        {**environment, "GLOG_minloglevel": "1"},
    )
    return Attachment({"lmcache": service}, server.connector, {**environment, **settings})


def _path() -> list[str]:
    """What this process's own programs find their modules by."""
    return list(filter(None, [os.environ.get("PYTHONPATH")]))


def _second_tier(machine: Machine, store: Store) -> dict[str, Any]:
    setup = {
        "local_hostname": machine.network.address,
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 0,
        "local_buffer_size": 16 * 2**20,
        "protocol": "tcp",
        "master_server_addr": store.address,
    }
    return {
        "type": "plugin",
        "module_path": "lmcache_mooncake",
        "class_name": "MooncakeAdapter",
        "adapter_params": setup,
    }
