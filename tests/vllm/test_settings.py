"""Every setting has the effect it promises: two real schedulers on one node, no model.

Both live in this process, meet through a real coordinator, and are driven step by step.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshm._base.log import LogLimit

pytest.importorskip("vllm")

from local_node import wait_until
from vllm.utils.ompmultiprocessing import OMPProcessManager

from kvshm._base.log_output import start_log
from kvshm._engine import minute_report
from kvshm._engine.load_plan import LoadFailure, LoadReport, PieceFailure
from kvshm._node.peers import QUARANTINE_FAILURES
from kvshm.coordinator.in_process import serve
from kvshm.hooks.vllm import plugin

from .scheduling import BLOCK_SIZE, DrivenEngine, vllm_config

PROMPT = list(range(1, 3 * BLOCK_SIZE + 4))
OTHER_PROMPT = list(range(900, 900 + 3 * BLOCK_SIZE + 4))
UNSHARED = {"kv_transfer_params": {"kvshm": {"share": False}}}

Make = Callable[..., DrivenEngine]


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A namespace with a coordinator, where engines made by the test meet."""
    run_dir = tempfile.mkdtemp(prefix="kv-")
    name = Path(run_dir).name.lower()
    for variable in [v for v in os.environ if v.startswith("KVSHM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("KVSHM_RUN_DIR", run_dir)
    monkeypatch.setenv("KVSHM_NAMESPACE", name)
    monkeypatch.setenv("KVSHM_STRICT", "1")
    monkeypatch.setenv("KVSHM_MIN_PREFIX_TOKENS", "0")
    monkeypatch.setattr(plugin, "_log_limit", LogLimit(math.inf))
    with serve():
        yield name
    shutil.rmtree(run_dir)


@pytest.fixture
def engine(model: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make an engine with settings of its own, joined to the coordinator."""
    made: list[DrivenEngine] = []

    def make(
        settings: dict[str, str] | None = None, *, shares: bool = True, **arguments: Any
    ) -> DrivenEngine:
        with monkeypatch.context() as patch:
            for name, value in (settings or {}).items():
                patch.setenv(name, value)
            made.append(DrivenEngine(vllm_config(model, **arguments), shares=shares))
        for _ in wait_until("the engine joins, and no request waits for it to know the others", 10):
            if not shares or _has_met_all(made[-1]):
                break
        return made[-1]

    yield make
    for one in made:
        one.close()


def _has_met_all(engine: DrivenEngine) -> bool:
    return engine.table.lease_bit >= 0 and not engine.connector._scheduler.cache.meets_peers


def compute(engine: DrivenEngine, prompt: list[int] = PROMPT, **extra: Any) -> set[int]:
    """Have the engine compute a prompt; returns what others may read afterwards."""
    engine.add(f"computed-{prompt[0]}", prompt, max_tokens=1, **extra)
    engine.step()
    engine.step()
    return engine.ready()


def imported(engine: DrivenEngine, prompt: list[int] = PROMPT, **extra: Any) -> int:
    """Blocks that the engine sets out to import for a prompt."""
    engine.add("importing", prompt, max_tokens=1, **extra)
    return sum(len(p.targets) for load in engine.schedule().metadata.loads for p in load.pieces)


def know(importer: DrivenEngine, exporter: DrivenEngine) -> None:
    """Wait until the importer's replica has what the exporter shows."""
    cache = importer.connector._scheduler.cache
    for _ in wait_until("the importer knows the exporter", 10):
        stats = cache.epoch_state.peers.stats()
        if stats.attached and cache.epoch_state.peers.replica.count >= len(exporter.ready()):
            break


def counted(engine: DrivenEngine) -> dict[str, int]:
    return engine.table.counters.snapshot()


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({}, 3),
        ({"KVSHM_ROLE": "producer"}, 0),
        ({"KVSHM_SHARE": "salted-only"}, 0),
        ({"KVSHM_MAX_IMPORT_BLOCKS": "2"}, 2),
        ({"KVSHM_MIN_PREFIX_TOKENS": str(3 * BLOCK_SIZE)}, 3),
        ({"KVSHM_MIN_PREFIX_TOKENS": str(3 * BLOCK_SIZE + 1)}, 0),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else None,
)
def test_what_an_engine_imports(engine: Make, settings: dict[str, str], blocks: int) -> None:
    exporter = engine()
    assert len(compute(exporter)) == 3
    importer = engine(settings)
    know(importer, exporter)
    assert imported(importer) == blocks, counted(importer)
    too_short = "KVSHM_MIN_PREFIX_TOKENS" in settings and not blocks
    assert counted(importer)["miss_too_short"] == too_short
    assert counted(importer)["lookups"] == (blocks > 0 or too_short)


def test_salted_only_shares_what_has_a_salt(engine: Make) -> None:
    exporter = engine({"KVSHM_SHARE": "salted-only"})
    assert compute(exporter, OTHER_PROMPT) == set()
    assert compute(exporter, cache_salt="") == set()  # vLLM's hash leaves it out
    assert len(compute(exporter, cache_salt="s")) == 3
    importer = engine({"KVSHM_SHARE": "salted-only"})
    know(importer, exporter)
    assert imported(importer, cache_salt="s") == 3


def test_a_request_may_stay_out_in_both_directions(engine: Make) -> None:
    """The wish comes as it does over HTTP, in the sampling parameters' extra arguments."""
    exporter, importer = engine(), engine()
    assert compute(exporter, OTHER_PROMPT, extra_args=UNSHARED) == set()
    assert len(compute(exporter)) == 3
    know(importer, exporter)
    assert imported(importer, extra_args=UNSHARED) == 0
    assert counted(importer)["lookups"] == 0


def test_an_engine_that_only_imports_follows_no_block(engine: Make) -> None:
    consumer = engine({"KVSHM_ROLE": "consumer"})
    compute(consumer)
    assert consumer.connector._scheduler.tracker is None


# -- who cannot share says so, on both sides and in the dump


def test_both_sides_name_the_field_that_differs(
    engine: Make, namespace: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minute_report, "PERIOD_SECONDS", 0.0)
    engine()
    newcomer = engine(prefix_caching_hash_algo="sha256_cbor")
    both = (("sha256", "sha256_cbor"), ("sha256_cbor", "sha256"))
    wanted = [f"hash_algorithm is {ours} here, {theirs} there" for ours, theirs in both]
    for _ in wait_until("both sides say it", 10):
        said = [line for line in lines if "cannot share" in line]
        if all(any(each in line for line in said) for each in wanted):
            break
    assert imported(newcomer) == 0
    assert counted(newcomer)["miss_fingerprint"] == 1
    for _ in wait_until("the line about misses", 10):
        if any(line.endswith("fingerprint 1") for line in lines if "0 of 1 lookups" in line):
            break
    command = [sys.executable, "-m", "kvshm.tools.cli", "dump-index", "--namespace", namespace]
    dump = subprocess.run(command, capture_output=True, text=True).stdout
    for ours, theirs in both:
        assert f"hash_algorithm is {ours} here, {theirs} there" in dump
    assert len([line for line in lines if "cannot share" in line]) == 2


# -- why a match came to nothing, by counters


def test_misses_after_the_match_are_counted(engine: Make) -> None:
    exporter, importer = engine(), engine()
    compute(exporter)
    know(importer, exporter)
    cache, chain = importer.connector._scheduler.cache, importer.add("r", PROMPT).block_hashes
    for attempt in range(QUARANTINE_FAILURES):
        plan = cache.planner.lookup(chain, 0, 3)
        load = cache.planner.load(plan, f"load-{attempt}", [1, 2, 3])
        failure = PieceFailure(load.pieces[0].peer_epoch, LoadFailure.UNREACHABLE, b"")
        cache.planner.end_load(load, [LoadReport(load.load_id, (1, 2, 3), (failure,))])
    assert cache.planner.lookup(chain, 0, 3) is None
    stale = exporter.connector._scheduler.cache.publisher
    stale.retract([*exporter.ready()])
    cache.planner.load(plan, "late", [1, 2, 3])
    reported = counted(importer)
    assert (reported["loads_failed"], reported["quarantines"], reported["miss_quarantined"]) == (
        3,
        1,
        1,
    )
    assert (reported["miss_lease_lost"], reported["lease_lost"]) == (1, 3)


# -- what of vLLM is missing is named, once


@pytest.mark.parametrize(
    ("touchpoint", "changed", "owner"),
    [
        ("pool_watch.FOR_EXPORT", ("get_new_blocks", "of_old"), "pool"),
        ("block_tracker.TABLES", "of_old", "manager"),
    ],
)
def test_without_a_touchpoint_for_exports_it_imports_only(
    engine: Make,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    touchpoint: str,
    changed: object,
    owner: str,
) -> None:
    exporter = engine()
    compute(exporter)
    monkeypatch.setattr(f"kvshm.hooks.vllm.exports.{touchpoint}", changed)
    importer = engine()
    know(importer, exporter)
    assert imported(importer) == 3
    assert compute(importer, OTHER_PROMPT) == set()
    said = [line for line in lines if "of this vLLM" in line]
    assert said == [f"kvshm: importing only: the block {owner} of this vLLM has no of_old"]


def test_a_failure_policy_is_overridden_and_that_is_said_once(
    engine: Make, lines: list[str]
) -> None:
    assert engine().config.kv_transfer_config.kv_load_failure_policy == "recompute"
    (line,) = [line for line in lines if "kv_load_failure_policy" in line]
    assert line.startswith("kvshm: kv_load_failure_policy=fail overridden with recompute")


# -- the log level, with the official setting as well


@pytest.mark.parametrize(("level", "shown"), [("error", 0), ("warning", 1), ("debug", 3)])
def test_the_log_level_decides_what_is_shown(
    engine: Make, capsys: pytest.CaptureFixture[str], level: str, shown: int
) -> None:
    vllm = logging.getLogger("vllm")
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel("INFO")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    vllm.addHandler(handler)
    engine({"KVSHM_LOG_LEVEL": level})
    capsys.readouterr()
    try:
        for name in ("debug", "info", "warning"):
            logging.getLogger("vllm.kvshm.anything").log(getattr(logging, name.upper()), name)
    finally:
        vllm.removeHandler(handler)
        start_log("INFO")
    everything = ["DEBUG debug", "INFO info", "WARNING warning"]
    said = [line for line in capsys.readouterr().err.splitlines() if line in everything]
    assert said == everything[3 - shown :]


# -- what a connector costs


def test_a_connector_reserves_a_core_that_a_setting_gives_back(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/deployment.md says so of the CPU backend."""
    monkeypatch.setattr(OMPProcessManager, "_parse_omp_threads_bind_env", lambda self: None)
    config = engine().config
    with monkeypatch.context() as patch:
        patch.setattr(config, "kv_transfer_config", None)
        plain = OMPProcessManager(config).reserve_cpu_num
    assert OMPProcessManager(config).reserve_cpu_num == plain + 1
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", str(plain))
    assert OMPProcessManager(config).reserve_cpu_num == plain
