"""Engines that several test files share, and what a failing test shows of them."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from local_node import Engine, EngineSpec
from tiny_model import write_model

from ..engines_under_test import ENGINES, TransformersSpec
from .engines import SharedNode, reported

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from .cuda_workers import Make as MakeWorker
    from .played_core import Calls
    from .scheduling import DrivenEngine, Make


Lines = list[str]


class Pair(NamedTuple):
    """Two engines of one model that share, on a node with a coordinator."""

    node: SharedNode
    a: Engine
    b: Engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama that every engine serves unless a test says otherwise."""
    pytest.importorskip("vllm")
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cuda_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """An engine on a GPU."""
    from .cuda_workers import config_for_cuda

    return config_for_cuda(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cuda_worker(cuda_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorker]:
    """Makes workers of such engines; the GPU is played."""
    from .cuda_workers import makers

    yield from makers(cuda_config, monkeypatch)


@pytest.fixture(scope="session")
def pair(model: Path) -> Iterator[Pair]:
    """The two engines most tests ask."""
    yield from pair_of(EngineSpec, model)


@pytest.fixture(scope="session")
def transformers_pair(model: Path) -> Iterator[Pair]:
    """Two engines of the other kind."""
    yield from pair_of(TransformersSpec, model)


@pytest.fixture(params=ENGINES)
def each_pair(request: pytest.FixtureRequest) -> Pair:
    """The two engines, of one kind after the other."""
    names = {"vllm": "pair", "transformers": "transformers_pair"}
    found: Pair = request.getfixturevalue(names[request.param])
    return found


def pair_of(kind: type[EngineSpec], model: Path) -> Iterator[Pair]:
    """Start two engines, and stop them."""
    with SharedNode() as node:
        node.start_coordinator()
        a, b = node.start_engines(
            kind("a", model, core=0, num_blocks=1024),
            kind("b", model, core=1, num_blocks=1024),
        )
        node.wait_joined(a, b)
        yield Pair(node, a, b)


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes real schedulers, each played by hand, that end with the test."""
    from .scheduling import DrivenEngine, imagined_cache, vllm_config

    made: list[DrivenEngine] = []
    run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
    monkeypatch.setenv("KVSHM_RUN_DIR", str(run_dir))
    monkeypatch.setenv("KVSHM_NAMESPACE", run_dir.name.lower())
    monkeypatch.setenv("KVSHM_STRICT", "1")
    monkeypatch.setenv("KVSHM_MIN_PREFIX_TOKENS", "0")
    monkeypatch.setenv("KVSHM_JOIN_WAIT_MS", "0")  # tables may be served, and no one answers a join

    def make(
        asynchronous: bool = False,
        num_blocks: int = 32,
        specs: Any = (),
        model_path: Path = model,
        rank: Any = None,
        drafting: int | None = None,
        **arguments: Any,
    ) -> DrivenEngine:
        config = vllm_config(model_path, **arguments)
        config.scheduler_config.async_scheduling = asynchronous
        cache = imagined_cache(num_blocks, specs, drafting)
        shares = rank is None  # else the test waits for the epoch
        made.append(DrivenEngine(config, num_blocks, asynchronous, shares, cache=cache, rank=rank))
        return made[-1]

    yield make
    for one in made:
        one.close()
    shutil.rmtree(run_dir)


@pytest.fixture
def core_start(model: Path, engine: Make) -> Calls:
    """What an EngineCore calls while it starts, in the run directory of ``engine``."""
    from .played_core import calls_of_a_start
    from .scheduling import vllm_config

    return calls_of_a_start(vllm_config(model))


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What kvshm logs.  A record factory, because vLLM removes the handlers of loggers below its
    own whenever it configures logging, and its lines do not propagate to where pytest listens."""
    said: Lines = []
    make = logging.getLogRecordFactory()

    def hear(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.name.startswith("vllm.kvshm"):
            said.append(record.getMessage())
        return record

    logging.setLogRecordFactory(hear)
    yield said
    logging.setLogRecordFactory(make)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of all engines and the index dump to the report of a failed test."""
    report = yield
    if report.failed:
        for node in SharedNode.open:
            report.sections.extend(node.evidence())
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many engines were started, and what was measured but not asserted."""
    if SharedNode.starts:
        terminalreporter.section("vLLM engines")
        starts = SharedNode.starts
        terminalreporter.write_line(f"{len(starts)} engines started: {', '.join(starts)}")
        for line in reported:
            terminalreporter.write_line(line)
