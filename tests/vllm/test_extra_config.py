"""Settings in kv_connector_extra_config and in a file reach every part of an engine."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshm._base.log import LogLimit

pytest.importorskip("vllm")

from local_node import wait_until
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvshm.config import Config
from kvshm.coordinator.in_process import serve
from kvshm.errors import ConfigError
from kvshm.hooks.vllm import plugin, shutdown
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.transfer_config import CONNECTOR, CONNECTOR_MODULE

from .conftest import Lines
from .scheduling import DrivenEngine, imagined_cache, vllm_config
from .tiny_config import engine_config

OURS = {
    "kv_connector": CONNECTOR,
    "kv_connector_module_path": CONNECTOR_MODULE,
    "kv_role": "kv_both",
}
THEIRS: dict[str, Any] = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": "/nowhere"},
}
PLACES = ["variables", "connector", "one of several connectors", "file"]


@pytest.fixture(autouse=True)
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the plugin's changes to vLLM, and start without settings."""
    for name in [n for n in os.environ if n.startswith("KVSHM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    monkeypatch.setattr(VllmConfig, plugin.TOUCHPOINT, getattr(VllmConfig, plugin.TOUCHPOINT))
    monkeypatch.setattr(plugin, "_log_limit", LogLimit(math.inf))
    monkeypatch.setattr(shutdown, "_places", set())


def enabled(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """Activate the plugin with these settings in the environment."""
    for name, value in {"KVSHM_ENABLE": "1", **more}.items():
        monkeypatch.setenv(name, value)
    plugin.activate()


def transfer_of(tmp_path: Path, **given: Any) -> KVTransferConfig | None:
    """What an engine gets that was configured with these values of --kv-transfer-config."""
    transfer = KVTransferConfig(**given)
    return engine_config(tmp_path / "model", {}, kv_transfer_config=transfer).kv_transfer_config


# -- in the process that makes the configuration


def test_the_plugin_follows_the_engines_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    enabled(monkeypatch, KVSHM_SHARE="none", KVSHM_NAMESPACE="here")
    extra = {"role": "producer", "share": "all", "namespace": "there"}
    transfer = transfer_of(tmp_path, kv_connector_extra_config=extra)
    assert transfer is not None
    assert (transfer.kv_connector, transfer.kv_role) == (CONNECTOR, "kv_producer")
    assert transfer.kv_connector_extra_config == extra
    assert ("", "there") in shutdown._places
    assert transfer_of(tmp_path) is None
    assert lines[-1].endswith("not sharing the prefix cache: KVSHM_SHARE=none")


@pytest.mark.parametrize("connector", [{}, OURS], ids=["unnamed", "named"])
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"role": "reader"}, "role='reader' is not both, producer or consumer; correct it"),
        ({"transport": "pigeon"}, "transport='pigeon' is not an installed transport"),
    ],
)
def test_a_bad_setting_stops_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    connector: dict[str, str],
    extra: dict[str, Any],
    said: str,
) -> None:
    enabled(monkeypatch)
    with pytest.raises(ConfigError, match=f"^kv_connector_extra_config: {said}"):
        transfer_of(tmp_path, **connector, kv_connector_extra_config=extra)


def test_without_the_plugin_it_stops_the_start_where_vllm_asks_first() -> None:
    """vLLM does so while it makes the configuration of an engine on GPUs."""
    assert not KvshmConnector.requires_piecewise_for_cudagraph({"role": "both"})
    multi = {"connectors": [{**OURS, "kv_connector_extra_config": {"role": "reader"}}]}
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: role='reader'"):
        MultiConnector.requires_piecewise_for_cudagraph(multi)


