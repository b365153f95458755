"""Managers share what they have computed, equal to a local hit in every bit, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from kvshm import ConfigError
from kvshm.hooks.transformers import node_of, share, share_all, stats_of
from kvshm.hooks.transformers.paged_cache import SharedPagedAttentionCache

from .conftest import Lines, MakeManager
from .managers import (
    PAGE_SIZE,
    ask,
    cache_of,
    change_weights,
    counts,
    end,
    heard,
    know_each_other,
    new_manager,
    random_prompt,
    start,
)

pytestmark = pytest.mark.multiprocess


def test_an_import_equals_a_local_hit_in_every_bit(manager: MakeManager) -> None:
    a, b = manager(), manager()
    start(a, b)
    for seed in range(3):
        prompt = random_prompt(seed, 6 * PAGE_SIZE + 5)
        ask(a, prompt)
        heard(b, prompt)
        assert ask(b, prompt) == ask(a, prompt)
    assert counts(b).imported_tokens == 3 * 6 * PAGE_SIZE
    assert counts(b).failed_imports == counts(b).local_hit_tokens == 0
    assert counts(a).local_hit_tokens == 3 * 6 * PAGE_SIZE
    assert stats_of(b)["imported_blocks"] == stats_of(b)["verified"] == 3 * 6


def test_only_what_the_own_cache_lacks_is_imported(manager: MakeManager) -> None:
    """Nor is the last token of a prompt, which has to be computed."""
    a, b = manager(), manager()
    start(a, b)
    prompt = random_prompt(10, 6 * PAGE_SIZE)
    ask(b, prompt[: 2 * PAGE_SIZE + 1], tokens=2)
    ask(a, prompt)
    heard(b, prompt)
    ask(b, prompt)
    assert counts(b).imported_tokens == 3 * PAGE_SIZE
    assert counts(b).local_hit_tokens == 2 * PAGE_SIZE


def test_what_was_imported_is_hit_and_given_on(manager: MakeManager) -> None:
    a, b, c = manager(), manager(), manager()
    start(a, b)
    prompt = random_prompt(20, 4 * PAGE_SIZE + 1)
    ask(a, prompt)
    heard(b, prompt)
    imported = ask(b, prompt)
    assert ask(b, prompt) == imported
    assert counts(b).imports == 1
    a.stop()
    start(b, c)
    heard(c, prompt)
    assert ask(c, prompt) == imported
    assert counts(c).imported_tokens == 4 * PAGE_SIZE


def test_generated_tokens_are_shared_as_prompts_are(manager: MakeManager) -> None:
    a, b = manager(), manager()
    start(a, b)
    prompt = random_prompt(30, PAGE_SIZE)
    tokens, _ = ask(a, prompt, tokens=3 * PAGE_SIZE)
    longer = prompt + tokens[: 2 * PAGE_SIZE + 1]
    heard(b, longer)
    assert ask(b, longer) == ask(a, longer)
    assert counts(b).imported_tokens == 3 * PAGE_SIZE


def test_another_salt_shares_nothing(manager: MakeManager) -> None:
    a, b, c = manager(b"one"), manager(b"two"), manager(b"one")
    start(a, b, c)
    prompt = random_prompt(40, 4 * PAGE_SIZE + 1)
    ask(a, prompt)
    ask(b, prompt)
    assert counts(b).imported_tokens == 0
    until_known = node_of(c).keys(prompt, salt=b"one")
    assert node_of(c).wait_for(until_known, timeout=60)
    ask(c, prompt)
    assert counts(c).imported_tokens == 4 * PAGE_SIZE


def test_without_the_switch_nothing_changes(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_ENABLE", "0")
    plain = manager()
    assert not {"_create_batch_processor", "pause", "stop"} & vars(plain).keys()
    start(plain)
    assert type(cache_of(plain)) is not SharedPagedAttentionCache
    assert node_of(plain) is None
    assert stats_of(plain) == {}


def test_managers_that_transformers_makes_share_as_well(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    monkeypatch.setattr(
        ContinuousBatchingManager, "__init__", ContinuousBatchingManager.__init__
    )  # put back by the end of the test
    a = manager()
    start(a)
    prompt = random_prompt(50, 4 * PAGE_SIZE + 1)
    expected, _ = ask(a, prompt)
    share_all()
    share_all()
    b = new_manager(a.model.config._name_or_path)
    start(b)
    know_each_other(a, b)
    heard(b, prompt)
    assert ask(b, prompt)[0] == expected
    assert counts(b).imports == 1
    end(b)


def test_a_manager_that_has_its_cache_is_refused(manager: MakeManager, lines: Lines) -> None:
    a = new_manager(manager().model.config._name_or_path)
    a.warmup()
    share(a)
    assert "call share() before it starts" in lines[-1]
    assert node_of(a) is None


def test_the_end_of_a_manager_ends_the_sharing(manager: MakeManager) -> None:
    a, b = manager(), manager()
    start(a, b)
    node = node_of(a)
    a.stop()
    assert not node.joined
    assert node_of(a) is None


def test_a_manager_that_is_kept_shares_on(manager: MakeManager) -> None:
    a, b = manager(), manager()
    start(a, b)
    prompt = random_prompt(60, 4 * PAGE_SIZE + 1)
    ask(a, prompt)
    a.stop(keep_for_next_session=True)
    heard(b, prompt)
    ask(b, prompt)
    assert counts(b).imported_tokens == 4 * PAGE_SIZE
    epoch = cache_of(a).prefixes.node
    a.start()
    assert ask(a, prompt) == ask(b, prompt)
    assert counts(a).local_hit_tokens == 4 * PAGE_SIZE
    assert node_of(a) is epoch


def test_new_weights_leave_nothing_of_the_old_ones(manager: MakeManager) -> None:
    a, b = manager(), manager()
    start(a, b)
    old, new = random_prompt(70, 4 * PAGE_SIZE + 1), random_prompt(71, 4 * PAGE_SIZE + 1)
    ask(a, old)
    heard(b, old)
    with a.pause():
        change_weights(a)
    know_each_other(a)
    assert node_of(a).stats()["published"] == 0
    ask(a, old)  # hit by transformers, which does not look at weights
    ask(a, new)
    ask(b, old)
    ask(b, new)
    assert counts(b).imports == counts(a).imports == 0
    with b.pause():
        change_weights(b)
    know_each_other(a, b)
    ask(a, newer := random_prompt(72, 4 * PAGE_SIZE + 1))
    heard(b, newer)
    assert ask(b, newer) == ask(a, newer)
    assert set(node_of(b).contains(node_of(b).keys(old))) == {""}


def test_a_pause_without_new_weights_changes_nothing(manager: MakeManager) -> None:
    a, b = manager(), manager()
    start(a, b)
    prompt = random_prompt(80, 4 * PAGE_SIZE + 1)
    ask(a, prompt)
    with a.pause():
        pass
    heard(b, prompt)
    ask(b, prompt)
    assert counts(b).imported_tokens == 4 * PAGE_SIZE


def test_what_a_running_request_computes_over_new_weights_is_not_shared(
    manager: MakeManager,
) -> None:
    """Its first block was begun before the change, and is complete after it."""
    a = manager()
    start(a)
    half = random_prompt(90, PAGE_SIZE // 2)
    a.add_request(half, max_new_tokens=100 * PAGE_SIZE // 2, streaming=True)
    while not (output := a.get_result(timeout=1)) or not output.generated_tokens:
        pass
    with a.pause():
        change_weights(a)
    for _ in range(2 * PAGE_SIZE):
        a.get_result(timeout=1)
    know_each_other(a)
    assert len(cache_of(a)._allocator.ledger.block_to_hash) > 1
    assert node_of(a).stats()["published"] == 0


def test_of_several_calls_the_last_one_counts(manager: MakeManager) -> None:
    a = share(manager(b"one"), salt=b"two")
    a.warmup()
    assert cache_of(a).prefixes._salt == b"two"
    assert share(a, salt=b"two") is a
    with pytest.raises(ConfigError, match="shares already"):
        share(a, salt=b"three")


@pytest.mark.parametrize(
    "odd", [{"salt": "text"}, {"wait_seconds": float("nan")}, {"wait_seconds": -1.0}]
)
def test_odd_arguments_are_refused(manager: MakeManager, odd: dict[str, Any]) -> None:
    a = manager()
    for call in (lambda: share(a, **odd), lambda: share_all(**odd)):
        with pytest.raises(ConfigError, match=next(iter(odd))):
            call()


def test_a_manager_that_was_kept_and_is_destroyed_shares_no_more(manager: MakeManager) -> None:
    a = manager()
    start(a)
    node = node_of(a)
    a.stop(keep_for_next_session=True)
    assert node.joined
    a.model.destroy_cached_continuous_batching_manager()
    assert node.closed


def test_requests_that_fork_import_what_leaves_two_tokens(manager: MakeManager) -> None:
    """transformers schedules the last token of such a prompt apart from one before it."""
    a = manager()
    b = manager(generation={"num_return_sequences": 2, "do_sample": True, "top_k": 1})
    start(a, b)
    prompt = random_prompt(95, 4 * PAGE_SIZE + 1)
    tokens, _ = ask(a, prompt)
    heard(b, prompt)
    b.add_request(prompt, max_new_tokens=8)
    for _ in range(2):
        assert (output := b.get_result(timeout=20)) is not None
        assert output.generated_tokens == tokens
    assert counts(b).imported_tokens == 3 * PAGE_SIZE


def test_a_request_that_waits_is_looked_at_once(manager: MakeManager) -> None:
    """No lookup is made before there is room for it, and its keys are made once."""
    a = manager(num_blocks=8)
    start(a)
    a.stop(keep_for_next_session=True)
    cache, prompt = cache_of(a), random_prompt(97, 4 * PAGE_SIZE + 1)
    assert cache.prefixes.begin("r", prompt) is cache.prefixes.begin("r", prompt)
    asked: list[object] = []
    cache.prefixes.node.lookup = lambda *a, **_: asked.append(a)
    held = cache.importer._take(6)
    cache.search_prefix_match("r", prompt)
    assert asked == []
    cache.importer._give_back(held)
    cache.search_prefix_match("r", prompt)
    assert len(asked) == 1
    cache.reset()
    assert not cache.prefixes._requests
