"""Imports are bit-equal to local hits, and the test that says so notices every wrong copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_node import Engine, EngineSpec
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair
from .engines import reported
from .oracle import agreement, ask_both, assert_bit_equal, prompts, shareable

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FAULTS = ("wrong-block", "zero", "shift")


def test_imports_equal_local_hits_bit_for_bit(pair: Pair) -> None:
    sent = list(prompts(32, seed=1))
    blocks = sum(shareable(p) for p in sent)
    with observe(pair.node, pair.b) as seen:
        answers = ask_both(pair.node, pair.a, pair.b, sent)
    assert_bit_equal(answers)
    seen.assert_imported(blocks)
    assert seen.tokens.computed == sum(map(len, sent)) - blocks * BLOCK_SIZE
    assert all(len(a.imported.tokens) == 16 for a in answers)
    assert len({a.imported.tokens for a in answers}) > len(answers) // 2, "the model is blind"
    reported.append(f"oracle: {agreement(answers)}")


def test_an_import_stays_and_is_hit_like_any_other_prefix(pair: Pair) -> None:
    (prompt,) = prompts(1, seed=2)
    answers = ask_both(pair.node, pair.a, pair.b, [prompt])
    with observe(pair.node, pair.b) as seen:
        again = pair.b.complete(prompt)
    assert again == answers[0].imported == answers[0].local_hit
    assert seen.tokens.local_hit == shareable(prompt) * BLOCK_SIZE
    assert seen.tokens.imported == 0


Faulty = tuple[str, Engine, Engine]


@pytest.fixture(scope="module", params=FAULTS)
def faulty(request: pytest.FixtureRequest, pair: Pair, model: Path) -> Iterator[Faulty]:
    """Two importers that copy wrongly: one does not verify, the other does."""

    def spec(verify: str) -> EngineSpec:
        # Consumers: what they copy wrongly must not reach the other engines of the session.
        settings = {"KVSHM_FAULT": request.param, "KVSHM_ROLE": "consumer"}
        name = f"{request.param}-{verify}"
        environment = {**settings, "KVSHM_VERIFY": verify}
        return EngineSpec(name, model, core=int(verify), environment=environment)

    blind, careful = pair.node.start_engines(spec("0"), spec("1"))
    pair.node.wait_joined(pair.a, blind, careful)
    yield request.param, blind, careful
    pair.node.stop_engines(blind, careful)


def test_the_oracle_notices_a_wrong_copy(pair: Pair, faulty: Faulty) -> None:
    fault, blind, _ = faulty
    sent = list(prompts(4, seed=10 + FAULTS.index(fault)))
    with observe(pair.node, blind) as seen:
        answers = ask_both(pair.node, pair.a, blind, sent)
    assert seen.tokens.imported == sum(shareable(p) for p in sent) * BLOCK_SIZE
    with pytest.raises(AssertionError, match="4 of 4 imports differ"):
        assert_bit_equal(answers)


def test_verification_turns_a_wrong_copy_into_a_miss(pair: Pair, faulty: Faulty) -> None:
    fault, _, careful = faulty
    (prompt,) = prompts(1, seed=20 + FAULTS.index(fault))
    with observe(pair.node, careful) as seen:
        (answers,) = ask_both(pair.node, pair.a, careful, [prompt])
    assert seen.mismatched == shareable(prompt)
    assert seen.verified == seen.imported_blocks == 0
    assert seen.tokens.computed == len(prompt)
    assert answers.imported == answers.computed, "recomputed from the first token on"


def test_every_fault_is_one_the_engines_know() -> None:
    """The three faults above are all that kvshm ships."""
    from kvshm.config import Fault

    assert {fault.value for fault in Fault} == set(FAULTS)


def test_the_oracle_compares_every_bit(pair: Pair) -> None:
    """Two local hits are equal in all bits on either engine: what the oracle rests on."""
    (prompt,) = prompts(1, seed=3)
    hits = [engine.complete(prompt) for engine in (pair.a, pair.b) for _ in range(3)]
    assert hits[1] == hits[2] == hits[4] == hits[5]
