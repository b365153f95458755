"""Whatever a request asks for, what it imports answers as a local hit does, bit for bit.

Here are the ways that real engines have to show.  Odd ids and salts, and clients that hang up, are
in test_client_texts.py, priorities in test_sharing.py, two API servers in test_environments.py,
aborts at each stage of an import in test_aborts.py, requests with a common prefix in test_twins.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sharing_node import BLOCK_SIZE, Observation, observe

from .conftest import Pair
from .oracle import Prompt, random_prompt, shareable
from .test_client_texts import Answer, ask, exchange

__all__ = ["exchange"]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("exchange"),
]

SAMPLED = {"temperature": 1.0, "seed": 11}
WORDS = ["ab", "cd", "ef"]
WAYS: dict[str, dict[str, Any]] = {
    "sampled with a seed": SAMPLED,
    "several answers": {"n": 3, **SAMPLED},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "a bias": {"logit_bias": {"7": 4.0, "900": 3.0}, "min_tokens": 3},
    "some tokens only": {"allowed_token_ids": list(range(100, 140))},
    "truncated sampling": {"top_k": 5, "top_p": 0.8, "min_p": 0.01, **SAMPLED},
    "a choice": {"structured_outputs": {"choice": WORDS}},
    "a regular expression": {"structured_outputs": {"regex": "[a-f]{12}"}, **SAMPLED},
    "a schema": {"structured_outputs": {"json": {"type": "object", "required": ["a"],
                 "properties": {"a": {"enum": WORDS}}, "additionalProperties": False}}},
    "beams": {"use_beam_search": True, "n": 3},
}  # fmt: skip
PROMPTS = {way: random_prompt(7000 + i, 3 * BLOCK_SIZE + 20) for i, way in enumerate(WAYS)}


def answers(answer: Answer) -> list[Any]:
    """All that the engine has computed."""
    assert answer.status == 200, answer
    return [
        (
            one["token_ids"],
            one["text"],
            one["finish_reason"],
            one["logprobs"],
            one.get("prompt_logprobs"),
        )
        for one in answer.said["choices"]
    ]


@pytest.fixture(scope="module")
def computed(pair: Pair) -> dict[str, Prompt]:
    """The prompts of all ways, which engine ``a`` has computed."""
    with pair.node.sharing(pair.a, sum(map(shareable, PROMPTS.values()))):
        for prompt in PROMPTS.values():
            pair.a.complete(prompt, max_tokens=1)
    return PROMPTS


def asked_both(
    pair: Pair, prompt: Prompt, asked: Mapping[str, Any]
) -> tuple[Observation, Any, Any]:
    """What was seen of ``b``'s import, its answers, and those of ``a``'s local hit."""
    with observe(pair.node, pair.b) as seen:
        imported = ask(pair.b, prompt, **{"max_tokens": 12, **asked})
    with observe(pair.node, pair.a) as local:
        hit = ask(pair.a, prompt, **{"max_tokens": 12, **asked})
    assert local.tokens.imported == 0
    return seen, answers(imported), answers(hit)


@pytest.mark.parametrize("way", WAYS)
def test_an_import_answers_as_a_local_hit(
    pair: Pair, computed: dict[str, Prompt], way: str
) -> None:
    prompt, asked = computed[way], WAYS[way]
    seen, imported, hit = asked_both(pair, prompt, asked)
    seen.assert_imported(shareable(prompt))
    assert imported == hit
    assert len(imported) == asked.get("n", 1)


def test_log_probabilities_of_a_prompt_need_all_of_it_computed(pair: Pair) -> None:
    """vLLM does not read its own cache for it either.  What it computes is shared as ever."""
    prompt, asked = random_prompt(7100, 3 * BLOCK_SIZE + 20), {"prompt_logprobs": 2}
    with pair.node.sharing(pair.a, shareable(prompt)):
        ask(pair.a, prompt, **asked)
    seen, computed, own = asked_both(pair, prompt, asked)
    assert (seen.tokens.imported, seen.tokens.local_hit) == (0, 0)
    assert computed == own

    prompt = random_prompt(7101, 3 * BLOCK_SIZE + 20)
    with pair.node.sharing(pair.a, shareable(prompt)):
        ask(pair.a, prompt, **asked)
    seen, imported, hit = asked_both(pair, prompt, {})
    seen.assert_imported(shareable(prompt))
    assert imported == hit
