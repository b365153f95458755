"""What fails is a miss: requests are answered, and no one reads what may be wrong."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import pytest

from kvshm._base.log import LogLimit

pytest.importorskip("transformers")

from transformers.generation.continuous_batching.requests import RequestState

import kvshm.api
from kvshm import KvshmError, Load, LoadState
from kvshm.hooks import boundary
from kvshm.hooks.transformers import managers as hooked
from kvshm.hooks.transformers import node_of, stats_of
from kvshm.hooks.transformers.identity import identity_of
from kvshm.hooks.transformers.imports import END_SECONDS, ROOM_SECONDS
from kvshm.hooks.transformers.paged_cache import SharedPagedAttentionCache
from kvshm.hooks.transformers.shared_prefixes import SharedPrefixes

from .conftest import Lines, MakeManager
from .managers import (
    PAGE_SIZE,
    ask,
    cache_of,
    change_weights,
    counts,
    heard,
    random_prompt,
    start,
)

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def lenient(manager: MakeManager, monkeypatch: pytest.MonkeyPatch) -> MakeManager:
    monkeypatch.setenv("KVSHM_STRICT", "0")
    monkeypatch.setattr(boundary, "_log_limit", LogLimit(math.inf))
    return manager


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("a mistake of kvshm")


def free_blocks(manager: Any) -> int:
    cache = cache_of(manager)
    return cache.pool.num_free_sectors + cache.pool.count_free_blocks(0)


def has_memory(manager: Any) -> bool:
    """Whether the cache has all its memory: it was given up to make room."""
    tensor = cache_of(manager).cache_tensor
    return bool(tensor.untyped_storage().nbytes() == tensor.numel() > 0)


@pytest.mark.parametrize("name", ["keys", "lookup", "load", "publish", "retract"])
def test_a_mistake_of_kvshm_ends_the_sharing_and_nothing_else(
    lenient: MakeManager, monkeypatch: pytest.MonkeyPatch, lines: Lines, name: str
) -> None:
    a, b = lenient(), lenient()
    start(a, b)
    prompt = random_prompt(100, 4 * PAGE_SIZE + 1)
    expected = ask(a, prompt)
    heard(b, prompt)
    node = node_of(b)
    other = random_prompt(101, 4 * PAGE_SIZE + 1)
    free = free_blocks(b)
    monkeypatch.setattr(node, name, broken)
    answer = ask(b, prompt)
    b.batch_processor.cache.evict_cached_blocks()  # the loop stands still
    assert answer[0] == expected[0]
    assert node_of(b) is None
    assert stats_of(b) == {}
    assert not node.joined
    assert len([line for line in lines if "kvshm is off for this engine" in line]) == 1
    assert ask(b, other)[0] == ask(a, other)[0]
    b.batch_processor.cache.evict_cached_blocks()
    assert free_blocks(b) == free


def test_strict_lets_a_mistake_through(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = manager()
    start(a)
    monkeypatch.setattr(node_of(a), "keys", broken)
    a.add_request(random_prompt(110, 40), max_new_tokens=2)
    assert "a mistake of kvshm" in str(a.get_result(timeout=60).error)


def test_memory_that_is_not_there_leaves_a_plain_cache(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    a, plain = manager(), manager()

    def no_room(_: int) -> None:
        raise KvshmError("no room for KV memory")

    monkeypatch.setattr(hooked, "allocate", no_room)
    start(a)
    monkeypatch.undo()
    assert lines[-1] == "kvshm: not sharing the prefix cache: no room for KV memory"
    assert type(cache_of(a)) is not SharedPagedAttentionCache
    assert has_memory(a)
    start(plain)
    prompt = random_prompt(120, 4 * PAGE_SIZE + 1)
    assert ask(a, prompt) == ask(plain, prompt)
    assert ask(a, prompt) == ask(plain, prompt)


def test_an_error_while_the_cache_is_taken_over_leaves_a_plain_one(
    lenient: MakeManager, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    a = lenient()
    monkeypatch.setattr(SharedPrefixes, "__init__", broken)
    start(a)
    assert any("kvshm is off for this engine" in line for line in lines)
    assert has_memory(a)
    prompt = random_prompt(130, 4 * PAGE_SIZE + 1)
    assert ask(a, prompt) == ask(a, prompt)
    assert node_of(a) is None


class Hanging(Load):
    """A load that does not end before it is let go."""

    held = True

    def poll(self) -> LoadState:
        return LoadState.PENDING if self.held else super().poll()


def test_a_load_that_hangs_is_waited_for_within_a_bound(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = manager(), manager()
    start(a, b)
    prompt = random_prompt(140, 4 * PAGE_SIZE + 1)
    computed = ask(a, prompt)
    heard(b, prompt)
    node, loads = node_of(b), []
    begin = node.load

    def load(*args: Any, **kwargs: Any) -> Load:
        loads.append(begin(*args, **kwargs))
        loads[-1].__class__ = Hanging
        return loads[-1]

    monkeypatch.setattr(node, "load", load)
    cache_of(b).importer.wait_seconds = 0.01
    free = free_blocks(b)
    assert ask(b, prompt) == computed
    assert (counts(b).late_imports, counts(b).failed_imports) == (1, 1)
    assert counts(b).imported_tokens == 0
    cache_of(b).evict_cached_blocks()
    assert free_blocks(b) == free - 4, "its blocks are not handed out"
    loads[0].held = False
    ask(b, random_prompt(141, 2))
    cache_of(b).evict_cached_blocks()
    assert free_blocks(b) == free, "they are, once it has ended"


def test_a_reset_waits_for_a_load_that_hangs(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = manager()
    start(a)
    waited = []

    class Left:
        def wait(self) -> LoadState:
            waited.append(True)
            return LoadState.FAILED

        poll = wait

    importer = cache_of(a).importer
    importer._left.append((Left(), importer._take(2)))
    a.stop(keep_for_next_session=True)
    cache_of(a).reset()
    assert waited
    assert free_blocks(a) == 64


def test_a_prefix_that_finds_no_room_is_computed(manager: MakeManager) -> None:
    """Here most of the cache is one long request's, which keeps it."""
    a, b = manager(), manager(num_blocks=14)
    start(a, b)
    prompt = random_prompt(150, 6 * PAGE_SIZE + 1)
    ask(a, prompt)
    heard(b, prompt)
    b.stop(keep_for_next_session=True)
    cache = cache_of(b)
    held = RequestState(request_id="held", initial_tokens=[1] * 8 * PAGE_SIZE)
    assert cache.can_store_request_tokens(held, 8 * PAGE_SIZE)
    assert cache.search_prefix_match("new", prompt) == 0
    assert (counts(b).no_room, counts(b).imports) == (1, 0)
    cache.free_blocks("held")
    assert cache.search_prefix_match("new", prompt) == 6 * PAGE_SIZE
    assert counts(b).imports == 1


