"""The kinds of engines that a load test compares, each started as its users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_node import Engine, EngineSpec, clean_environment, free_port, offline, wait_until
from sharing_node import SharingNode

SERVER_TIMEOUT_S = 120.0
KVSHM = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}
UNTRACKED = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Setting:
    """What all arms have in common."""

    model: Path
    num_engines: int
    num_blocks: int
    """Of each engine's KV cache."""
    extra_gb: float
    """Memory beside the KV caches, for each arm that has some."""
    lmcache: Path | None
    """Where LMCache is installed, for arms that have it."""
    max_model_len: int


@dataclass(frozen=True)
class Kind:
    """How engines of a kind are started.  ``connectors``: in the order in which they are asked."""

    connectors: tuple[str, ...] = ()

    @property
    def shares(self) -> bool:
        return "kvshm" in self.connectors

    @property
    def stores(self) -> bool:
        return "lmcache" in self.connectors


# None with LMCache asked first: behind its MP connector kvshm does not share.
KINDS = {
    "plain": Kind(),
    "kvshm": Kind(("kvshm",)),
    "lmcache": Kind(("lmcache",)),
    "kvshm+lmcache": Kind(("kvshm", "lmcache")),
}


@contextmanager
def started(kind: Kind, setting: Setting) -> Iterator[list[Engine]]:
    """Start the engines of an arm with all they need, and end them on leaving."""
    environment = {"KVSHM_ENABLE": "1" if kind.shares else "0", "KVSHM_MIN_PREFIX_TOKENS": ""}
    with _store(setting) if kind.stores else _nothing() as (found, settings):
        connectors = {"kvshm": KVSHM, **found}
        arguments = _transfer([connectors[name] for name in kind.connectors])
        if len(kind.connectors) > 1:
            settings = {**settings, "KVSHM_BESIDE": "1"}
        with SharingNode({**environment, **settings}) as node:
            if kind.shares:
                node.start_coordinator()
            engines = node.start_engines(*(_spec(setting, i, arguments) for i in _all(setting)))
            if kind.shares:
                node.wait_joined(*engines)
            yield engines


def _all(setting: Setting) -> range:
    return range(setting.num_engines)


def _spec(setting: Setting, number: int, arguments: tuple[str, ...]) -> EngineSpec:
    longest = EngineSpec.longest_prompt(setting.max_model_len)
    cores = os.cpu_count() or 1
    return EngineSpec(
        f"engine-{number}",
        setting.model,
        core=number % cores,
        num_blocks=setting.num_blocks,
        arguments=(*longest, *arguments),
    )


def _transfer(connectors: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the engines' arguments.  kvshm alone needs none, as its users have none."""
    if connectors in ([], [KVSHM]):
        return ()
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    return ("--kv-transfer-config", json.dumps(several if connectors[1:] else connectors[0]))


Store = tuple[dict[str, dict[str, Any]], Mapping[str, str]]
"""Configurations of connectors by name, and the environment that engines need for them."""


@contextmanager
def _nothing() -> Iterator[Store]:
    yield {}, {}


@contextmanager
def _store(setting: Setting) -> Iterator[Store]:
    """Start LMCache's server (its MP mode, as its documentation does)."""
    port, health, size = free_port(), free_port(), f"{setting.extra_gb:g}"
    found = {"PYTHONPATH": str(setting.lmcache), **UNTRACKED, **offline()}
    command = [sys.executable, "-m", "lmcache.cli.main", "server"]
    options = {
        "host": "127.0.0.1",
        "port": port,
        "http-host": "127.0.0.1",
        "http-port": health,
        "chunk-size": 128,
        "l1-size-gb": size,
        "l1-init-size-gb": size,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "auto",
    }
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": port,
        "lmcache.mp.mq_timeout": 30,
        "lmcache.mp.mp_transfer_mode": "lmcache_driven",
    }
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    with _serving(command, {**clean_environment(), **found}, port):
        yield {"lmcache": connector}, found


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
                if _listens(port):
                    break
                if server.poll() is not None:
                    said.seek(0)
                    raise SystemExit(f"LMCache's server has ended:\n{said.read().decode()[-2000:]}")
            yield
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def _listens(port: int) -> bool:
    """Whether a process listens at a TCP port of this machine: state 0A in the kernel's list."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(f":{port:04X}" in line.split()[1] and line.split()[3] == "0A" for line in lines)
