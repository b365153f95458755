"""Weights that are written while engines share: neither engine uses a block of other weights."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import Engine, EngineSpec, wait_until
from sharing_node import observe

from .conftest import Pair
from .engines import PATIENCE_S, SharedNode
from .oracle import ask_both, assert_bit_equal, prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

ARGUMENTS = ("--worker-extension-cls", "writing_ranks.WritingRanks")
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent),
    "KVSHM_READ_ONLY_CALLS": "tell, write_unseen",
    "KVSHM_WEIGHTS_CHECK_SECONDS": "0.5",
}
FOUND = "weights were written without an announcement, found in model.embed_tokens.weight"


def call(engine: Engine, method: str, *args: str) -> None:
    """Call a method of the engine's ranks over HTTP."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.port}/collective_rpc",
        data=json.dumps({"method": method, "args": args}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        answer.read()


def write(pair: Pair, engine: Engine, way: str, *args: str) -> None:
    """Write the engine's weights; returns when no one can read the engine's blocks any more."""
    before = len(engine.said(FOUND))
    call(engine, way, *args)
    if way == "write_weights":
        assert pair.node._epoch(engine) is None, "it ends before the call reaches the ranks"
        return
    for _ in wait_until("the write is found, without a step", PATIENCE_S):
        if len(engine.said(FOUND)) > before:
            break
    for _ in wait_until("the blocks are withdrawn", PATIENCE_S):
        with contextlib.closing(pair.node.table(engine)) as table:
            if not table.alive:
                break


def assert_computed(engine: Engine, prompt: tuple[int, ...]) -> None:
    """The engine imports nothing of the prompt, and says what it computes by itself."""
    before = engine.prompt_tokens().imported
    said = engine.complete(prompt)
    assert engine.prompt_tokens().imported == before
    assert said.tokens == engine.complete(prompt, cache_salt="computed again").tokens


def begin_epoch(pair: Pair, engine: Engine) -> None:
    """Have the engine digest its weights, which it does with a step, and begin another epoch."""
    for _ in wait_until("the next epoch begins and is open", PATIENCE_S):
        engine.complete([0], max_tokens=1)
        if pair.node._epoch(engine) is not None:
            with contextlib.closing(pair.node.table(engine)) as table:
                if table.alive:
                    break


def share_again(pair: Pair) -> None:
    """Both have the same weights: they share what they compute from now on."""
    for engine in (pair.a, pair.b):
        begin_epoch(pair, engine)
    pair.node.wait_joined(pair.a, pair.b)


@pytest.fixture(scope="module")
def writing(model: Path) -> Iterator[Pair]:
    """Two engines whose ranks can be told to write their weights."""
    with SharedNode(ENVIRONMENT) as node:
        node.start_coordinator()
        a, b = node.start_engines(
            EngineSpec("writing-a", model, 0, arguments=ARGUMENTS),
            EngineSpec("writing-b", model, 1, arguments=ARGUMENTS),
        )
        node.wait_joined(a, b)
        yield Pair(node, a, b)


@pytest.mark.parametrize("way", ["write_weights", "write_unseen"])
def test_no_one_uses_blocks_of_other_weights(writing: Pair, way: str) -> None:
    """Neither the engine with the old weights nor the one with the new; and not later, when both
    have the new ones, what was computed with the old."""
    node, a, b = writing
    shared, of_a, of_b, new, last = prompts(5, seed=500 + len(way))
    with observe(node, b) as seen:
        assert_bit_equal(ask_both(node, a, b, [shared]))
    seen.assert_imported(shareable(shared))
    for engine, prompt in ((a, of_a), (b, of_b)):
        with node.sharing(engine, shareable(prompt)):
            engine.complete(prompt)
    write(writing, a, way, "7")
    assert_computed(b, (*of_a, 1))
    assert_computed(a, (*of_b, 1))
    begin_epoch(writing, a)
    a.complete(new)
    for _ in wait_until("it has published the prompt", PATIENCE_S):
        if len(node.shown(a)) >= shareable(new):
            break
    assert_computed(b, new)
    write(writing, b, way, "7")
    share_again(writing)
    node.reset(b)  # or vLLM would find its own blocks
    node.wait_joined(a, b)
    assert_computed(b, (*of_a, 2))
    with observe(node, b) as seen:
        assert_bit_equal(ask_both(node, a, b, [last]))
    seen.assert_imported(shareable(last))
    if way == "write_unseen":
        assert node.counted(a)["weights_written"] == node.counted(b)["weights_written"] == 1
    for engine in (a, b):
        write(writing, engine, "write_weights", "")
    share_again(writing)


def test_a_call_that_only_reads_leaves_everything_shared(writing: Pair) -> None:
    node, a, b = writing
    (prompt,) = prompts(1, seed=520)
    with node.sharing(a, shareable(prompt)):
        a.complete(prompt)
    epoch = node.epoch(a)
    call(a, "tell")
    with observe(node, b) as seen:
        b.complete(prompt)
    seen.assert_imported(shareable(prompt))
    assert node.epoch(a) == epoch
    assert not a.said("tell of all ranks may write")


CALLS = {
    "sleep": ("/sleep?level=1", "/wake_up"),
    "sleep, and wake one by one": (
        "/sleep?level=2",
        "/wake_up?tags=kv_cache",
        "/wake_up?tags=weights",
    ),
    "pause": ("/pause", "/resume"),
}
"""vLLM's CPU worker ignores a sleep and says so; all else is as on a GPU."""


@pytest.mark.parametrize("way", CALLS)
def test_an_engine_that_slept_or_paused_shares_again(writing: Pair, way: str) -> None:
    node, a, b = writing
    before, after = prompts(2, seed=540 + list(CALLS).index(way))
    with node.sharing(a, shareable(before)):
        a.complete(before)
    epoch = node.epoch(a)
    for call_ in CALLS[way]:
        a.request(call_, post=True)
        assert node._epoch(a) is None, "it ends with the first call, and none begins between them"
    assert_computed(b, (*before, 1))
    begin_epoch(writing, a)
    assert node.epoch(a) != epoch
    node.wait_joined(a, b)
    with observe(node, b) as seen:
        assert_bit_equal(ask_both(node, a, b, [after]))
    seen.assert_imported(shareable(after))


UPDATES = ("start_weight_update", "update_weights", "reload_weights")


@pytest.mark.parametrize("method", UPDATES)
def test_updates_of_weights_end_what_is_shared_whatever_comes_of_them(
    writing: Pair, method: str
) -> None:
    """Without a transfer from a trainer vLLM refuses the first two, and reads the third's files."""
    node, a, b = writing
    before, after = prompts(2, seed=570 + UPDATES.index(method))
    with node.sharing(a, shareable(before)):
        a.complete(before)
    arguments = ("{}",) if method == "update_weights" else ()
    with contextlib.suppress(urllib.error.HTTPError):
        call(a, method, *arguments)
    assert_computed(b, (*before, 1))
    begin_epoch(writing, a)
    node.wait_joined(a, b)
    with observe(node, b) as seen:
        assert_bit_equal(ask_both(node, a, b, [after]))
    seen.assert_imported(shareable(after))
