"""What sharing costs the generation loop depends on what is new, not on how long a request is."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from kvshm import prefix_keys
from kvshm.api import Identity
from kvshm.hooks.transformers.paged_cache import SharedPagedAttentionCache
from kvshm.hooks.transformers.shared_prefixes import SharedPrefixes

from .conftest import MakeManager
from .managers import PAGE_SIZE, ask, cache_of, change_weights, random_prompt, start


class Tokens(list[int]):
    """A prompt that counts how often more than its length is asked for."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __eq__(self, other: object) -> bool:
        self.looks += 1
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        self.looks += 1
        return super().__ne__(other)

    def __iter__(self) -> Any:
        self.looks += 1
        return super().__iter__()


class Published:
    block_size = PAGE_SIZE

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}

    def keys(self, tokens: Any, salt: bytes, known: Any = ()) -> list[bytes]:
        return list(prefix_keys(tokens, PAGE_SIZE, salt=salt, known=known))

    def publish(self, keys: list[bytes], blocks: list[int], start: int) -> None:
        self.blocks.update(zip(blocks, keys[start:], strict=True))


@pytest.fixture
def published() -> Published:
    return Published()


@pytest.fixture
def prefixes(published: Any) -> SharedPrefixes:
    identity: Any = Identity(engine="e", model="m", weights="w", settings={})
    return SharedPrefixes(published, identity, None, salt=b"", strict=True)


def test_of_a_long_prompt_nothing_is_looked_at_twice(
    prefixes: SharedPrefixes, published: Published
) -> None:
    prompt = random_prompt(1, 4 * PAGE_SIZE + 3)
    considered, initial = Tokens(prompt), Tokens(prompt)
    prefixes.begin("r", considered)
    seen = considered.looks
    prefixes.begin("r", considered)
    assert considered.looks == seen, "it is compared in every step that it waits"
    prefixes.completed("r", initial, [], [10, 11], {10, 11})
    seen, generated = initial.looks, random_prompt(2, 3 * PAGE_SIZE)
    prefixes.completed("r", initial, [], [12, 13], {12, 13})
    prefixes.completed("r", initial, generated, [14, 15], {14, 15})
    assert initial.looks == seen
    keys = prefix_keys(prompt + generated, PAGE_SIZE)
    assert published.blocks == dict(zip(range(10, 16), keys, strict=False))


def test_keys_of_other_generated_tokens_are_not_kept(
    prefixes: SharedPrefixes, published: Published
) -> None:
    prompt = random_prompt(3, PAGE_SIZE)
    for seed, blocks in ((4, [1, 2]), (5, [3, 4])):
        prefixes.begin("r", prompt)
        generated = random_prompt(seed, PAGE_SIZE)
        prefixes.completed("r", prompt, generated, blocks, set(blocks))
        keys = prefix_keys(prompt + generated, PAGE_SIZE)
        assert [published.blocks[block] for block in blocks] == keys


def test_a_request_of_another_prompt_publishes_nothing(
    prefixes: SharedPrefixes, published: Published
) -> None:
    prefixes.begin("r", random_prompt(6, PAGE_SIZE))
    prefixes.completed("r", random_prompt(7, PAGE_SIZE), [], [1], {1})
    assert published.blocks == {}
    assert prefixes.sound_blocks("r") is None


def test_behind_a_block_of_unknown_contents_nothing_is_looked_at(
    prefixes: SharedPrefixes, published: Published
) -> None:
    prompt = random_prompt(8, 3 * PAGE_SIZE)
    prefixes.begin("r", prompt)
    prefixes.completed("r", prompt, [], [1, 2, 3], {1, 3})
    assert list(published.blocks) == [1]
    assert prefixes.sound_blocks("r") is None


def test_tokens_of_known_keys_are_not_looked_at() -> None:
    prompt: list[Any] = [*random_prompt(9, 4 * PAGE_SIZE)]
    keys = prefix_keys(prompt, PAGE_SIZE)
    prompt[0] = "no token"
    assert prefix_keys(prompt, PAGE_SIZE, known=keys[:2]) == keys


@pytest.mark.multiprocess
def test_hashes_of_a_local_hit_are_made_once(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = manager()
    start(a)
    prompt = random_prompt(10, 4 * PAGE_SIZE + 1)
    expected = ask(a, prompt)
    allocator, made = cache_of(a)._allocator, []
    match = allocator.match_prefix_blocks

    def counted(tokens: list[int]) -> Any:
        made.append(tokens)
        return match(tokens)

    monkeypatch.setattr(allocator, "match_prefix_blocks", counted)
    assert ask(a, prompt) == expected
    assert cache_of(a).importer.counts.local_hit_tokens == 4 * PAGE_SIZE
    assert len(made) == 1


@pytest.mark.multiprocess
def test_a_request_over_blocks_of_former_weights_is_soon_forgotten(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = manager()
    start(a)
    ask(a, prompt := random_prompt(11, 4 * PAGE_SIZE + 1))
    with a.pause():
        change_weights(a)
    said: list[int | None] = []
    mark = SharedPagedAttentionCache.mark_complete_blocks

    def marked(self: Any, state: Any, complete: Any) -> None:
        mark(self, state, complete)
        if complete:
            said.append(self.prefixes.sound_blocks(state.request_id))

    monkeypatch.setattr(SharedPagedAttentionCache, "mark_complete_blocks", marked)
    ask(a, prompt, tokens=3 * PAGE_SIZE)
    assert said
    assert set(said) == {None}
