"""Data-parallel ranks of one server share: each is an engine with a KV cache of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from completions import Result, stream
from local_node import Engine, EngineSpec, wait_until
from sharing_node import BLOCK_SIZE

from kvshm._base.ids import Epoch
from kvshm._base.rundir import list_sockets
from kvshm._node.segment_server import SegmentClient

from . import cpu_experts
from .engines import PATIENCE_S, SharedNode
from .families import write_qwen3_moe
from .oracle import Prompt, prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

RANKS = ("0", "1")


@pytest.fixture
def node() -> Iterator[SharedNode]:
    with SharedNode() as node:
        yield node


def ask(engine: Engine, rank: str, prompt: Prompt) -> Result:
    """Have one rank of the server answer."""
    body = {"prompt": list(prompt), "logprobs": 5, "max_tokens": 16}
    model = {"model": str(engine.spec.model)}
    return stream(engine.port, "/v1/completions", {**model, **body}, {"X-data-parallel-rank": rank})


def known(node: SharedNode) -> dict[Epoch, int]:
    """How many blocks of others each epoch on the node knows."""
    segments = SegmentClient(node.run_dir, node.namespace)
    entries = {}
    for found in list_sockets(node.run_dir, node.namespace):
        if found.epoch is not None:
            with contextlib.closing(segments.replica(found.epoch)) as replica:
                entries[found.epoch] = len(list(replica.entries()))
    return entries


def imported_tokens(engine: Engine, rank: str) -> int:
    (value,) = (
        int(value)
        for name, value in engine.metrics().items()
        if name.startswith("vllm:kvshm_imported_tokens_total") and f'engine="{rank}"' in name
    )
    return value


def server(model: Path, *arguments: str, **environment: str) -> EngineSpec:
    """Two data-parallel ranks, each on a core."""
    size = ("--data-parallel-size", "2", "--max-model-len", "2048")
    # From 0.33 on rank 1 wants a NUMA node 1, unless the second variable is there.
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_SIM_MULTI_NUMA": "0"}
    return EngineSpec("ranks", model, 0, 64, (*size, *arguments), {**cores, **environment})


def wait_joined(engine: Engine, times: int = len(RANKS)) -> None:
    for _ in wait_until("both ranks have joined", PATIENCE_S):
        if len(engine.said("joined as")) >= times:
            break


def check_ranks(node: SharedNode, engine: Engine) -> None:
    """Each rank imports what the other has computed, and then answers as the other does."""
    expected = dict.fromkeys(RANKS, 0)
    for exporter, importer in (RANKS, RANKS[::-1]):
        (prompt,) = prompts(1, seed=410 + int(exporter))
        before = known(node)
        ask(engine, exporter, prompt)
        for _ in wait_until("the other rank knows the blocks", PATIENCE_S):
            if sum(known(node).values()) >= sum(before.values()) + shareable(prompt):
                break
        imported = ask(engine, importer, prompt)
        expected[importer] += shareable(prompt) * BLOCK_SIZE
        assert {rank: imported_tokens(engine, rank) for rank in RANKS} == expected
        assert imported == ask(engine, exporter, prompt)


def test_a_rank_imports_what_the_other_has_computed(node: SharedNode, model: Path) -> None:
    node.start_coordinator()
    (engine,) = node.start_engines(server(model))
    wait_joined(engine)
    check_ranks(node, engine)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    return write_qwen3_moe(tmp_path_factory.mktemp("mixture"))


def test_ranks_that_hold_other_experts_share(
    node: SharedNode, mixture: Path, tmp_path: Path
) -> None:
    environment = cpu_experts.install(tmp_path)
    node.start_coordinator()
    (engine,) = node.start_engines(server(mixture, "--enable-expert-parallel", **environment))
    wait_joined(engine)
    check_ranks(node, engine)