def test_a_prefix_that_would_not_fit_beside_a_late_load_is_computed(manager: MakeManager) -> None:
    a, b = manager(), manager(num_blocks=8)
    start(a, b)
    prompt = random_prompt(160, 5 * PAGE_SIZE + 1)
    expected = ask(a, prompt)
    heard(b, prompt)
    assert ask(b, prompt) == expected
    assert counts(b).imports == 0
    assert counts(b).no_room > 0


def test_blocks_of_late_loads_come_back_before_transformers_gives_up(manager: MakeManager) -> None:
    a = manager()
    start(a)
    a.stop(keep_for_next_session=True)
    cache, waited = cache_of(a), []

    class Left:
        def wait(self, seconds: float = 0.0) -> LoadState:
            waited.append(seconds)
            return LoadState.FAILED

        poll = wait

    assert not cache.evict_cached_blocks()
    cache.importer._left.append((Left(), cache.importer._take(2)))
    assert cache.evict_cached_blocks()
    assert waited[0] == ROOM_SECONDS
    assert free_blocks(a) == 64


class Raising(Load):
    def wait(self, timeout: float | None = None) -> LoadState:
        raise RuntimeError("a mistake of kvshm")


class RaisingLater(Hanging):
    polled = 0

    def poll(self) -> LoadState:
        self.polled += 1
        if self.polled > 1 and self.done_waiting:
            raise RuntimeError("a mistake of kvshm")
        return LoadState.PENDING

    done_waiting = False

    def wait(self, timeout: float | None = None) -> LoadState:
        self.done_waiting = timeout == END_SECONDS
        return LoadState.PENDING


@pytest.mark.parametrize("kind", [Raising, RaisingLater])
def test_a_mistake_of_a_load_loses_no_blocks(
    lenient: MakeManager, monkeypatch: pytest.MonkeyPatch, kind: type[Load]
) -> None:
    a, b = lenient(), lenient()
    start(a, b)
    prompt = random_prompt(170, 4 * PAGE_SIZE + 1)
    expected, _ = ask(a, prompt)
    heard(b, prompt)
    node, free = node_of(b), free_blocks(b)
    begin = node.load

    def load(*args: Any, **kwargs: Any) -> Load:
        made = begin(*args, **kwargs)
        made.__class__ = kind
        return made

    monkeypatch.setattr(node, "load", load)
    for seed in (171, 172, 173):
        assert ask(b, prompt)[0] == expected
        ask(b, random_prompt(seed, 2))
    assert node_of(b) is None
    cache_of(b).evict_cached_blocks()
    assert free_blocks(b) == free


def test_a_refused_join_leaves_nothing_open(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = manager()

    def refuse(*_: object, **__: object) -> None:
        raise KvshmError("no")

    closed = []
    real = kvshm.api.allocate

    def allocate(size: int) -> Any:
        memory = real(size)
        close = memory.close
        monkeypatch.setattr(memory, "close", lambda: (closed.append(True), close()))
        return memory

    monkeypatch.setattr(hooked, "allocate", allocate)
    monkeypatch.setattr(hooked, "join", refuse)
    a.warmup()
    assert closed == [True]
    assert has_memory(a)


def test_of_two_readings_of_the_weights_the_last_one_counts(
    manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads may hold one pause: one leaves it before the other changes the weights."""
    a = manager()
    start(a)
    prefixes, real = cache_of(a).prefixes, identity_of
    reading, go_on = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        identity = real(*args)
        if threading.current_thread() is early:
            reading.set()
            go_on.wait(2)
        return identity

    def look() -> None:
        a.kvshm.look_at_model(a.batch_processor)

    monkeypatch.setattr(hooked, "identity_of", slow)
    early = threading.Thread(target=look)
    early.start()
    assert reading.wait(30)
    change_weights(a)
    look()
    go_on.set()
    early.join()
    assert prefixes._identity == real(a.model, a.continuous_batching_config)


def test_the_logger_is_heard(lines: Lines) -> None:
    logging.getLogger("vllm.kvshm.hooks.boundary").warning("heard")
    assert lines == ["heard"]
