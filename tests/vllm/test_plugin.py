"""Activation by environment variable, on vLLM's real configuration objects; no engine."""

from __future__ import annotations

import importlib
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm._base.log import LogLimit

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvshm.errors import ConfigError
from kvshm.hooks.vllm import plugin
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.transfer_config import CONNECTOR, CONNECTOR_MODULE

from .conftest import Lines
from .odd_vllm import FILE, NAME, TOO_OLD, UNTESTED, changed_copy, dotted
from .tiny_config import engine_config

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
    monkeypatch.setattr(plugin, "_log_limit", LogLimit(math.inf))
    level = logging.getLogger("vllm.kvshm").level
    yield
    logging.getLogger("vllm.kvshm").setLevel(level)


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    plugin.activate()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setenv("KVSHM_BESIDE", "1")
    plugin.activate()


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_disabled_it_touches_nothing(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("KVSHM_ENABLE", value)
    if value != "false":
        monkeypatch.setenv("KVSHM_ROLE", "nonsense")
    before = getattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    assert getattr(VllmConfig, plugin.TOUCHPOINT) is before
    assert CONNECTOR not in KVConnectorFactory._registry


def test_disabled_it_imports_nothing() -> None:
    code = (
        "import sys; from kvshm.hooks.vllm.plugin import activate; before = set(sys.modules);"
        "activate(); print(*set(sys.modules) - before);"
        "print(*{'vllm', 'torch', 'msgspec', 'kvshm.config'} & set(sys.modules))"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    reported = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True
    )
    assert (reported.returncode, reported.stdout.split()) == (0, []), reported.stderr


def test_who_misspelt_the_variable_that_turns_it_on_is_told() -> None:
    """As vLLM loads plugins, its log set up."""
    code = (
        "import vllm.logger; from kvshm.hooks.vllm.plugin import activate; activate(); activate()"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSHM_")}
    for name, value, said in (
        ("KVSHM_ENABLED", "1", 1),
        ("KVSHM_ROLE", "nonsense", 0),  # as for other engines, in an environment of all
        ("KVSHM_PORT", "tcp://10.0.0.1:1", 0),  # as Kubernetes sets it
        ("KVSHM_TEST_SYNC_POINT", "fast", 0),  # would be refused, were it turned on
    ):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**environ, name: value},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0
        assert (ended.stdout + ended.stderr).count("did you mean KVSHM_ENABLE?") == said


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("KVSHM_ROLE", "reader", "is not both, producer or consumer"),
        ("KVSHM_ENABLE", "ture", "is not 0 or 1"),
        # Read when modules are imported, which is too late to say what is wrong.
        ("KVSHM_TEST_SYNC_POINT", "fast", ".*; correct it, or unset it"),
        ("KVSHM_TEST_TIME_SCALE", "fast", ".*; correct it, or unset it"),
    ],
)
def test_a_bad_setting_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, wanted: str
) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}'.*{wanted}"):
        plugin.activate()
    assert CONNECTOR not in KVConnectorFactory._registry


@pytest.mark.usefixtures("enabled")
def test_no_call_of_vllm_that_writes_weights_is_called_read_only(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_READ_ONLY_CALLS", "my_stats,apply_model,sleep")
    said = "KVSHM_READ_ONLY_CALLS=my_stats,apply_model,sleep names vLLM's apply_model, sleep"
    with pytest.raises(ConfigError, match=said):
        make_config()


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
    (line,) = [line for line in lines if "connector installed" in line]
    assert line.endswith("shares its prefix cache if its role and its KV cache allow it")


@pytest.mark.parametrize(("role", "vllms"), [("both", "kv_both"), ("producer", "kv_producer")])
def test_only_an_importer_is_a_consumer_to_vllm(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, role: str, vllms: str
) -> None:
    """For consumers it holds freed blocks back."""
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setenv("KVSHM_ROLE", role)
    plugin.activate()
    for given in (None, KVTransferConfig()):
        transfer = make_config(kv_transfer_config=given).kv_transfer_config
        assert transfer is not None
        assert (transfer.kv_connector, transfer.kv_role) == (CONNECTOR, vllms)


def test_the_connector_is_found_where_users_name_it() -> None:
    """``kv_connector_module_path``, in everybody's scripts: it must never move."""
    module = importlib.import_module("kvshm.hooks.connector")
    assert module.__name__ == CONNECTOR_MODULE
    assert module.KvshmConnector is KvshmConnector


@pytest.mark.usefixtures("enabled")
def test_activating_again_changes_nothing() -> None:
    wrapped = getattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    assert getattr(VllmConfig, plugin.TOUCHPOINT) is wrapped
    assert CONNECTOR in KVConnectorFactory._registry


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("module", [None, CONNECTOR_MODULE])
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
    ("version", "reason"),
    [
        (TOO_OLD, f"vLLM {dotted(TOO_OLD)} is too old"),
        (UNTESTED, f"{NAME} in vllm/{FILE} (fact "),
    ],
)
def test_a_vllm_that_does_other_things_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    lines: Lines,
    version: tuple[int, ...],
    reason: str,
) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setattr("vllm.__version_tuple__", version)
    monkeypatch.setattr("vllm.__file__", str(changed_copy(tmp_path)))
    before = getattr(VllmConfig, plugin.TOUCHPOINT)
    plugin.activate()
    assert getattr(VllmConfig, plugin.TOUCHPOINT) is before
    assert CONNECTOR not in KVConnectorFactory._registry
    assert reason in lines[-1]


@pytest.mark.parametrize("changed", [False, True])
def test_an_untested_vllm_is_used_if_it_does_the_same_or_that_was_asked_for(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: bool
) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.setattr("vllm.__version_tuple__", UNTESTED)
    if changed:
        monkeypatch.setenv("KVSHM_UNTESTED", "1")
        monkeypatch.setattr("vllm.__file__", str(changed_copy(tmp_path)))
    plugin.activate()
    transfer = make_config().kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == CONNECTOR