@pytest.mark.parametrize("derived", [False, True], ids=["named", "offloading"])
def test_beside_another_connector_they_stand_apart_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, derived: bool
) -> None:
    """vLLM derives an offloading connector again whenever it makes the configuration anew."""
    enabled(monkeypatch)
    own = {"beside": True, "verify": True}
    theirs = {} if derived else {"num_threads": 3}
    named = {} if derived else {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    config = engine_config(
        tmp_path / "model",
        {},
        kv_offloading_size=1 if derived else None,
        kv_transfer_config=KVTransferConfig(
            **named, kv_connector_extra_config={**theirs, "kvshm": own}
        ),
    )
    theirs |= {"cpu_bytes_to_use": 1 << 30} if derived else {}
    for _ in range(2):
        assert config.kv_transfer_config is not None
        first, second = config.kv_transfer_config.kv_connector_extra_config["connectors"]
        assert first["kv_connector_extra_config"] == theirs
        assert (second["kv_connector"], second["kv_connector_extra_config"]) == (CONNECTOR, own)
        getattr(config, plugin.TOUCHPOINT)()


# -- activation by a file


@pytest.mark.parametrize(
    ("variable", "file", "active"),
    [(None, "true", True), ("", "true", True), ("0", "true", False), (None, "false", False)],
)
def test_a_file_enables_kvshm_unless_the_variable_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, file: str, active: bool
) -> None:
    path = tmp_path / "kvshm.toml"
    path.write_text(f"enable = {file}\nrole = 'producer'\n")
    monkeypatch.setenv("KVSHM_CONFIG", str(path))
    if variable is not None:
        monkeypatch.setenv("KVSHM_ENABLE", variable)
    before = getattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    assert (getattr(VllmConfig, plugin.TOUCHPOINT) is not before) == active
    if active:
        transfer = transfer_of(tmp_path)
        assert transfer is not None
        assert (transfer.kv_connector, transfer.kv_role) == (CONNECTOR, "kv_producer")


def test_a_file_that_is_missing_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_CONFIG", "/no/such/file")
    with pytest.raises(ConfigError, match=r"^KVSHM_CONFIG='/no/such/file' cannot be read"):
        plugin.activate()


# -- in the engine's processes


def given_in(
    place: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> KVTransferConfig:
    """An engine's transfer configuration, with the settings in that place."""
    extra = {"kv_connector_extra_config": settings}
    if place == "connector":
        return KVTransferConfig(**OURS, **extra)
    if place == "one of several connectors":
        children = {"connectors": [THEIRS, {**OURS, **extra}]}
        return KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=children
        )
    if place == "file":
        file = tmp_path / "kvshm.toml"
        file.write_text("".join(f"{k} = {str(v).lower()!r}\n" for k, v in settings.items()))
        monkeypatch.setenv("KVSHM_CONFIG", str(file))
    else:
        for key, value in settings.items():
            monkeypatch.setenv(f"KVSHM_{key.upper()}", str(value))
    return KVTransferConfig(**OURS)


@pytest.mark.parametrize("place", PLACES)
def test_scheduler_and_worker_use_what_is_said_in_each_place(
    model: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    settings = {"run_dir": str(run_dir), "namespace": "there", "verify": True, "strict": True}
    if "connector" in place:
        monkeypatch.setenv("KVSHM_RUN_DIR", "/no/such/place")
        monkeypatch.setenv("KVSHM_NAMESPACE", "here")
    config = vllm_config(model, given_in(place, settings, monkeypatch, tmp_path))
    for role in KVConnectorRole:
        outer = KVConnectorFactory.create_connector(config, role, imagined_cache(8))
        connectors = getattr(outer, "sub_connectors", [outer])
        (ours,) = [one for one in connectors if isinstance(one, KvshmConnector)]
        scheduler, worker = ours._scheduler, ours._worker
        used = scheduler._config if scheduler is not None else worker._open.args[0]
        assert (used.run_dir, used.namespace, used.verify) == (str(run_dir), "there", True)
        assert ours.strict
        outer.shutdown()
    assert (str(run_dir), "there") in shutdown._places


def test_the_process_with_the_metrics_knows_where_the_engine_is() -> None:
    """It starts the engine's processes, has no connector, and cleans up after them."""
    extra = {"kv_connector_extra_config": {"namespace": "there"}}
    config: Any = SimpleNamespace(kv_transfer_config=KVTransferConfig(**OURS, **extra))
    unregister_vllm_metrics()
    KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"]})
    unregister_vllm_metrics()
    assert ("", "there") in shutdown._places


def test_an_engine_joins_where_its_configuration_says(
    model: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_RUN_DIR", "/no/such/place")
    settings = {"run_dir": str(run_dir), "namespace": "there"}
    transfer = given_in("connector", settings, monkeypatch, tmp_path)
    with serve(Config(run_dir=str(run_dir), namespace="there")):
        engine = DrivenEngine(vllm_config(model, transfer))
        for _ in wait_until("the engine joins", 10):
            if engine.table.lease_bit >= 0:
                break
        engine.close()


def test_what_the_connector_would_not_get_stops_the_start(model: Path) -> None:
    """Also in processes without the plugin."""
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [THEIRS, OURS], "kvshm": {"verify": True}},
    )
    config = vllm_config(model, transfer)
    for role in KVConnectorRole:
        with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: kvshm of the Multi"):
            KVConnectorFactory.create_connector(config, role, imagined_cache(8))
