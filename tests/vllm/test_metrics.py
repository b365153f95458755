"""What was loaded, on its way through vLLM's own classes to the page that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from kvshm._base.copy_path import CopyPath
from kvshm._engine.load_plan import LoadReport
from kvshm._engine.load_planner import LoadResult
from kvshm.hooks.vllm.connector import KvshmConnector
from kvshm.hooks.vllm.imports.prompt_tokens import Sources
from kvshm.hooks.vllm.messages import RankReport
from kvshm.hooks.vllm.metrics import METRICS, LoadStats

from .scheduling import BLOCK_SIZE, Make, prompt

OWN = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}
LOADS = {
    "imported_tokens": 32,
    "imported_blocks": 2,
    "imported_bytes": 2_500_000,
    "loads": 3,
    "failed_loads": 1,
}
PROMPTS = {"local": 16, "peer": 32, "computed": 5}
TOLD = {**LOADS, "import_seconds": {"shm": [0.25, 0.0007]}, "prompt_tokens": PROMPTS}


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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
    reported = (line.rpartition(" ") for line in lines if line.startswith("vllm:kvshm_"))
    return {name: float(value) for name, _, value in reported if "_created" not in name}


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in a MultiConnector"])
def test_each_engine_of_an_api_server_has_its_own_numbers(multi: bool) -> None:
    config: Any = SimpleNamespace(kv_transfer_config=transfer(multi))
    labels = {0: ["m", "0"], 1: ["m", "1"]}
    prom = KVConnectorProm(config, ["model_name", "engine"], labels)
    reported = {"KvshmConnector": TOLD} if multi else TOLD
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(reported))  # as between processes
    for _ in range(2):
        prom.observe(data, engine_idx=1)
    prom.observe({"KvshmConnector": {"unknown": 1}} if multi else {"unknown": 1}, engine_idx=1)
    seen = page()
    times = {name: seen.pop(name) for name in list(seen) if "import_seconds" in name}
    of_engine = 'engine="{0}",model_name="m"'
    wanted = {f"{name}_total{{{of_engine}}}": number for name, number in LOADS.items()}
    for source, number in PROMPTS.items():
        wanted[f'prompt_tokens_total{{{of_engine},source="{source}"}}'] = number
    assert seen == {
        "vllm:kvshm_" + name.replace("{0}", str(engine)): 2.0 * number * engine
        for name, number in wanted.items()
        for engine in (0, 1)
    }
    of_path = 'engine="1",{}model_name="m",path="shm"'
    assert times["vllm:kvshm_import_seconds_count{" + of_path.format("") + "}"] == 4
    assert times["vllm:kvshm_import_seconds_sum{" + of_path.format("") + "}"] == 2 * 0.2507
    shorter = of_path.format('le="0.001",')
    assert times["vllm:kvshm_import_seconds_bucket{" + shorter + "}"] == 2


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
    said = line[0] % line[1:]
    if not multi:
        assert said == (
            "KV Transfer metrics: kvshm prompt tokens=106, from own cache=32, "
            "from other engines=64, computed=10, imports=6, failed=2, MB=5.0, slowest ms=250.0"
        )
    assert "kvshm prompt tokens" in said


def test_a_line_says_only_what_happened() -> None:
    assert list(LoadStats(dict(LOADS)).reduce()) == ["kvshm imports", "failed", "MB"]
    assert next(iter(LoadStats({"prompt_tokens": PROMPTS}).reduce())) == "kvshm prompt tokens"
    assert LoadStats().is_empty()
    assert LoadStats().reduce() == {}


SECONDS = st.floats(0, 1e3)
RESULTS = st.lists(
    st.builds(
        LoadResult,
        st.integers(0, 99),
        st.integers(0, 99),
        st.booleans(),
        st.integers(0, 1 << 40),
        st.none() | st.tuples(st.sampled_from(CopyPath), SECONDS),
    ),
    max_size=4,
)
NUMBERS = st.integers(0, 1 << 40)
STEPS = st.builds(
    lambda ended, *numbers: LoadStats.of(ended, Sources(*numbers), BLOCK_SIZE),
    RESULTS, NUMBERS, NUMBERS, NUMBERS,
)  # fmt: skip


@given(st.lists(STEPS, min_size=3, max_size=6), st.integers(1, 2))
def test_sums_of_steps_are_the_same_however_they_are_added(steps: list[LoadStats], at: int) -> None:
    """An engine's own steps, and those of an interval, also after travelling between processes."""

    def total(some: list[LoadStats]) -> LoadStats:
        first, *others = (LoadStats(dict(each.data)) for each in some)
        for other in others:
            first.aggregate(other)
        return first

    before = msgspec.msgpack.encode([each.data for each in steps])
    one, other = total(steps[:at]), total(steps[at:])
    sent = LoadStats(msgspec.msgpack.decode(msgspec.msgpack.encode(other.data)))
    assert one.aggregate(sent).data == total(steps).data
    assert msgspec.msgpack.encode([each.data for each in steps]) == before
    one.reset()
    assert one.is_empty()


def test_a_step_in_which_nothing_happened_tells_nothing(engine: Make) -> None:
    e = engine()
    e.add("a", prompt(2))
    e.step()
    tokens = 2 * BLOCK_SIZE + 3
    assert e.stats() == {"prompt_tokens": {"local": 0, "peer": 0, "computed": tokens}}
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
    assert e.stats() == {**dict.fromkeys(METRICS, 0), "loads": 1, "failed_loads": 1}
    e.step()
    assert e.stats() == {"prompt_tokens": {"local": 0, "peer": 0, "computed": 3 * BLOCK_SIZE + 3}}
