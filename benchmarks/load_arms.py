"""The kinds of engines that a load test compares, each started as its users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_store import lmcache_store
from local_node import Engine, EngineSpec, clean_environment
from sharing_node import SharingNode

KVSHM = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}


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
    keeps: bool = False
    """Whether a keeper runs beside them."""

    @property
    def shares(self) -> bool:
        return "kvshm" in self.connectors

    @property
    def stores(self) -> bool:
        return "lmcache" in self.connectors


# With both, the longer prefix is loaded (KVSHM_BESIDE=1 in ``started``).
KINDS = {
    "plain": Kind(),
    "kvshm": Kind(("kvshm",)),
    "kvshm+keeper": Kind(("kvshm",), keeps=True),
    "lmcache": Kind(("lmcache",)),
    "kvshm+lmcache": Kind(("kvshm", "lmcache")),
}


@contextmanager
def started(kind: Kind, setting: Setting) -> Iterator[tuple[SharingNode, list[Engine]]]:
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
            with _keeper(setting, node.environment) if kind.keeps else _nothing():
                yield node, engines


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


@contextmanager
def _keeper(setting: Setting, environment: Mapping[str, str]) -> Iterator[None]:
    """Have a keeper until the end of the context."""
    memory = str(round(setting.extra_gb * (1 << 30)))
    command = [sys.executable, "-m", "kvshm.tools.cli", "keeper", "--memory", memory]
    here = {**clean_environment(), **environment}
    with subprocess.Popen(command, env=here, stdout=subprocess.PIPE) as keeper:
        try:
            assert keeper.stdout is not None
            if not keeper.stdout.readline():
                raise SystemExit(f"kvshm keeper has ended with status {keeper.wait()}")
            yield
        finally:
            keeper.terminate()


Found = tuple[dict[str, dict[str, Any]], Mapping[str, str]]
"""Configurations of connectors by name, and the environment that engines need for them."""


@contextmanager
def _nothing() -> Iterator[Found]:
    yield {}, {}


@contextmanager
def _store(setting: Setting) -> Iterator[Found]:
    assert setting.lmcache is not None
    with lmcache_store(setting.lmcache, setting.extra_gb) as store:
        yield {"lmcache": store.connector}, store.environment
