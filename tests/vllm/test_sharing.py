"""What two real engines share, seen from outside: tokens not computed, answers unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from local_node import Engine, EngineSpec, wait_until
from sharing_node import BLOCK_SIZE, observe
from tiny_model import write_model

from kvshm import _native

from .conftest import Pair
from .engines import PATIENCE_S, has_loaded, lines_naming_kvshm
from .oracle import Prompt, ask_both, assert_bit_equal, prompts, random_prompt, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

OFFICIAL = {
    "kv_connector": "KvshmConnector",
    "kv_connector_module_path": "kvshm.hooks.connector",
    "kv_role": "kv_both",
}
CHUNK = 256
STEP_TOKENS = 2048
"""What an engine of the pair computes in a step at most: vLLM's default on a CPU."""


@pytest.mark.parametrize("importer", ["a", "b"])
def test_either_engine_imports_from_the_other(pair: Pair, importer: str) -> None:
    to, from_ = (pair.a, pair.b) if importer == "a" else (pair.b, pair.a)
    sent = list(prompts(3, seed=30 + ord(importer)))
    with observe(pair.node, to) as seen:
        answers = ask_both(pair.node, from_, to, sent)
    assert_bit_equal(answers)
    seen.assert_imported(sum(map(shareable, sent)))
    assert seen.tokens.computed == sum(map(len, sent)) - seen.tokens.imported


