"""Coordinators and engines come, stop, die and return: that costs misses, never a token and
never a stall, and whoever is there shares whenever there is a coordinator.

One story of two engines: each step begins where the one before has ended.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from completions import Result
from local_node import Engine, wait_until
from sharing_node import BLOCK_SIZE, observe

from kvshm._shm.layout import RowState
from kvshm.tools.kv.block_file import BlockFile

from ..engines_under_test import ENGINES
from .conftest import Pair
from .engines import PATIENCE_S, SharedNode
from .oracle import Prompt, ask_both, assert_bit_equal, prompts, random_prompt, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

Answer = tuple[Prompt, Result]

BUDGET_MS = 1000
FEW_BLOCKS = 24


@pytest.fixture(params=ENGINES)
def alone(model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two engines on a node without a coordinator.  The first has a small cache; the second
    stops itself between the leases and the copy of its first import."""
    kind = ENGINES[request.param]
    short = kind.longest_prompt((FEW_BLOCKS - 1) * BLOCK_SIZE)
    budget = {"KVSHM_DRAIN_BUDGET_MS": str(BUDGET_MS)}
    stop = {"KVSHM_TEST_SYNC_POINT": "COPY_BEGINS:stop"}
    with SharedNode() as node:
        small, stopping = node.start_engines(
            kind("small", model, 0, FEW_BLOCKS, arguments=short, environment=budget),
            kind("stopping", model, 1, arguments=short, environment=stop),
        )
        yield Pair(node, small, stopping)


def test_two_engines_live_through_it(alone: Pair, tmp_path: Path) -> None:
    _the_coordinator_comes_last(alone)
    _blocks_are_reused_while_leased(alone)
    _the_coordinator_dies_and_returns(alone)
    _what_a_dead_engine_left_waits_for_the_next_coordinator(alone)
    again = _the_dead_engine_is_started_again(alone)
    answers = _an_engine_is_dumped(alone, tmp_path / "file")
    _a_stopped_engine_leaves_and_does_not_die(alone)
    _the_file_outlives_it(alone.node, again, tmp_path / "file", answers)
    _who_is_stopped_together_leaves_nothing(alone.node, again)


def _the_coordinator_comes_last(alone: Pair) -> None:
    node, small, stopping = alone
    _assert_serves_unshared(alone, *prompts(1, seed=200))
    node.start_coordinator()
    node.wait_joined(small, stopping)


def _blocks_are_reused_while_leased(alone: Pair) -> None:
    node, small, importer = alone
    prompt = random_prompt(100, 5 * BLOCK_SIZE + 30)
    with node.sharing(small, shareable(prompt)):
        computed = small.complete(prompt)
    with observe(node, importer) as seen, ThreadPoolExecutor(1) as pool:
        pending: Future[Result] = pool.submit(importer.complete, prompt)
        try:
            for _ in wait_until("the importer stops with its leases", PATIENCE_S):
                if "T" in importer.processes().values():
                    break
            assert len(node.leased(small)) == shareable(prompt)
            _reuse_all_blocks(alone)
        finally:
            importer.signal(signal.SIGCONT)
        answer = pending.result()
    assert answer == computed
    assert seen.discarded == shareable(prompt)
    assert seen.imported_blocks == 0
    assert seen.tokens.imported == seen.loaded["imported_tokens"] == 0
    assert seen.loaded["failed_loads"] == seen.loaded["loads"] == 1
    assert not node.leased(small)
    _assert_shares(alone, *prompts(1, seed=201))


def _the_coordinator_dies_and_returns(alone: Pair) -> None:
    node, small, other = alone
    known, unheard, last = prompts(3, seed=202)
    with node.sharing(small, shareable(known)):
        small.complete(known)
    node.end_coordinator(signal.SIGKILL)
    with observe(node, other) as seen:  # what was known stays known
        imported = other.complete(known)
    seen.assert_imported(shareable(known))
    assert imported == small.complete(known)
    _assert_serves_unshared(alone, unheard)

    node.start_coordinator()
    node.wait_joined(small, other)
    _assert_shares(alone, last)


def _what_a_dead_engine_left_waits_for_the_next_coordinator(alone: Pair) -> None:
    node, small, other = alone
    (prompt,) = prompts(1, seed=203)
    with node.sharing(small, shareable(prompt)):
        computed = small.complete(prompt)
    hit = small.complete(prompt)
    assert node.end_coordinator() == 0
    left = node.owned(small)
    assert left
    small.kill()  # no one is there to tell the other
    assert other.complete(prompt) in (computed, hit)

    node.start_coordinator()
    for _ in wait_until("what the dead engine left is swept", PATIENCE_S):
        if not left & set(node.sockets()):
            break
    assert other.complete(prompt) in (computed, hit)


