"""What was loaded, on its way through vLLM's own classes to the page that Prometheus reads.

That an engine's /metrics tells it is shown by test_sharing.py and test_lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
from prometheus_client import REGISTRY, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvshm._engine.load_plan import LoadReport
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.messages import RankReport
from kvshm.hooks.vllm.metrics import METRICS, LoadStats

from .scheduling import BLOCK_SIZE, Make, prompt

OWN = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}
TOLD = {"imported_tokens": 32, "imported_blocks": 2, "loads": 3, "failed_loads": 1}


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those of Prometheus and of vLLM are the process's."""
    known = {k: v for k, v in KVConnectorFactory._registry.items() if k != "KvshmConnector"}
    monkeypatch.setattr(KVConnectorFactory, "_registry", known)
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def transfer(multi: bool) -> KVTransferConfig:
    if not multi:
        return KVTransferConfig(**OWN)
    inner = {"kv_connector_extra_config": {"connectors": [OWN]}}
    return KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", **inner)


def page() -> dict[str, float]:
    lines = generate_latest(REGISTRY).decode().splitlines()
    told = (line.rpartition(" ") for line in lines if line.startswith("vllm:kvshm_"))
    return {name: float(value) for name, _, value in told if "_created" not in name}


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in a MultiConnector"])
def test_each_engine_of_an_api_server_has_its_own_numbers(multi: bool) -> None:
    config: Any = SimpleNamespace(kv_transfer_config=transfer(multi))
    labels = {0: ["m", "0"], 1: ["m", "1"]}
    prom = KVConnectorProm(config, ["model_name", "engine"], labels)
    told = {"KvshmConnector": TOLD} if multi else TOLD
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(told))  # as between processes
    for _ in range(2):
        prom.observe(data, engine_idx=1)
    prom.observe({"KvshmConnector": {"unknown": 1}} if multi else {"unknown": 1}, engine_idx=1)
    assert page() == {
        f'vllm:kvshm_{name}_total{{engine="{engine}",model_name="m"}}': 2.0 * number * engine
        for name, number in TOLD.items()
        for engine in (0, 1)
    }


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in a MultiConnector"])
def test_vllm_logs_the_sums_of_an_interval(multi: bool) -> None:
    config: Any = SimpleNamespace(kv_transfer_config=transfer(multi))
    KVConnectorProm(config, ["engine"], {0: ["0"]})  # vLLM never has the one without the other
    logging = KVConnectorLogging(config.kv_transfer_config)
    lines: list[tuple[Any, ...]] = []
    for _ in range(2):
        logging.observe({"KvshmConnector": dict(TOLD)} if multi else dict(TOLD))
    logging.log(lambda *line: lines.append(line))
    logging.log(lambda *line: lines.append(line))
    (line,) = lines
    assert "kvshm imported tokens" in line[1]
    assert "64" in line[1]


def test_sums_of_two_steps_are_their_sum() -> None:
    one, other = LoadStats(dict(TOLD)), LoadStats({"loads": 1})
    assert one.aggregate(other).data == TOLD | {"loads": 4}
    assert one.data.keys() == METRICS.keys()
    one.reset()
    assert one.is_empty()


def test_a_worker_and_an_engine_without_imports_tell_nothing(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(2))
    e.step()
    assert e.connector.get_kv_connector_stats() is None
    assert e.stats() is None
    assert KvshmConnector.get_kv_connector_stats(SimpleNamespace(_scheduler=None)) is None  # type: ignore[arg-type]  # of a worker only that counts


def test_a_failed_load_is_no_import(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A match whose blocks cannot be leased any more: vLLM has counted it as a hit by then."""
    e = engine()
    importer = e.connector._scheduler.importer
    monkeypatch.setattr(importer, "match", lambda request, local: 2 * BLOCK_SIZE)
    e.add("a", prompt(3))
    sent = e.schedule()
    (load,) = sent.metadata.loads
    report = RankReport(step=0, loads=[LoadReport("a", load.lost)])
    e.run(sent, report, invalid_block_ids=set(load.lost))
    monkeypatch.undo()
    assert e.stats() == {"imported_tokens": 0, "imported_blocks": 0, "loads": 1, "failed_loads": 1}
    e.step()
    assert e.stats() is None
