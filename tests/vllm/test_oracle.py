"""Imports are bit-equal to local hits, and the test that says so notices every wrong copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from local_node import Engine, EngineSpec
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair
from .engines import reported
from .oracle import agreement, ask_both, assert_bit_equal, prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

FAULTS = WRONG_BLOCK, ZERO, SHIFT = ("wrong-block", "zero", "shift")


def test_imports_equal_local_hits_bit_for_bit(each_pair: Pair) -> None:
    sent = list(prompts(32, seed=1))
    blocks = sum(shareable(p) for p in sent)
    with observe(each_pair.node, each_pair.b) as seen:
        answers = ask_both(each_pair.node, each_pair.a, each_pair.b, sent)
    assert_bit_equal(answers)
    seen.assert_imported(blocks)
    assert seen.tokens.computed == sum(map(len, sent)) - blocks * BLOCK_SIZE
    assert all(len(a.imported.tokens) == 16 for a in answers)
    assert len({a.imported.tokens for a in answers}) > len(answers) // 2, "the model is blind"
    reported.append(f"oracle: {agreement(answers)}")


def test_an_import_stays_and_is_hit_like_any_other_prefix(each_pair: Pair) -> None:
    (prompt,) = prompts(1, seed=2)
    answers = ask_both(each_pair.node, each_pair.a, each_pair.b, [prompt])
    with observe(each_pair.node, each_pair.b) as seen:
        again = each_pair.b.complete(prompt)
    assert again == answers[0].imported == answers[0].local_hit
    assert seen.tokens.local_hit == shareable(prompt) * BLOCK_SIZE
    assert seen.tokens.imported == 0


def spoiled(like: Engine, fault: str, *, verify: str = "0", core: int) -> EngineSpec:
    """An importer that copies wrongly.  A consumer: what it copies must not reach the other
    engines of the session."""
    environment = {"KVSHM_FAULT": fault, "KVSHM_ROLE": "consumer", "KVSHM_VERIFY": verify}
    return replace(
        like.spec, name=f"{fault}-{verify}", core=core, num_blocks=512, environment=environment
    )


@contextmanager
def importers(pair: Pair, *specs: EngineSpec) -> Iterator[list[Engine]]:
    """Two at a time: to start both takes less than twice as long, and all would fill 24 GB."""
    left_by_a_failure = [e for e in pair.node.engines if e not in (pair.a, pair.b)]
    pair.node.stop_engines(*left_by_a_failure)
    engines = pair.node.start_engines(*specs)
    pair.node.wait_joined(pair.a, *engines)
    yield engines
    pair.node.stop_engines(*engines)


def assert_noticed(pair: Pair, blind: Engine, seed: int) -> None:
    """The oracle goes red for every prompt of an engine that imports without verification."""
    sent = list(prompts(4, seed))
    with observe(pair.node, blind) as seen:
        answers = ask_both(pair.node, pair.a, blind, sent)
    assert seen.imported_blocks == sum(shareable(p) for p in sent)
    with pytest.raises(AssertionError, match="4 of 4 imports differ"):
        assert_bit_equal(answers)


def assert_turned_into_a_miss(pair: Pair, careful: Engine, seed: int) -> None:
    """For one fault here: a checksum notices each of them (tests/conformance/test_transport.py)."""
    (prompt,) = prompts(1, seed)
    with observe(pair.node, careful) as seen:
        (answers,) = ask_both(pair.node, pair.a, careful, [prompt])
    assert seen.mismatched == shareable(prompt)
    assert seen.verified == seen.imported_blocks == 0
    assert seen.tokens.computed == len(prompt)
    assert answers.imported == answers.computed, "recomputed from the first token on"


def test_the_oracle_notices_another_block_and_zeros(each_pair: Pair) -> None:
    specs = [spoiled(each_pair.a, WRONG_BLOCK, core=0), spoiled(each_pair.a, ZERO, core=1)]
    with importers(each_pair, *specs) as (wrong_block, zero):
        assert_noticed(each_pair, wrong_block, seed=10)
        assert_noticed(each_pair, zero, seed=11)


def test_verification_notices_another_block(each_pair: Pair) -> None:
    spec = spoiled(each_pair.a, WRONG_BLOCK, verify="1", core=1)
    with importers(each_pair, spec) as (careful,):
        assert_turned_into_a_miss(each_pair, careful, seed=20)


def test_every_fault_is_one_the_engines_know() -> None:
    """kvshm ships no other faults.  test_pair.py has the oracle notice ``SHIFT``."""
    from kvshm.config import Fault

    assert {fault.value for fault in Fault} == set(FAULTS)


def test_the_oracle_compares_every_bit(each_pair: Pair) -> None:
    """Two local hits are equal in all bits on either engine: what the oracle rests on."""
    (prompt,) = prompts(1, seed=3)
    hits = [engine.complete(prompt) for engine in (each_pair.a, each_pair.b) for _ in range(3)]
    assert hits[1] == hits[2] == hits[4] == hits[5]
