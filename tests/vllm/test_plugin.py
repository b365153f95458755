"""Activation by environment variable, on vLLM's real configuration objects; no engine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvshm.errors import ConfigError
from kvshm.hooks import plugin
from kvshm.hooks.refusals import version_refusal

from .tiny_config import engine_config

Lines = list[str]
MakeConfig = Callable[..., VllmConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """Build the configuration an engine for a tiny local Llama would get."""
    return lambda **given: engine_config(tmp_path / "model", {}, **given)


@pytest.fixture(autouse=True)
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the plugin's changes to vLLM."""
    for name in [n for n in os.environ if n.startswith("KVSHM_")]:
        monkeypatch.delenv(name)
    registry = KVConnectorFactory._registry
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(registry))
    monkeypatch.setattr(VllmConfig, plugin.TOUCHPOINT, getattr(VllmConfig, plugin.TOUCHPOINT))
    monkeypatch.setattr(plugin, "_said", set())
    level = logging.getLogger("vllm.kvshm").level
    yield
    logging.getLogger("vllm.kvshm").setLevel(level)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What kvshm logs.  A filter, because vLLM removes the handlers of loggers below its own
    whenever it configures logging, and its lines do not propagate to where pytest listens."""
    said: Lines = []

    def hear(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logging.getLogger("vllm.kvshm").addFilter(hear)
    yield said
    logging.getLogger("vllm.kvshm").removeFilter(hear)


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    plugin.activate()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_disabled_it_touches_nothing(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("KVSHM_ENABLE", value)
    monkeypatch.setenv("KVSHM_ROLE", "nonsense")
    before = getattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    assert getattr(VllmConfig, plugin.TOUCHPOINT) is before
    assert plugin.CONNECTOR not in KVConnectorFactory._registry


def test_disabled_it_imports_nothing() -> None:
    code = (
        "import sys; from kvshm.hooks.plugin import activate; before = set(sys.modules);"
        "activate(); print(*set(sys.modules) - before);"
        "print(*{'vllm', 'torch', 'msgspec', 'kvshm.config'} & set(sys.modules))"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    told = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert (told.returncode, told.stdout.split()) == (0, []), told.stderr


def test_a_bad_setting_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setenv("KVSHM_ROLE", "reader")
    with pytest.raises(ConfigError, match="KVSHM_ROLE='reader' is not both, producer or consumer"):
        plugin.activate()
    assert plugin.CONNECTOR not in KVConnectorFactory._registry


def test_a_misspelt_switch_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "true")
    with pytest.raises(ConfigError, match="KVSHM_ENABLE='true' is not 0 or 1"):
        plugin.activate()


@pytest.mark.usefixtures("enabled")
def test_an_empty_transfer_config_is_filled(make_config: MakeConfig, lines: Lines) -> None:
    config = make_config()
    transfer = config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "KvshmConnector"
    assert transfer.kv_connector_module_path == "kvshm.hooks.connector"
    assert (transfer.kv_role, transfer.kv_load_failure_policy) == ("kv_both", "recompute")
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager
    make_config()
    assert len([line for line in lines if "sharing the prefix cache" in line]) == 1


@pytest.mark.usefixtures("enabled")
def test_activating_again_changes_nothing() -> None:
    wrapped = getattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    assert getattr(VllmConfig, plugin.TOUCHPOINT) is wrapped
    assert plugin.CONNECTOR in KVConnectorFactory._registry


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("module", [None, plugin.CONNECTOR_MODULE])
def test_our_own_transfer_config_gets_the_policy(
    make_config: MakeConfig, lines: Lines, module: str | None
) -> None:
    given = KVTransferConfig(
        kv_connector="KvshmConnector", kv_connector_module_path=module, kv_role="kv_both"
    )
    assert given.kv_load_failure_policy == "fail"
    for _ in range(2):
        transfer = make_config(kv_transfer_config=given).kv_transfer_config
        assert transfer is not None
        assert transfer.kv_load_failure_policy == "recompute"
    assert len([line for line in lines if "recompute" in line]) == 1


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        (
            {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="ExampleConnector", kv_role="kv_both"
                )
            },
            "names ExampleConnector",
        ),
        ({"runner": "pooling"}, "pooling model"),
    ],
    ids=["no-prefix-caching", "other-connector", "pooling"],
)
def test_vllm_is_left_alone(
    make_config: MakeConfig, lines: Lines, given: dict[str, Any], reason: str
) -> None:
    for _ in range(2):
        transfer = make_config(**given).kv_transfer_config
        assert transfer is None or transfer.kv_connector == "ExampleConnector"
    (line,) = [line for line in lines if "not sharing" in line]
    assert reason in line


@pytest.mark.usefixtures("enabled")
def test_a_movable_cache_is_refused(
    make_config: MakeConfig, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert make_config().kv_transfer_config is None
    assert "expandable_segments" in lines[-1]


@pytest.mark.usefixtures("enabled")
def test_kv_offloading_keeps_its_own_connector(make_config: MakeConfig, lines: Lines) -> None:
    transfer = make_config(kv_offloading_size=1).kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "OffloadingConnector"
    assert "OffloadingConnector" in lines[-1]


def test_a_missing_touchpoint_is_said_once(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.delattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    plugin.activate()
    (line,) = lines
    assert plugin.TOUCHPOINT in line
    assert "--kv-transfer-config" in line


def test_warnings_about_settings_reach_the_log(
    make_config: MakeConfig, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setenv("KVSHM_NAMESPCE", "x")
    plugin.activate()
    make_config(enable_prefix_caching=False)
    assert any("KVSHM_NAMESPACE?" in line for line in lines)


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ((0, 31, 2), False),
        ((0, 9, 0), False),
        ((0, 32, 0), True),
        ((0, 33, "0rc1"), True),
        ((1, 0, 0), True),
        ((0, 0, "dev"), True),
    ],
)
def test_which_vllm_versions_are_new_enough(version: tuple[int | str, ...], usable: bool) -> None:
    reason = version_refusal(version)
    assert (reason is None) == usable
    assert usable or "0.32 or newer" in str(reason)


def test_an_old_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch, lines: Lines) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setattr("vllm.__version_tuple__", (0, 31, 0))
    before = getattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    assert getattr(VllmConfig, plugin.TOUCHPOINT) is before
    assert plugin.CONNECTOR not in KVConnectorFactory._registry
    assert "vLLM 0.31.0 is too old" in lines[-1]
