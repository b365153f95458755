"""Transports by setting, up to the border to vLLM: refused by name, or really used by a worker."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvshm.config import Config
from kvshm.errors import ConfigError
from kvshm.hooks.vllm import plugin
from kvshm.hooks.vllm import worker_side as worker_module
from kvshm.hooks.vllm.identity import rank_weights
from kvshm.hooks.vllm.identity.refusals import config_refusal
from kvshm.hooks.vllm.messages import RankDescription
from kvshm.hooks.vllm.registration import CONNECTOR
from kvshm.hooks.vllm.worker_side import WorkerSide
from kvshm.interfaces import load_transport
from tests import other_package

from .tiny_config import cache_config, engine_config, spec

LAYERS = {f"layer.{i}": spec() for i in range(2)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return engine_config(tmp_path_factory.mktemp("model"), {})


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        ("auto", None),
        ("posix_shm", None),
        ("cuda_ipc", "KVSHM_TRANSPORT=cuda_ipc is for KV caches on cuda, not cpu"),
        ("loopback", "KVSHM_TRANSPORT=loopback works only within one process"),
    ],
)
def test_a_transport_that_does_not_work_for_the_device_is_named(
    config: VllmConfig, transport: str, reason: str | None
) -> None:
    assert config_refusal(config, {}, transport) == reason


def test_a_transport_of_another_package_makes_a_device_shareable(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(other_package.install(tmp_path))
    assert config_refusal(config, {}, other_package.NAME) is None
    monkeypatch.setattr(load_transport(other_package.NAME), "devices", ("tpu",))
    monkeypatch.setitem(vars(config.device_config), "device_type", "tpu")
    assert config_refusal(config, {}) == "there is no transport for KV caches on this device"
    assert config_refusal(config, {}, other_package.NAME) is None


@pytest.mark.parametrize("transport", ["auto", "posix_shm", other_package.NAME])
def test_a_rank_lies_in_the_memory_of_the_transport_and_says_so(
    config: VllmConfig,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    monkeypatch.syspath_prepend(other_package.install(tmp_path))
    served = torch.nn.Module()
    monkeypatch.setattr(rank_weights, "find_model", lambda _: served)
    monkeypatch.setattr(worker_module, "rank_fields", lambda *_: {"weights": "w"})
    planned = cache_config(config, "LBNHC", 8, LAYERS)
    side = WorkerSide(Config(transport=transport), run_dir, config, planned)
    assert side.allocation is not None
    with side.allocation:
        caches = allocate_kv_cache(planned, torch.device("cpu"), KVCacheLayout.LBNHC, [32])
    side.register(caches)
    described: RankDescription = side.describe()
    side.close()
    assert described.info is not None, described.refusal
    name = "posix_shm" if transport == "auto" else transport
    assert (described.info.memory.transport, described.fields["transport"]) == (name, name)


def test_a_transport_that_is_not_installed_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugin, too: vLLM imports the connector's module by its name."""
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setenv("KVSHM_TRANSPORT", "carrier-pigeon")
    wanted = "KVSHM_TRANSPORT='carrier-pigeon' is not an installed transport .*; correct it"
    with pytest.raises(ConfigError, match=wanted):
        plugin.activate()
    assert CONNECTOR not in KVConnectorFactory._registry
    monkeypatch.delitem(sys.modules, "kvshm.hooks.vllm.connector", raising=False)
    with pytest.raises(ConfigError, match=wanted):
        importlib.import_module("kvshm.hooks.vllm.connector")
