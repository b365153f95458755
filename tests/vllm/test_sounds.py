"""Sounds are shared as images are, by what the model gets of them.  Real engines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Pair
from .test_families import servers, tell, wrong
from .test_images import AFTER, BEFORE, BEFORE_IMAGE, WHOLE, Shared
from .vision import SOUND_TOKENS, image_token, write_hearing

__all__ = ["servers"]

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)]

assert (BEFORE + SOUND_TOKENS + AFTER - 1) // 128 * 128 == WHOLE, "it is as long as an image"


@pytest.fixture(scope="module")
def shared(servers: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    from transformers import AutoTokenizer

    node, *engines = servers
    model = write_hearing(tmp_path_factory.mktemp("hearing"))
    given: dict[str, Any] = {"model": str(model), "num_gpu_blocks_override": 128}
    with ThreadPoolExecutor() as pool:
        begin = {"arguments": given, "environment": {}}
        made = list(pool.map(lambda engine: tell(engine, "/begin", **begin), engines))
    assert all(cache["shares"] for cache in made)
    node.wait_joined(*engines)
    tokenizer = AutoTokenizer.from_pretrained(model)
    yield Shared(*servers, image_token(len(tokenizer)), "sounds")
    for engine in engines:
        tell(engine, "/end")


def test_an_equal_sound_is_imported_bit_for_bit_and_another_one_never(shared: Shared) -> None:
    prompt = shared.prompt(9600)
    shared.share(prompt, 1)
    first = shared.imports(WHOLE, prompt, 1)
    assert first == shared.hits(WHOLE, prompt, 1)
    prompt = shared.prompt(9650)
    shared.share(prompt, 1)
    other = shared.imports(BEFORE_IMAGE, prompt, 2)
    assert other == shared.hits(BEFORE_IMAGE, prompt, 2)
    assert other != shared.hits(WHOLE, prompt, 1), "the model is deaf"


def test_a_wrong_block_of_a_sound_is_noticed(shared: Shared) -> None:
    prompt = shared.prompt(9700)
    shared.share(prompt, 3)
    with wrong(shared.b, 0, "neighbours"):
        imported = shared.imports(WHOLE, prompt, 3)
    assert imported != shared.hits(WHOLE, prompt, 3)
