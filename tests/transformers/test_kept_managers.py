"""A manager that its model keeps serves several times, from one cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers.generation.continuous_batching.requests import RequestState

from kvshm import KvshmError
from kvshm.hooks.transformers import managers as hooked
from kvshm.hooks.transformers import node_of, share

from .conftest import Lines, MakeManager
from .managers import PAGE_SIZE, ask, cache_of, end, new_manager, random_prompt, start

pytestmark = pytest.mark.multiprocess


def test_a_cache_that_has_served_unshared_keeps_its_contents(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    """Its prefixes are hit in its next session, so its memory must not be made anew."""
    a = manager()

    def no_room(_: int) -> None:
        raise KvshmError("no room for KV memory")

    monkeypatch.setattr(hooked, "allocate", no_room)
    start(a)
    ask(a, prompt := random_prompt(1, 4 * PAGE_SIZE + 1))
    hit = ask(a, prompt)
    for _ in range(2):
        a.stop(keep_for_next_session=True)
        start(a)
        assert ask(a, prompt) == hit
        monkeypatch.undo()  # in the last session there is room
    assert node_of(a) is None
    assert [line for line in lines if "no room" in line] == lines


def test_a_kept_manager_that_does_not_share_says_what_to_do(
    manager: MakeManager, lines: Lines
) -> None:
    a = new_manager(manager().model.config._name_or_path)
    start(a)
    a.stop(keep_for_next_session=True)
    assert a.model.init_continuous_batching() is a
    share(a)
    assert lines[-1] == (
        "kvshm: not sharing the prefix cache: the manager was kept by its model, with a cache that "
        "is not shared; call the model's destroy_cached_continuous_batching_manager(), and share() "
        "its next manager"
    )
    a.model.destroy_cached_continuous_batching_manager()
    b = share(a.model.init_continuous_batching(a.generation_config, a.continuous_batching_config))
    start(b)
    assert node_of(b) is not None
    end(b)


def test_a_manager_that_was_refused_does_not_pretend_to_share(
    manager: MakeManager, lines: Lines
) -> None:
    a = manager()
    a.model.model.norm.register_forward_hook(lambda *_: None)
    a.warmup()
    lines.clear()
    assert share(a, salt=b"another") is a
    assert "the manager has made its cache already" in lines[-1]


@pytest.mark.parametrize(
    "what",
    [
        lambda a: a._fail_all_remaining_requests(RuntimeError(), a.batch_processor),
        lambda a: a.batch_processor.reset(),
    ],
    ids=["they fail", "another session begins"],
)
def test_requests_that_end_while_they_wait_are_forgotten(
    manager: MakeManager, what: Callable[[Any], None]
) -> None:
    """transformers frees no blocks of theirs: they have none."""
    a = manager()
    start(a)
    a.stop(keep_for_next_session=True)
    waits = RequestState(request_id="r", initial_tokens=random_prompt(2, 4 * PAGE_SIZE))
    a.batch_processor.scheduler.add_waiting_request(waits)
    cache_of(a).search_prefix_match("r", waits.initial_tokens)
    assert cache_of(a).prefixes._requests
    what(a)
    assert not cache_of(a).prefixes._requests
