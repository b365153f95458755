"""Data-parallel ranks of one server share: each is an engine with a KV cache of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from completions import Result, stream
from local_node import Engine, EngineSpec, wait_until
from safetensors.torch import load_file, save_file
from sharing_node import BLOCK_SIZE, observe

from kvshm._base.fingerprint import differences
from kvshm._base.ids import Epoch
from kvshm._base.rundir import list_sockets
from kvshm._node.segment_server import SegmentClient

from . import cpu_experts
from .engines import PATIENCE_S, SharedNode, remove_what_vllm_leaves
from .families import write_qwen3_moe
from .oracle import Prompt, ask_both, assert_bit_equal, prompts, shareable
from .test_weight_writes import ARGUMENTS, ENVIRONMENT, call

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


def check_ranks(node: SharedNode, engine: Engine, first: int = 410) -> None:
    """Each rank imports what the other has computed, and then answers as the other does."""
    expected = {rank: imported_tokens(engine, rank) for rank in RANKS}
    for exporter, importer in (RANKS, RANKS[::-1]):
        (prompt,) = prompts(1, seed=first + int(exporter))
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


# -- mixtures of experts


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    return write_qwen3_moe(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which several ranks of a mixture run on CPUs."""
    return cpu_experts.install(tmp_path_factory.mktemp("plug-in"))


def test_ranks_that_hold_other_experts_share_until_one_rank_has_new_ones(
    node: SharedNode, mixture: Path, on_cpus: dict[str, str]
) -> None:
    node.start_coordinator()
    paths = os.pathsep.join([on_cpus["PYTHONPATH"], ENVIRONMENT["PYTHONPATH"]])
    calls = {"KVSHM_READ_ONLY_CALLS": "write_experts"}
    environment = {**ENVIRONMENT, **calls, "PYTHONPATH": paths}
    arguments = ("--enable-expert-parallel", *ARGUMENTS)
    (engine,) = node.start_engines(server(mixture, *arguments, **environment))
    wait_joined(engine)
    check_ranks(node, engine)
    old = known(node).keys()
    call(engine, "write_experts", "1")
    for place in (r"model\.layers\.0\.\S*w2_weight", "the experts of rank 1 of this instance"):
        for _ in wait_until("the write is found, without a step", PATIENCE_S):
            if any(re.search(f"found in {place}:", line) for line in engine.said("found in")):
                break
    for _ in wait_until("both ranks have joined anew", PATIENCE_S):
        for rank in RANKS:
            ask(engine, rank, (1, 2))
        if len(engine.said("joined as")) >= 2 * len(RANKS) and not old & known(node).keys():
            break
    check_ranks(node, engine, first=420)


def joined_with(node: SharedNode, engine: Engine) -> dict[str, str]:
    """The fingerprint's fields of an engine of one rank."""
    epoch = node._epoch(engine)
    assert epoch is not None
    segments = SegmentClient(node.run_dir, node.namespace)
    return dict(segments.info(epoch).fields)


def with_another_expert(model: Path, folder: Path) -> Path:
    """A copy of the model with one other expert in the last layer."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("layers.2.mlp.experts.5.down_proj.weight"))
    weights[name][0, 0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.nightly
def test_engines_share_with_ranks_that_hold_the_same_experts_elsewhere_and_with_no_others(
    node: SharedNode, mixture: Path, on_cpus: dict[str, str], tmp_path: Path
) -> None:
    node.start_coordinator()
    (ranks,) = node.start_engines(server(mixture, "--enable-expert-parallel", **on_cpus))
    wait_joined(ranks)
    other_model = with_another_expert(mixture, tmp_path / "other")
    length = ("--max-model-len", "2048")
    alone, other = node.start_engines(
        EngineSpec("alone", mixture, 0, 64, length), EngineSpec("other", other_model, 1, 64, length)
    )
    node.wait_joined(alone)
    (prompt,) = prompts(1, seed=430)
    before = sum(known(node).values())
    ask(ranks, "1", prompt)
    for _ in wait_until("rank 0 and the engine alone know the blocks", PATIENCE_S):
        if sum(known(node).values()) >= before + 2 * shareable(prompt):
            break
    imported = alone.complete(prompt)
    assert alone.prompt_tokens().imported == shareable(prompt) * BLOCK_SIZE
    assert imported == alone.complete(prompt)
    other.complete(prompt)
    assert other.prompt_tokens().imported == 0
    assert differences(joined_with(node, alone), joined_with(node, other)).keys() == {"experts"}


@pytest.mark.nightly
def test_tensor_parallel_ranks_that_hold_other_experts_share(
    node: SharedNode, mixture: Path, on_cpus: dict[str, str]
) -> None:
    size = ("--tensor-parallel-size", "2", "--max-model-len", "2048", "--enable-expert-parallel")
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    node.start_coordinator()
    a, b = node.start_engines(
        EngineSpec("tp-a", mixture, 0, 64, size, cores | on_cpus),
        EngineSpec("tp-b", mixture, 1, 64, size, cores | on_cpus),
    )
    node.wait_joined(a, b)
    (prompt,) = prompts(1, seed=440)
    with observe(node, b) as seen:
        assert_bit_equal(ask_both(node, a, b, [prompt]))
    assert seen.imported_blocks == shareable(prompt) > 0
    assert seen.verified == 2 * seen.imported_blocks
    assert seen.mismatched == 0
    node.stop_engines(a, b)
    for engine in (a, b):
        remove_what_vllm_leaves(engine)
