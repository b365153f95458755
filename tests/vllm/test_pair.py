"""One pair of engines of each kind, in every `make test`: imports are right to the bit, a wrong
copy would be noticed, a client's refusal is obeyed, and a death costs misses.  `make test-all`
shows the rest.

One of the two copies wrongly, without verification, so that its imports show that the oracle can
go red.  What it computes is right: what the other imports from it is what the oracle has to pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sharing_node import BLOCK_SIZE, observe

from ..engines_under_test import ENGINES
from .conftest import Pair
from .engines import SharedNode
from .oracle import ask_both, assert_bit_equal, prompts, random_prompt, shareable
from .test_oracle import SHIFT, assert_noticed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLIND = {"KVSHM_FAULT": SHIFT, "KVSHM_VERIFY": "0"}


@pytest.fixture(scope="module", params=ENGINES)
def uneven(model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The second engine copies wrongly and does not notice."""
    spec = ENGINES[request.param]
    with SharedNode() as node:
        node.start_coordinator()
        engines = node.start_engines(
            spec("sound", model, core=0),
            spec("blind", model, core=1, environment=BLIND),
        )
        node.wait_joined(*engines)
        yield Pair(node, *engines)


def test_imports_equal_local_hits_bit_for_bit(uneven: Pair) -> None:
    node, importer, exporter = uneven
    sent = list(prompts(6, seed=800))
    blocks = sum(map(shareable, sent))
    with observe(node, importer) as seen:
        answers = ask_both(node, exporter, importer, sent)
    assert_bit_equal(answers)
    assert seen.imported_blocks == blocks
    assert seen.tokens.imported == seen.loaded["imported_tokens"] == blocks * BLOCK_SIZE
    assert len({a.imported.tokens for a in answers}) > len(answers) // 2, "the model is blind"


def test_the_oracle_notices_a_wrong_copy(uneven: Pair) -> None:
    assert_noticed(uneven, uneven.b, seed=810)


@pytest.mark.parametrize("uneven", ["vllm"], indirect=True)
def test_a_request_stays_out_by_what_its_client_says(uneven: Pair) -> None:
    node, sharing, other = uneven
    unshared, shared = random_prompt(302, 400), random_prompt(303, 400)
    before = node.shown(sharing)
    sharing.complete(unshared, kv_transfer_params={"kvshm": {"share": False}})
    with node.sharing(sharing, shareable(shared)):
        sharing.complete(shared)
    assert len(node.shown(sharing) - before) == shareable(shared)
    tokens = other.prompt_tokens()
    other.complete(shared, kv_transfer_params={"kvshm": {"share": False}})
    assert (other.prompt_tokens() - tokens).imported == 0


def test_an_exporter_killed_leaves_nothing_but_misses(uneven: Pair) -> None:
    """The last test of this pair: afterwards there is one engine."""
    node, importer, exporter = uneven
    used, unused = prompts(2, seed=820)
    with node.sharing(exporter, shareable(used) + shareable(unused)):
        exporter.complete(used)
        computed = exporter.complete(unused)
    with observe(node, importer) as seen:
        imported = importer.complete(used)
    assert seen.imported_blocks == shareable(used)
    assert imported == exporter.complete(used)

    node.kill(exporter)
    with observe(node, importer) as seen:
        assert importer.complete(unused) == computed
    assert seen.tokens.computed == len(unused)
    with observe(node, importer) as seen:
        assert importer.complete(used) == imported
    assert seen.tokens.local_hit == shareable(used) * BLOCK_SIZE
