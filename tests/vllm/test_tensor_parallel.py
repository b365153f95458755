"""Two engines of two ranks each share: every rank imports its part, or nothing counts."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import Engine, EngineSpec, wait_until
from sharing_node import BLOCK_SIZE, observe

from ..descriptors import names_open
from .conftest import Pair
from .engines import PATIENCE_S, SharedNode, remove_what_vllm_leaves
from .oracle import ask_both, assert_bit_equal, prompts, shareable
from .test_keeper import Keeper
from .test_weight_writes import ARGUMENTS, ENVIRONMENT, assert_computed, call, share_again, write

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

RANKS = 2


ELSEWHERE = {
    "KVSHM_RUN_DIR": "/no/such/place",
    "KVSHM_NAMESPACE": "elsewhere",
    "KVSHM_VERIFY": "0",
}
"""An environment in which a process shares only if it has read the engine's configuration."""


@pytest.fixture(scope="module")
def wide(model: Path) -> Iterator[Pair]:
    """Both engines have a rank on either core.  The processes of b have their settings from
    kv_connector_extra_config."""
    arguments = ("--tensor-parallel-size", str(RANKS), "--max-model-len", "2048", *ARGUMENTS)
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    harmless = ENVIRONMENT["KVSHM_READ_ONLY_CALLS"] + ", fail_copies"
    with SharedNode(ENVIRONMENT | {"KVSHM_READ_ONLY_CALLS": harmless}) as node:
        node.start_coordinator()
        place = {"run_dir": str(node.run_dir), "namespace": node.namespace, "verify": True}
        configured = ("--kv-transfer-config", json.dumps({"kv_connector_extra_config": place}))
        a, b = node.start_engines(
            EngineSpec("wide-a", model, 0, 64, arguments, cores),
            EngineSpec("wide-b", model, 1, 64, arguments + configured, cores | ELSEWHERE),
        )
        node.wait_joined(a, b)
        yield Pair(node, a, b)
        node.stop_engines(a, b)
        for engine in (a, b):
            remove_what_vllm_leaves(engine)


def workers(engine: Engine) -> list[int]:
    """The pids of the engine's ranks: those who hold KV memory."""
    return sorted(pid for pid in engine.processes() if "/memfd:kvshm-kv" in open_files(pid))


def open_files(pid: int) -> set[str]:
    return {name.removesuffix(" (deleted)") for name in names_open(pid)}


def test_every_rank_imports_and_the_answer_is_that_of_a_local_hit(wide: Pair) -> None:
    node, a, b = wide
    assert len(workers(a)) == len(workers(b)) == RANKS
    for exporter, importer, seed in ((a, b, 400), (b, a, 401)):
        sent = list(prompts(2, seed))
        blocks = sum(map(shareable, sent))
        with observe(node, importer) as seen:
            answers = ask_both(node, exporter, importer, sent)
        assert_bit_equal(answers)
        assert seen.imported_blocks == blocks
        assert seen.blocks_copied == seen.verified == RANKS * blocks
        assert seen.discarded == seen.mismatched == 0
        assert seen.loads_started == seen.loads_done == len(sent)
        assert seen.tokens.imported == seen.loaded["imported_tokens"] == blocks * BLOCK_SIZE


def test_what_one_rank_could_not_copy_the_engine_computes(wide: Pair) -> None:
    """Though the other rank has it; and what comes after is imported again."""
    node, a, b = wide
    lost, last = prompts(2, seed=405)
    with node.sharing(a, shareable(lost)):
        computed = a.complete(lost)
    call(b, "fail_copies", "1")
    with observe(node, b) as seen:
        assert b.complete(lost) in (computed, a.complete(lost))
    call(b, "fail_copies", "")
    assert (seen.loads_started, seen.loads_failed, seen.loads_done) == (1, 1, 0)
    assert seen.leases_taken == seen.blocks_copied == seen.discarded == shareable(lost)
    assert seen.imported_blocks == seen.tokens.imported == 0
    assert node.leased(a) == set()
    with observe(node, b) as seen:
        assert_bit_equal(ask_both(node, a, b, [last]))
    assert seen.imported_blocks == shareable(last)


def test_a_keeper_has_the_parts_of_all_ranks(wide: Pair) -> None:
    """Once the engine has computed much else nobody else has the prompts."""
    keeper = Keeper(wide.node)
    try:
        check_that_a_keeper_has_it_all(wide, keeper)
    finally:
        status = keeper.end()
    assert status == 0


def check_that_a_keeper_has_it_all(wide: Pair, keeper: Keeper) -> None:
    node, a, b = wide
    before = node.shown_hashes(a, b)
    sent = list(prompts(2, seed=440))
    hits = {}
    for prompt in sent:
        a.complete(prompt)
        hits[prompt] = a.complete(prompt)
    keeper.wait_for(len(node.shown_hashes(a, b)))
    computed = node.shown_hashes(a, b) - before
    for other in prompts(60, seed=441):
        if computed.isdisjoint(node.shown_hashes(a, b)):
            break
        a.complete(other)
    for engine, prompt in zip((a, b), sent, strict=True):
        with observe(node, engine) as seen:
            imported = engine.complete(prompt)
        assert seen.tokens.imported == shareable(prompt) * BLOCK_SIZE
        assert (seen.verified, seen.mismatched) == (shareable(prompt) * RANKS, 0)
        assert imported == hits[prompt] == engine.complete(prompt)


@pytest.mark.parametrize("way", ["write_weights", "write_unseen"])
def test_weights_that_one_rank_has_written_end_what_all_share(wide: Pair, way: str) -> None:
    node, a, b = wide
    of_a, of_b, last = prompts(3, seed=410 + len(way))
    for engine, prompt in ((a, of_a), (b, of_b)):
        with node.sharing(engine, shareable(prompt)):
            engine.complete(prompt)
    write(wide, a, way, "7", "1")
    assert_computed(b, of_a)
    assert_computed(a, of_b)
    if way == "write_unseen":
        assert a.said("rank 1: weights were written")
        assert not a.said("rank 0: weights were written")
    write(wide, a, "write_weights", "")
    share_again(wide)
    with observe(node, b) as seen:
        assert_bit_equal(ask_both(node, a, b, [last]))
    assert seen.imported_blocks == shareable(last)


def test_a_killed_rank_ends_its_engine_for_the_other(wide: Pair) -> None:
    node, a, b = wide
    (prompt,) = prompts(1, seed=402)
    with node.sharing(a, shareable(prompt)):
        computed = a.complete(prompt)
    hit = a.complete(prompt)
    gone = re.compile(rf"engine \S+ \(epoch {node.epoch(a):016x}, pid \d+\) is gone")
    os.kill(workers(a)[-1], signal.SIGKILL)
    for _ in wait_until("the other has heard of it", PATIENCE_S):
        if gone.search(b.log()):
            break
    with observe(node, b) as seen:
        assert b.complete(prompt) in (computed, hit)
    assert seen.imported_blocks == seen.leases_taken == 0
    assert seen.tokens.computed == len(prompt)
