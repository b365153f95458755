"""Images are shared by what the model gets of them: equal ones whoever names them, others never,
though their placeholders or the names that clients give them are equal.  Real engines, whose models
lie in different folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from completions import Result
from local_node import Engine
from sharing_node import BLOCK_SIZE, observe

from .conftest import Pair
from .engines import SharedNode
from .oracle import Prompt, random_prompt
from .test_families import servers, tell, wrong
from .vision import IMAGE_TOKENS, image_token, write_vision

__all__ = ["servers"]

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]

BEFORE, AFTER = 200, 250
"""Tokens around an image, which begins in the second block and ends in the third."""
BEFORE_IMAGE = BEFORE // BLOCK_SIZE * BLOCK_SIZE
INTO_IMAGE = (BEFORE + IMAGE_TOKENS) // BLOCK_SIZE * BLOCK_SIZE
WHOLE = (BEFORE + IMAGE_TOKENS + AFTER - 1) // BLOCK_SIZE * BLOCK_SIZE
ALONE = {"kv_transfer_params": {"kvshm": {"share": False}}}


class Shared(NamedTuple):
    node: SharedNode
    a: Engine
    b: Engine
    placeholder: int
    kind: str

    def prompt(self, seed: int, after: int = 0) -> Prompt:
        """Text, an image, text; ``after``: another text behind the image."""
        text = random_prompt(seed, BEFORE + AFTER)
        behind = random_prompt(seed + after, BEFORE + AFTER)[BEFORE:]
        return (*text[:BEFORE], self.placeholder, *behind)

    def share(self, prompt: Prompt, picture: int, **options: Any) -> Result:
        """Have ``a`` compute and publish a prompt."""
        with self.node.sharing(self.a, WHOLE // BLOCK_SIZE):
            return self.a.complete(prompt, **{self.kind: [picture]}, **options)

    def imports(self, tokens: int, prompt: Prompt, picture: int, **options: Any) -> Result:
        """Have ``b`` import so many tokens of a prompt."""
        with observe(self.node, self.b) as seen:
            answer = self.b.complete(prompt, **{self.kind: [picture]}, **options)
        assert (seen.tokens.local_hit, seen.tokens.imported) == (0, tokens)
        assert seen.mismatched == 0
        return answer

    def hits(self, tokens: int, prompt: Prompt, picture: int, **options: Any) -> Result:
        """Have ``a`` hit so many tokens of a prompt in its own cache, and nobody else's."""
        with observe(self.node, self.a) as seen:
            answer = self.a.complete(prompt, **{self.kind: [picture]}, **ALONE, **options)
        assert (seen.tokens.local_hit, seen.tokens.imported) == (tokens, 0)
        return answer


@contextmanager
def sharing(servers: Pair, models: Sequence[Path], kind: str) -> Iterator[Shared]:
    """Have the servers make an engine each, of these models that get items of one ``kind``."""
    from transformers import AutoTokenizer

    node, *engines = servers

    def begin(engine: Engine, model: Path) -> dict[str, Any]:
        arguments = {"model": str(model), "num_gpu_blocks_override": 128}
        return tell(engine, "/begin", arguments=arguments, environment={})

    with ThreadPoolExecutor() as pool:
        made = list(pool.map(begin, engines, models))
    assert all(cache["shares"] for cache in made)
    node.wait_joined(*engines)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    yield Shared(*servers, image_token(len(tokenizer)), kind)
    for engine in engines:
        tell(engine, "/end")


@pytest.fixture(scope="module")
def shared(servers: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    models = [write_vision(tmp_path_factory.mktemp(name)) for name in ("one", "other")]
    with sharing(servers, models, "pictures") as pair:
        yield pair


def test_an_equal_image_is_imported_bit_for_bit(shared: Shared) -> None:
    """It lies wholly in the imported prefix, so the importer runs no encoder."""
    prompt = shared.prompt(9000)
    for picture in (1, 2):
        if picture == 1:
            shared.share(prompt, picture)
        else:  # the text before the image is published already
            with shared.node.sharing(shared.a, (WHOLE - BEFORE_IMAGE) // BLOCK_SIZE):
                shared.a.complete(prompt, pictures=[picture])
    first = shared.imports(WHOLE, prompt, 1)
    with observe(shared.node, shared.b) as seen:
        second = shared.b.complete(prompt, pictures=[2])
    assert (seen.tokens.local_hit, seen.tokens.imported) == (BEFORE_IMAGE, WHOLE - BEFORE_IMAGE)
    assert first == shared.hits(WHOLE, prompt, 1)
    assert second == shared.hits(WHOLE, prompt, 2)
    assert first.tokens != second.tokens, "the model is blind"


def test_an_import_may_end_within_an_image(shared: Shared) -> None:
    """The importer encodes the image for the rest."""
    shared.share(shared.prompt(9100), 1)
    other = shared.prompt(9100, after=1)
    imported = shared.imports(INTO_IMAGE, other, 1)
    assert imported == shared.hits(INTO_IMAGE, other, 1)


def test_another_image_at_equal_placeholders_is_never_imported(shared: Shared) -> None:
    prompt = shared.prompt(9200)
    shared.share(prompt, 1)
    imported = shared.imports(BEFORE_IMAGE, prompt, 2)
    assert imported == shared.hits(BEFORE_IMAGE, prompt, 2)


def test_what_a_client_calls_an_image_counts_for_nothing(shared: Shared) -> None:
    """vLLM answers for another image of the same name as for the first one; its blocks are shared
    as the first one's."""
    prompt = shared.prompt(9300)
    named = shared.share(prompt, 1, ids=["x"])
    assert shared.imports(BEFORE_IMAGE, prompt, 2, ids=["x"]) != named
    prompt = shared.prompt(9400)
    shared.share(prompt, 2, ids=["x"])  # vLLM takes it for the first
    with observe(shared.node, shared.b) as seen:
        second = shared.b.complete(prompt, pictures=[2], **ALONE)
    assert seen.tokens.imported == 0
    with observe(shared.node, shared.b) as seen:
        first = shared.b.complete(prompt, pictures=[1], ids=["y"])
    assert seen.tokens.imported == WHOLE - BEFORE_IMAGE
    assert first.tokens != second.tokens
    assert first == shared.hits(WHOLE, prompt, 1)


def test_a_wrong_block_of_an_image_is_noticed(shared: Shared) -> None:
    prompt = shared.prompt(9500)
    shared.share(prompt, 3)
    with wrong(shared.b, 0, "neighbours"):
        imported = shared.imports(WHOLE, prompt, 3)
    assert imported != shared.hits(WHOLE, prompt, 3)