@pytest.mark.usefixtures("enabled")
def test_a_name_that_vllm_changed_declines(
    make_config: MakeConfig, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.metrics.cache_hit_source.CacheHitSource", object())
    monkeypatch.delitem(sys.modules, "kvshm.hooks.vllm.connector", raising=False)
    for _ in range(2):
        assert make_config().kv_transfer_config is None
    reason = "this vLLM is not as kvshm knows it: AttributeError: 'object' object has no"
    (line,) = [line for line in lines if "not sharing" in line]
    assert reason in line
    assert len([line for line in lines if "vLLM has changed" in line]) == 1


def test_a_registry_that_vllm_changed_declines(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "1")
    monkeypatch.delattr(KVConnectorFactory, "register_connector")
    plugin.activate()
    assert "this vLLM is not as kvshm knows it: AttributeError" in lines[-1]


@pytest.mark.usefixtures("beside")
def test_beside_a_configured_connector_where_that_was_asked_for(
    make_config: MakeConfig, lines: Lines
) -> None:
    given = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_consumer",
        engine_id="mine",
        kv_connector_extra_config={"num_threads": 3},
    )
    transfer = make_config(kv_transfer_config=given).kv_transfer_config
    assert transfer is not None
    assert (transfer.kv_connector, transfer.kv_connector_module_path) == ("MultiConnector", None)
    assert (transfer.kv_role, transfer.engine_id) == ("kv_consumer", "mine")
    assert transfer.kv_load_failure_policy == "recompute"
    theirs, ours = transfer.kv_connector_extra_config["connectors"]
    assert theirs["kv_connector"] == "NixlConnector"
    assert theirs["kv_connector_extra_config"] == {"num_threads": 3}
    assert theirs["kv_load_failure_policy"] == "fail"
    assert (ours["kv_connector"], ours["kv_role"]) == ("KvshmConnector", "kv_consumer")
    assert any(line.startswith("kvshm: beside NixlConnector, in a Multi") for line in lines)
    again = make_config(kv_transfer_config=transfer).kv_transfer_config
    assert again is not None
    assert again.kv_connector_extra_config == transfer.kv_connector_extra_config


@pytest.mark.usefixtures("beside")
def test_one_more_in_a_multiconnector(make_config: MakeConfig) -> None:
    child = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    given = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [child]},
    )
    transfer = make_config(kv_transfer_config=given).kv_transfer_config
    assert transfer is not None
    names = [c["kv_connector"] for c in transfer.kv_connector_extra_config["connectors"]]
    assert names == ["NixlConnector", "KvshmConnector"]


@pytest.mark.usefixtures("beside")
def test_beside_an_offloading_connector_that_vllm_derives_itself(make_config: MakeConfig) -> None:
    """vLLM derives it again whenever it makes the configuration anew."""
    config = make_config(kv_offloading_size=1)
    for _ in range(2):
        transfer = config.kv_transfer_config
        assert transfer is not None
        theirs, ours = transfer.kv_connector_extra_config["connectors"]
        assert (theirs["kv_connector"], ours["kv_connector"]) == (
            "OffloadingConnector",
            "KvshmConnector",
        )
        assert theirs["kv_connector_extra_config"] == {"cpu_bytes_to_use": 1 << 30}
        getattr(config, plugin.TOUCHPOINT)()
    assert not config.scheduler_config.disable_hybrid_kv_cache_manager


@pytest.mark.usefixtures("beside")
def test_a_connector_that_cannot_do_with_groups_makes_one_of_all_layers(
    make_config: MakeConfig,
) -> None:
    """As it does alone.  With states vLLM then does not start."""
    transfer = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    config = make_config(kv_transfer_config=transfer)
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_connector == "MultiConnector"
    assert config.scheduler_config.disable_hybrid_kv_cache_manager


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("hook", ["get_mem_pool_context", "has_connector_metadata", "new_in_vllm"])
def test_what_cannot_be_combined_is_named(
    make_config: MakeConfig, lines: Lines, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """The KV cache lies in one place; and a MultiConnector passes on what it knows of."""
    monkeypatch.setattr(KVConnectorBase_V1, hook, lambda _: None, raising=False)
    monkeypatch.setattr(ExampleConnector, hook, lambda _: None, raising=False)
    given = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    transfer = make_config(kv_transfer_config=given).kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "ExampleConnector"
    assert f"ExampleConnector cannot be combined due to its {hook}" in lines[-1]


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("hook", ["get_kv_connector_kv_cache_events", "role"])
def test_what_a_multiconnector_leaves_to_kvshm_or_to_nobody_is_combined(
    make_config: MakeConfig, lines: Lines, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """Both of LMCache's MP connector; a worker reports the events of one connector only."""
    monkeypatch.setattr(ExampleConnector, hook, lambda _: None, raising=False)
    child = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    for children in ([child], [child, child]):
        given = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": children},
        )
        transfer = make_config(kv_transfer_config=given).kv_transfer_config
        assert transfer is not None
        combined = hook == "role" or len(children) == 1
        assert transfer.has_connector(CONNECTOR) == combined
        refused = f"ExampleConnector cannot be combined due to its {hook}" in lines[-1]
        assert refused != combined


@pytest.mark.usefixtures("beside")
def test_a_multiconnector_that_is_not_vllms_is_not_replaced(
    make_config: MakeConfig, lines: Lines
) -> None:
    module = MultiConnector.__module__
    given = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": []},
    )
    assert make_config(kv_transfer_config=given).kv_transfer_config is given
    assert f"the MultiConnector of {module} is not vLLM's" in lines[-1]