def test_decoded_blocks_are_shared_like_prompts(pair: Pair) -> None:
    prompt = random_prompt(40, BLOCK_SIZE + 20)
    # The last token was sampled, not computed: its KV exists nowhere yet.
    with pair.node.sharing(pair.a, (len(prompt) + 300 - 1) // BLOCK_SIZE):
        story = pair.a.complete(prompt, max_tokens=300)
    continued = (*prompt, *story.tokens)
    assert shareable(continued) > shareable(prompt) + 1
    with observe(pair.node, pair.b) as seen:
        imported = pair.b.complete(continued)
    seen.assert_imported(shareable(continued))
    assert imported == pair.a.complete(continued)


@pytest.mark.parametrize(("beyond", "blocks"), [(0, 2), (1, 3), (BLOCK_SIZE - 1, 3)])
def test_the_last_token_is_always_computed(pair: Pair, beyond: int, blocks: int) -> None:
    prompt = random_prompt(50 + beyond, 3 * BLOCK_SIZE + beyond)
    with observe(pair.node, pair.b) as seen:
        (answers,) = ask_both(pair.node, pair.a, pair.b, [prompt])
    seen.assert_imported(blocks)
    assert seen.tokens.computed == len(prompt) - blocks * BLOCK_SIZE >= 1
    assert_bit_equal([answers])


def test_a_part_of_a_longer_entry_hits(pair: Pair) -> None:
    """A stored prefix plus tokens that it shares with a longer entry, and the prefix with
    tokens of its own: both hit what they have in common with the entry."""
    stored = random_prompt(60, 5 * BLOCK_SIZE + 30)
    with pair.node.sharing(pair.a, 5):
        pair.a.complete(stored)
    part = stored[: 3 * BLOCK_SIZE + 50]
    with observe(pair.node, pair.b) as seen:
        imported = pair.b.complete(part)
    seen.assert_imported(3)
    assert imported == pair.a.complete(part)

    branch = stored[: 4 * BLOCK_SIZE + 50] + random_prompt(61, 200)
    with observe(pair.node, pair.b) as seen:
        pair.b.complete(branch)
    seen.assert_imported(1)
    assert seen.tokens.local_hit == 3 * BLOCK_SIZE


def test_what_was_imported_is_shared_on(pair: Pair) -> None:
    """The importer publishes an imported block too, so a third engine may take it from either."""
    (prompt,) = prompts(1, seed=62)
    with pair.node.sharing(pair.b, shareable(prompt)):
        ask_both(pair.node, pair.a, pair.b, [prompt])
    assert len(pair.node.shown(pair.b)) >= shareable(prompt)


def test_requests_at_the_same_time_import_a_prefix_once(pair: Pair) -> None:
    """All others together do not fill a step: a request that would lose its turn copies its prefix
    itself (test_twins.py)."""
    ask_both(pair.node, pair.a, pair.b, prompts(1, seed=64))  # b has attached a's cache
    blocks, each = 3, 4
    sent = [random_prompt(seed, blocks * BLOCK_SIZE + 40) for seed in (65, 66)]
    assert each * len(sent[0]) < STEP_TOKENS
    with pair.node.sharing(pair.a, blocks * len(sent)):
        for prompt in sent:
            pair.a.complete(prompt)
    with observe(pair.node, pair.b) as seen, ThreadPoolExecutor(8) as pool:
        list(pool.map(pair.b.complete, each * sent))
    seen.assert_imported(blocks * len(sent))


def test_metrics_of_the_node_say_what_vllm_says(pair: Pair) -> None:
    """``kvshm metrics`` reads shared memory, vLLM what its scheduler's steps report."""
    ask_both(pair.node, pair.a, pair.b, list(prompts(2, seed=66)))
    ask_both(pair.node, pair.b, pair.a, list(prompts(1, seed=67)))
    names = ("imported_tokens", "imported_blocks", "loads")
    reported: dict[str, dict[str, int]] = {}
    for _ in wait_until("vLLM has heard of the same imports", PATIENCE_S):
        reported = {name: sums_by_engine(pair, name) for name in names}
        if all(sorted(reported[n].values()) == vllm_says(pair, n) for n in names):
            break
    assert min(reported["imported_tokens"].values()) > 0
    assert len(reported["imported_tokens"]) == 2


def sums_by_engine(pair: Pair, name: str) -> dict[str, int]:
    """What ``kvshm metrics`` says of a counter: of each engine of the pair."""
    place = ("--run-dir", str(pair.node.run_dir), "--namespace", pair.node.namespace)
    command = [sys.executable, "-m", "kvshm.tools.cli", "metrics", "--json", *place]
    said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    sums: Counter[str] = Counter()
    for sample in said[f"kvshm_{name}_total"]["samples"]:
        assert sample["labels"]["model"] == str(pair.a.spec.model)
        sums[sample["labels"]["engine"]] += sample["value"]
    return dict(sums)


def vllm_says(pair: Pair, name: str) -> list[int]:
    """The same from the metrics pages of both engines, the smaller number first."""
    begin = f"vllm:kvshm_{name}_total{{"
    pages = (engine.metrics().items() for engine in (pair.a, pair.b))
    return sorted(int(sum(v for name, v in page if name.startswith(begin))) for page in pages)


# -- engines started when the two others have served for a while, with the official setting
#    instead of the environment variable


FEW = 25
"""Blocks of a small cache, of which vLLM keeps one for itself."""


class Later(NamedTuple):
    """Two engines that joined when there was something to find."""

    late: Engine
    """Prefills in small chunks."""
    priority: Engine
    """Schedules by priority in a small cache, and wants a failed load to fail its request."""


@pytest.fixture(scope="module")
def later(pair: Pair, model: Path) -> Iterator[Later]:
    """Both are activated by --kv-transfer-config, and start at a time."""
    transfer = "--kv-transfer-config"
    chunked = (transfer, json.dumps(OFFICIAL), "--max-num-batched-tokens", str(CHUNK))
    failing = json.dumps({**OFFICIAL, "kv_load_failure_policy": "fail"})
    ordered = (
        transfer,
        failing,
        "--scheduling-policy",
        "priority",
        *EngineSpec.longest_prompt(2560),
    )
    off, misspelt = {"KVSHM_ENABLE": ""}, {"KVSHM_ROL": "both"}
    with pair.node.sharing(pair.a, shareable(EARLY)):
        pair.a.complete(EARLY)
    engines = pair.node.start_engines(
        EngineSpec("late", model, 1, arguments=chunked, environment=off),
        EngineSpec("priority", model, 0, FEW, arguments=ordered, environment=off | misspelt),
    )
    pair.node.wait_joined(pair.a, pair.b, *engines)
    yield Later(*engines)
    pair.node.stop_engines(*engines)


@pytest.fixture
def late(later: Later) -> Engine:
    return later.late


EARLY = random_prompt(70, 4 * BLOCK_SIZE + 40)


def test_an_engine_that_joins_late_finds_what_is_there(pair: Pair, late: Engine) -> None:
    with observe(pair.node, late) as seen:
        imported = late.complete(EARLY)
    seen.assert_imported(shareable(EARLY))
    assert imported == pair.a.complete(EARLY)


def test_what_a_preempted_request_has_imported_and_computed_is_shared(
    pair: Pair, later: Later
) -> None:
    """It has five blocks, and the other one's answer would need the last of twenty."""
    engine = later.priority
    low, other = random_prompt(311, 4 * BLOCK_SIZE - 20), random_prompt(312, 19 * BLOCK_SIZE - 6)
    with pair.node.sharing(pair.a, shareable(low)):
        local = pair.a.complete(low)
    before = engine.metrics()

    def grown(name: str) -> float:
        return sum(v - before.get(k, 0) for k, v in engine.metrics().items() if k.startswith(name))

    with observe(pair.node, engine) as seen, ThreadPoolExecutor(1) as pool:
        begun = pool.submit(engine.complete, low, max_tokens=120, priority=1)
        for _ in wait_until("it has its fifth block", PATIENCE_S):
            if grown("vllm:generation_tokens_total") > 21:
                break
        engine.complete(other, max_tokens=20)
        resumed = begun.result()
    assert grown("vllm:num_preemptions_total") > 0
    assert seen.imported_blocks >= shareable(low)
    assert resumed.tokens[0] == local.tokens[0]  # those behind it may be computed in other batches
    whole = (*low, *resumed.tokens)
    with observe(pair.node, pair.b) as seen:
        imported = pair.b.complete(whole)
    seen.assert_imported(shareable(whole))  # the last block is nowhere else
    assert imported == engine.complete(whole)


def test_priority_scheduling_shares_and_the_policy_is_overridden(pair: Pair, later: Later) -> None:
    engine = later.priority
    sent = list(prompts(1, seed=301))
    with observe(pair.node, engine) as seen:
        assert_bit_equal(ask_both(pair.node, pair.a, engine, sent))
    seen.assert_imported(shareable(sent[0]))
    assert len(pair.node.shown(engine)) >= shareable(sent[0])
    assert len(engine.said("kv_load_failure_policy=fail overridden with recompute")) == 1
    assert len(engine.said("did you mean KVSHM_ROLE?")) == 1
    pair.node.stop_engines(engine)


def test_chunks_of_a_prefill_are_shared(pair: Pair, late: Engine) -> None:
    prompt = random_prompt(71, 7 * BLOCK_SIZE + 45)
    assert len(prompt) > 3 * CHUNK
    with observe(pair.node, pair.b) as seen:
        answers = ask_both(pair.node, late, pair.b, [prompt])
    seen.assert_imported(shareable(prompt))
    assert_bit_equal(answers)


def test_equal_block_ids_of_two_engines_never_mix(pair: Pair, late: Engine) -> None:
    """Two caches hold different prefixes under the same block ids at the same addresses."""
    node, owners = pair.node, (pair.a, pair.b)
    for engine in owners:
        node.reset(engine)
    node.wait_joined(*owners, late)
    sent: list[tuple[Engine, Prompt]] = []
    # Where a cache puts a block depends on its past: go on until five ids are in use in both.
    while len(_ids(pair, pair.a) & _ids(pair, pair.b)) < 5:
        for engine in owners:
            (prompt,) = prompts(1, seed=1000 + len(sent))
            with node.sharing(engine, shareable(prompt)):
                engine.complete(prompt)
            sent.append((engine, prompt))
    with observe(node, late) as seen, ThreadPoolExecutor(2) as pool:
        list(pool.map(late.complete, [prompt for _, prompt in sent]))
    seen.assert_imported(sum(shareable(prompt) for _, prompt in sent))
    # Asked again, one by one: two requests in one batch may round otherwise than one alone.
    for engine, prompt in sent:
        assert late.complete(prompt) == engine.complete(prompt)


def test_an_exporter_killed_leaves_nothing_but_misses(pair: Pair, late: Engine) -> None:
    """The last test of the late engine: afterwards there is none."""
    node = pair.node
    used, unused = prompts(2, seed=120)
    with node.sharing(late, shareable(used) + shareable(unused)):
        late.complete(used)
        late.complete(unused)
    with observe(node, pair.b) as seen:
        imported = pair.b.complete(used)
    seen.assert_imported(shareable(used))
    assert imported == late.complete(used)

    node.kill(late)
    with observe(node, pair.b) as seen:
        own = pair.b.complete(unused)
    assert seen.tokens.imported == 0
    # Not by the dead engine, whose small chunks round otherwise.
    assert own == pair.a.complete(unused, kv_transfer_params={"kvshm": {"share": False}})
    with observe(node, pair.b) as seen:
        assert pair.b.complete(used) == imported
    assert seen.tokens.local_hit == shareable(used) * BLOCK_SIZE


def _ids(pair: Pair, engine: Engine) -> set[int]:
    return {block_id for block_id, _ in pair.node.shown(engine)}


def test_reset_prefix_cache_withdraws_everything(pair: Pair) -> None:
    (prompt,) = prompts(1, seed=80)
    with pair.node.sharing(pair.a, shareable(prompt)):
        computed = pair.a.complete(prompt)
    pair.node.reset(pair.a)
    pair.node.wait_joined(pair.a, pair.b)
    assert not pair.node.shown(pair.a)
    with observe(pair.node, pair.b) as seen:
        own = pair.b.complete(prompt)
    assert seen.tokens.imported == 0
    assert own == computed
    (other,) = prompts(1, seed=81)
    with observe(pair.node, pair.b) as seen:
        assert_bit_equal(ask_both(pair.node, pair.a, pair.b, [other]))
    seen.assert_imported(shareable(other))


class Apart(NamedTuple):
    """Two engines that share with no one: of other weights, and without the switch."""

    other_weights: Engine
    plain: Engine


@pytest.fixture(scope="module")
def apart(pair: Pair, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """Both started at a time, which takes less than twice as long."""
    other = write_model(tmp_path_factory.mktemp("other"), seed=1)
    engines = pair.node.start_engines(
        EngineSpec("other-weights", other, core=0),
        EngineSpec("plain", model, core=1, environment={"KVSHM_ENABLE": ""}),
    )
    yield Apart(*engines)
    pair.node.stop_engines(*engines)


def test_other_weights_are_refused_by_name(pair: Pair, apart: Apart) -> None:
    other = apart.other_weights
    (prompt,) = prompts(1, seed=90)
    with pair.node.sharing(pair.a, shareable(prompt)):
        ours = pair.a.complete(prompt)
    for _ in wait_until("the engine learns why it is alone", PATIENCE_S):
        if "cannot share with this one: weights is " in other.log():
            break
    with observe(pair.node, other) as seen:
        theirs = other.complete(prompt)
    assert seen.tokens.imported == 0
    assert seen.tokens.computed == len(prompt)
    assert theirs.tokens != ours.tokens


def test_vllm_without_the_switch_is_untouched(pair: Pair, apart: Apart) -> None:
    """The plugin is installed, KVSHM_ENABLE is not set: vLLM as it is, bit for bit."""
    plain = apart.plain
    sent = list(prompts(4, seed=95))
    for prompt in sent:
        with pair.node.sharing(pair.a, shareable(prompt)):
            computed = pair.a.complete(prompt)
        assert plain.complete(prompt) == computed
        assert plain.complete(prompt) == pair.a.complete(prompt)
    assert plain.prompt_tokens().imported == 0
    assert not [line for line in lines_naming_kvshm(plain.log()) if "plugins" not in line]
    assert any(has_loaded(pid, _native.__file__) for pid in pair.a.processes())
    assert not any(has_loaded(pid, _native.__file__) for pid in plain.processes())
    assert not pair.node.owned(plain)
    owned = set().union(*map(pair.node.owned, pair.node.engines))
    assert set(pair.node.sockets()) == owned