def _the_dead_engine_is_started_again(alone: Pair) -> Engine:
    node, small, other = alone
    node.stop_engines(small)
    theirs, ours = prompts(2, seed=204)
    with node.sharing(other, shareable(theirs)):
        other.complete(theirs)
    (again,) = node.start_engines(small.spec)
    node.wait_joined(again, other)
    with observe(node, again) as seen:
        imported = again.complete(theirs)
    seen.assert_imported(shareable(theirs))
    assert imported == other.complete(theirs)
    _assert_shares(Pair(node, again, other), ours)
    return again


def _an_engine_is_dumped(alone: Pair, path: Path) -> list[Answer]:
    """Twice, which gives the same bytes.  Return some of what it answers, from its own cache."""
    node, _, other = alone
    sent = list(prompts(2, seed=205))
    with node.sharing(other, sum(map(shareable, sent))):
        for prompt in sent:
            other.complete(prompt)
    hits = [(prompt, other.complete(prompt)) for prompt in sent]
    with closing(node.table(other)) as table:
        pid = str(table.pid)
    again = path.with_suffix(".again")
    for file in (path, again):
        done = node.kvshm("kv", "dump", str(file), "--engine", pid)
        assert done.returncode == 0, done.stderr
    compared = node.kvshm("kv", "compare", str(path), str(again))
    assert (compared.returncode, "as bfloat16" in compared.stdout) == (0, True), compared.stdout
    return hits


def _a_stopped_engine_leaves_and_does_not_die(alone: Pair) -> None:
    """SIGTERM to the server alone, with which vLLM then ends its EngineCore and worker."""
    node, _, other = alone
    before = len(node.coordinator_log.read_text())
    other.process.terminate()
    for _ in wait_until("it has ended", PATIENCE_S):
        if not other.processes():
            break
    node.stop_engines(other)
    said = node.coordinator_log.read_text()[before:]
    assert len(re.findall("event=leave", said)) == 1
    assert not re.findall("event=(?:death|refused)", said)


def _the_file_outlives_it(
    node: SharedNode, engine: Engine, path: Path, answers: list[Answer]
) -> None:
    def known() -> int:
        with closing(node.replica(engine)) as replica:
            return sum(row.entries for row in replica.rows() if row.state is RowState.LIVE)

    held = len(BlockFile(path).what.blocks)
    with node.serving(path):
        for _ in wait_until("the engine knows the blocks of the file", PATIENCE_S):
            if known() == held:
                break
        for prompt, hit in answers:
            with observe(node, engine) as seen:
                imported = engine.complete(prompt)
            seen.assert_imported(shareable(prompt))
            assert imported == hit == engine.complete(prompt)


def _who_is_stopped_together_leaves_nothing(node: SharedNode, engine: Engine) -> None:
    """SIGTERM to every process at once, as systemd does with a control group."""
    assert node.sockets()
    engine.signal(signal.SIGTERM)
    assert node.end_coordinator() == 0
    for _ in wait_until("the engine has ended", PATIENCE_S):
        if not engine.processes():
            break
    node.stop_engines(engine)
    assert node.sockets() == []
    assert {path.suffix for path in node.run_dir.iterdir()} == {".log"}


def _reuse_all_blocks(alone: Pair) -> None:
    """Make the small engine overwrite every block it has, leased or not: READY -> DRAINING
    -> forced.  It needs all of them at once, since it passes leased ones over if it can.  It waits
    for the stopped importer once, for one budget."""
    node, small, _ = alone
    with observe(node, small) as seen:
        small.complete(random_prompt(101, (FEW_BLOCKS - 2) * BLOCK_SIZE), max_tokens=2)
    assert seen.forced == 5
    assert BUDGET_MS * 1000 <= seen.drain_wait_us < 2 * BUDGET_MS * 1000


def _assert_serves_unshared(alone: Pair, prompt: Prompt) -> None:
    _, small, other = alone
    before = other.prompt_tokens()
    assert other.complete(prompt) == small.complete(prompt)
    assert (other.prompt_tokens() - before).computed == len(prompt)


def _assert_shares(pair: Pair, prompt: Prompt) -> None:
    node, exporter, importer = pair
    with observe(node, importer) as seen:
        assert_bit_equal(ask_both(node, exporter, importer, [prompt]))
    seen.assert_imported(shareable(prompt))
