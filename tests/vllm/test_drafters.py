"""Engines that draft share like others: imports equal local hits bit for bit, what is drafted
behind an import is what is drafted behind a local hit, and only tokens that stayed are shared.

Two servers go through all drafters, each with an engine of one drafter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from completions import Result
from local_node import Engine, wait_until
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair
from .drafters import DRAFTERS, Drafter
from .engines import PATIENCE_S, SharedNode
from .families import FEW_TOKENS, WINDOW
from .oracle import Prompt, random_prompt
from .test_families import servers, tell, wrong

__all__ = ["servers"]

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

ANSWER = 12


class Shared(NamedTuple):
    """Two engines of one drafter that share."""

    drafter: Drafter
    group: int
    """The KV cache group of the drafter's layers; 0 if it has none."""
    node: SharedNode
    a: Engine
    b: Engine


def each(drafter: Drafter) -> Any:
    """Of what is nightly other tests show the same: of windows test_longest_prefix.py, of drafts
    without layers test_contents_drafts.py, and EAGLE what EAGLE-3 does."""
    marks = [pytest.mark.nightly] if drafter.nightly else []
    return pytest.param(drafter, marks=marks, id=f"{drafter.family.name}-{drafter.method}")


@pytest.fixture(scope="module", params=map(each, DRAFTERS))
def shared(
    request: pytest.FixtureRequest, servers: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    drafter, (node, *engines) = request.param, servers
    arguments = drafter.arguments(tmp_path_factory.mktemp("drafter"))
    arguments["num_gpu_blocks_override"] = len(drafter.family.groups) * 2 * FEW_TOKENS // BLOCK_SIZE
    begin = {"arguments": arguments, "environment": dict(drafter.family.environment)}
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda engine: tell(engine, "/begin", **begin), engines))
    try:
        for cache in made:
            assert tuple(map(tuple, cache["groups"])) == drafter.family.groups
            assert cache["drafting"].count(True) == drafter.has_layers
            assert cache["shares"], f"kvshm has refused {drafter.method}"
        node.wait_joined(*engines)
        group = made[0]["drafting"].index(True) if drafter.has_layers else 0
        yield Shared(drafter, group, *servers)
    finally:
        for engine in engines:
            tell(engine, "/end")
        for _ in wait_until("nothing of the engines is left", PATIENCE_S):
            if not node.sockets():
                break


class Drafted(NamedTuple):
    """An answer and how it came about."""

    answer: Result
    drafts: list[Any]
    accepted: int
    """How many of the drafts were right."""


def drafted(engine: Engine, prompt: Prompt, **options: Any) -> Drafted:
    tell(engine, "/drafts")
    before = accepted(engine)
    answer = engine.complete(prompt, max_tokens=ANSWER, **options)
    return Drafted(answer, tell(engine, "/drafts")["drafts"], accepted(engine) - before)


def accepted(engine: Engine) -> int:
    name = "vllm:spec_decode_num_accepted_tokens_total{"
    return int(sum(value for key, value in engine.metrics().items() if key.startswith(name)))


def share(shared: Shared, prompt: Prompt, **options: Any) -> tuple[Drafted, Drafted]:
    """``a`` has computed the prompt: what ``b`` says, which imports it, and what ``a`` does."""
    _, _, node, a, b = shared
    with observe(node, b) as seen:
        imported = drafted(b, prompt, **options)
    with observe(node, a) as own:
        local = drafted(a, prompt, **options)
    assert own.tokens.imported == 0
    assert seen.tokens.imported == own.tokens.local_hit > 0
    assert seen.tokens.local_hit == 0
    assert seen.mismatched == 0
    return imported, local


def compute(shared: Shared, prompt: Prompt, max_tokens: int, **options: Any) -> Result:
    """Let ``a`` compute a prompt, and wait until ``b`` knows.  What a step has computed is shown
    when the next one has ended, and these engines make none without a request."""
    with shared.node.sharing(shared.a, len(shared.drafter.family.groups)):
        return shared.a.complete(prompt, max_tokens, **options)


def test_an_import_is_drafted_for_and_answered_as_a_local_hit(shared: Shared) -> None:
    """Greedily: with drafts vLLM's CPU build answers one seed otherwise each time."""
    for i, tokens in enumerate((4 * BLOCK_SIZE + 1, 593)):
        prompt = random_prompt(9700 + i, tokens)
        compute(shared, prompt, 5)
        imported, local = share(shared, prompt)
        assert imported == local
        assert imported.drafts or not shared.drafter.has_layers


def test_what_was_decoded_with_drafts_is_shared(shared: Shared) -> None:
    """Of drafts that were refused nothing stays."""
    # Engines are made once for all tests of a drafter; the other drafters have this one, too.
    if any(kind == WINDOW for kind, _ in shared.drafter.family.groups):
        pytest.skip("nothing to import: vLLM keeps no window in the middle of an answer")
    prompt = random_prompt(9710, 2 * BLOCK_SIZE + 100)
    story = compute(shared, prompt, 50, temperature=0.7, seed=3)
    imported, local = share(shared, (*prompt, *story.tokens))
    assert imported == local


def test_a_wrong_block_of_the_drafters_layers_is_noticed(shared: Shared) -> None:
    """By what is drafted, not by the answer."""
    # As above; this drafter is here for what its drafts do to blocks.
    if not shared.drafter.has_layers:
        pytest.skip("this drafter has no layers whose blocks could be wrong")
    prompt = random_prompt(9720, 700)
    compute(shared, prompt, 5)
    with wrong(shared.b, shared.group, "drafts"):
        imported, local = share(shared, prompt)
    assert imported.drafts != local.drafts
    assert imported.answer.tokens == local.answer.tokens
