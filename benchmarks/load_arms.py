"""The kinds of engines that a load test compares, each started as its users start it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_store import Store, lmcache_store
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
    environment: Mapping[str, str] = field(default_factory=lambda: {"KVSHM_MIN_PREFIX_TOKENS": ""})
    """Of the engines.  Unless told otherwise, kvshm imports where its users' would."""

    @property
    def share_gb(self) -> float:
        """Of the extra memory, for each engine, where engines have it for themselves."""
        return self.extra_gb / self.num_engines


@dataclass(frozen=True)
class Kind:
    """How engines of a kind are started.  ``connectors``: in the order in which they are asked."""

    connectors: tuple[str, ...] = ()
    keeps: bool = False
    """Whether a keeper runs beside them."""
    offloads: bool = False
    """Whether they are started with vLLM's own flag for a tier in host memory."""

    @property
    def shares(self) -> bool:
        return "kvshm" in self.connectors

    @property
    def stores(self) -> bool:
        return "lmcache" in self.connectors


# With both, the longer prefix is loaded (KVSHM_BESIDE=1 in ``started``).  ``offload`` is what users
# of vLLM type: it needs a GPU and does not start without one.  ``offload+copies`` is the same
# connector, with copies that need none (offload_spec.py).
KINDS = {
    "plain": Kind(),
    "kvshm": Kind(("kvshm",)),
    "kvshm+keeper": Kind(("kvshm",), keeps=True),
    "lmcache": Kind(("lmcache",)),
    "kvshm+lmcache": Kind(("kvshm", "lmcache")),
    "offload": Kind(offloads=True),
    "offload+copies": Kind(("offload+copies",)),
}


class Arm(NamedTuple):
    """What was started."""

    node: SharingNode
    engines: list[Engine]
    store: Store | None
    """LMCache's server, if there is one."""


@contextmanager
def started(kind: Kind, setting: Setting) -> Iterator[Arm]:
    """Start the engines of an arm with all they need, and end them on leaving.  RuntimeError if
    something does not start; its message ends with what that has written."""
    environment = {"KVSHM_ENABLE": "1" if kind.shares else "0", **setting.environment}
    with _store(setting) if kind.stores else nullcontext() as store:
        connectors = {"kvshm": KVSHM, "offload+copies": _offload(setting)}
        if store:
            connectors["lmcache"] = store.connector
        if len(kind.connectors) > 1:
            environment["KVSHM_BESIDE"] = "1"
        arguments = _transfer([connectors[name] for name in kind.connectors])
        if kind.offloads:
            arguments = ("--kv-offloading-size", f"{setting.share_gb:g}")
        if "offload+copies" in kind.connectors:
            environment["PYTHONPATH"] = _with_this_folder()
        with SharingNode({**environment, **(store.environment if store else {})}) as node:
            if kind.shares:
                node.start_coordinator()
            engines = node.start_engines(*(_spec(setting, i, arguments) for i in _all(setting)))
            if kind.shares:
                node.wait_joined(*engines)
            with _keeper(setting, node.environment) if kind.keeps else nullcontext():
                yield Arm(node, engines, store)


def why(error: BaseException) -> str:
    """Return the line of a failure's message that names its cause: the first error at the end of a
    traceback in a log, or what the failure itself says first."""
    lines = str(error).splitlines() or [repr(error)]
    named = (_ERROR.search(line) for line in lines)
    return next((found[1] for found in named if found), lines[0])


_ERROR = re.compile(r"(?:^|\] )((?:[\w.]*(?:Error|Exception)|[\w ./-]+: error): .*)")
"""At the beginning of what is logged: a warning may name an error, too.  Also of a command line."""


def _offload(setting: Setting) -> dict[str, Any]:
    settings = {
        "cpu_bytes_to_use": round(setting.share_gb * (1 << 30)),
        "spec_name": "HostCopySpec",
        "spec_module_path": "offload_spec",
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


def _with_this_folder() -> str:
    """Where an engine finds offload_spec."""
    path = os.environ.get("PYTHONPATH")
    return os.pathsep.join(filter(None, [path, str(Path(__file__).parent)]))


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
                raise RuntimeError(f"kvshm keeper has ended with status {keeper.wait()}")
            yield
        finally:
            keeper.terminate()


@contextmanager
def _store(setting: Setting) -> Iterator[Store]:
    assert setting.lmcache is not None
    with lmcache_store(setting.lmcache, setting.extra_gb) as store:
        yield store
