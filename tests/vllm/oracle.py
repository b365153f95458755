"""The oracle: what an engine answers after an import must equal a local hit, bit for bit.

Inside one vLLM, computed and cached prefixes differ in rounding, while two cache hits of the
same prefix agree in every bit of every log-probability.  So an import is compared with a
local hit of the same prefix on an engine with the same number of threads; how often either
agrees with the computed answer is reported, not asserted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from completions import Result
from local_node import Engine
from sharing_node import BLOCK_SIZE

from .engines import SharedNode

Prompt = tuple[int, ...]
VOCABULARY = 1500


@dataclass(frozen=True)
class Answers:
    """What two engines said to one prompt."""

    computed: Result
    imported: Result
    local_hit: Result


def random_prompt(seed: int, tokens: int) -> Prompt:
    """Return ``tokens`` token ids; two seeds share no block."""
    drawn = random.Random(seed)
    return tuple(drawn.randrange(VOCABULARY) for _ in range(tokens))


def prompts(count: int, seed: int) -> Iterator[Prompt]:
    """Yield prompts of three to six full blocks and a tail of 1 to 60 tokens."""
    drawn = random.Random(seed)
    for i in range(count):
        tokens = drawn.randint(3, 6) * BLOCK_SIZE + drawn.randint(1, 60)
        yield random_prompt(1000 * seed + i, tokens)


def shareable(prompt: Sequence[int]) -> int:
    """Return how many blocks of a prompt a cache can give: whole ones, never the last token."""
    return (len(prompt) - 1) // BLOCK_SIZE


def ask_both(
    node: SharedNode,
    exporter: Engine,
    importer: Engine,
    asked: Iterable[Prompt],
    published: Callable[[Prompt], int] = shareable,
) -> list[Answers]:
    """Let the exporter compute every prompt, the importer import it, and the exporter hit it.
    ``published``: how many blocks of a prompt the exporter publishes at least."""
    sent = list(asked)
    with node.sharing(exporter, sum(map(published, sent))):
        computed = [exporter.complete(p) for p in sent]
    imported = [importer.complete(p) for p in sent]
    local = [exporter.complete(p) for p in sent]
    return [Answers(*three) for three in zip(computed, imported, local, strict=True)]


def assert_bit_equal(answers: Sequence[Answers]) -> None:
    """The oracle's verdict: every import equals the local hit in all tokens and bits."""
    differing = [i for i, a in enumerate(answers) if a.imported != a.local_hit]
    assert not differing, f"{len(differing)} of {len(answers)} imports differ: {differing}"


def agreement(answers: Sequence[Answers]) -> str:
    """Say how often imports, and vLLM's own local hits, agree with the computed answer."""
    count = len(answers)
    imports = sum(a.imported.tokens == a.computed.tokens for a in answers)
    local = sum(a.local_hit.tokens == a.computed.tokens for a in answers)
    bits = sum(a.imported == a.computed for a in answers)
    return (
        f"same tokens as computed: {imports} of {count} imports, {local} of {count} local hits; "
        f"{bits} imports equal the computed answer in every bit"
    )
