"""Sounds are shared as images are, by what the model gets of them.  Real engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import Pair
from .test_families import servers, wrong
from .test_images import AFTER, BEFORE, BEFORE_IMAGE, WHOLE, Shared, sharing
from .vision import SOUND_TOKENS, write_hearing

__all__ = ["servers"]

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(900)]

assert (BEFORE + SOUND_TOKENS + AFTER - 1) // 128 * 128 == WHOLE, "it is as long as an image"


@pytest.fixture(scope="module")
def shared(servers: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    model = write_hearing(tmp_path_factory.mktemp("hearing"))
    with sharing(servers, [model, model], "sounds") as pair:
        yield pair


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
