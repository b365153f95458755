"""``kvshm events`` merges what vLLM's own publishers say, in their format, replays included."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import KVEventBatch

from ..multiprocess.event_streams import EventsProcess, Router
from ..multiprocess.processes import Node, fresh_node
from ..multiprocess.test_events import api_server
from .publishing import cleared, publishers, removed, stored

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


class Streams:
    """Publishers and streams of one test."""

    def __init__(self, node: Node, start: Any, stack: ExitStack) -> None:
        self.node, self._start, self._stack = node, start, stack

    def engine(self, name: str, **config: Any) -> Any:
        where = f"ipc://{self.node.run_dir}/{name}"
        return self._start(endpoint=where, replay_endpoint=f"{where}-replay", **config)

    def rank(self, rank: int) -> Any:
        return self._start(rank, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")

    def events(self, *sources: str) -> EventsProcess:
        return EventsProcess(self.node, *sources)

    def router(self, events: EventsProcess) -> Router:
        return self._stack.enter_context(Router.of(events))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")  # for tcp://*:0
    with fresh_node() as node, publishers() as start, ExitStack() as stack:
        yield Streams(node, start, stack)


def test_all_subscribers_learn_of_first_and_last_copies_however_late_they_come(
    streams: Streams,
) -> None:
    a, b = streams.engine("a"), streams.engine("b")
    a.publish(stored(1, 2))  # before anyone listens
    events = streams.events(a.source, b.source, "--history", "2")
    one, two = streams.router(events), streams.router(events)
    one.wait_for(1, 2)
    b.publish(stored(1, 2, 3))
    a.publish(removed(2), stored(4, parent=2))
    a.publish(removed(1), cleared())
    for router in (one, two):
        router.wait_for(1, 2, 3)
        assert router.blocks[0, "GPU", 0, 3] == (2, [3] * 16)
    b.publish(removed(3, 2))
    one.wait_for(1)
    assert streams.router(events).blocks == one.blocks


def test_vllms_own_types_read_the_stream(streams: Streams) -> None:
    a = streams.engine("a")
    router = streams.router(streams.events(a.source))
    heard: list[bytes] = []
    take = router.take
    router.take = lambda text: heard.append(text) or take(text)  # type: ignore[method-assign]
    event = stored(5, 6, lora_name="l", session_id="s", kv_cache_spec_kind="full_attention")
    a.publish(event)
    router.wait_for(5, 6)
    a.publish(removed(5))
    router.wait_for(6)
    batches = [msgspec.msgpack.decode(text, type=KVEventBatch) for text in heard]
    assert [batch.data_parallel_rank for batch in batches] == [0, 0]
    assert [batch.ts for batch in batches] == [1.0, 1.0]
    assert [batch.events for batch in batches] == [[event], [removed(5)]]


def test_what_zeromq_drops_is_replayed_and_what_is_too_old_is_not_believed(
    streams: Streams,
) -> None:
    a, b = streams.engine("a"), streams.engine("b", buffer_steps=1)
    events = streams.events(a.source, b.source)
    router = streams.router(events)
    a.publish(stored(1))
    b.publish(stored(11, 12))
    router.wait_for(1, 11, 12)
    a.lose(stored(2))
    a.publish(stored(3))
    router.wait_for(1, 2, 3, 11, 12)
    a.lose(removed(2))  # the last that it says
    router.wait_for(1, 3, 11, 12)
    b.lose(removed(11))
    b.publish(stored(13))
    router.wait_for(1, 3, 13)


def test_a_killed_engine_has_nothing_and_the_next_one_begins_anew(streams: Streams) -> None:
    a, b = streams.engine("a"), streams.engine("b")
    router = streams.router(streams.events(a.source, b.source))
    a.publish(stored(1, 2))
    b.publish(stored(2, 3))
    router.wait_for(1, 2, 3)
    a.kill()
    router.wait_for(2, 3)
    streams.engine("a").publish(stored(4))
    router.wait_for(2, 3, 4)


def test_a_killed_stream_harms_no_engine_and_the_next_one_tells_all_again(
    streams: Streams,
) -> None:
    a = streams.engine("a")
    events = streams.events(a.source)
    router = streams.router(events)
    a.publish(stored(1, 2))
    router.wait_for(1, 2)
    events.process.signal(signal.SIGKILL)
    events.process.wait()
    a.publish(removed(2), stored(3))
    events.start()
    again = streams.router(events)
    again.wait_for(1, 3)
    assert again.last > router.last + 100, "a gap, so that who heard the killed one asks for all"


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_are_found_by_url_and_are_one_cache_or_stay_apart(
    streams: Streams, apart: bool
) -> None:
    ranks = {rank: streams.rank(rank) for rank in (0, 1)}
    configs = {str(rank): one.config for rank, one in ranks.items()}
    models = {"data": [{"id": "m", "root": "m", "parent": None}]}
    answers = {"/kv_event_sources": configs, "/v1/models": models}
    with api_server(answers) as url:
        router = streams.router(streams.events(url, *(["--ranks"] if apart else [])))
        ranks[0].publish(stored(1))
        router.wait_for(1)
        ranks[1].publish(stored(1, 2))
        router.wait_for(1, 2)
        both = {(0, 1), (1, 1), (1, 2)} if apart else {(0, 1), (0, 2)}
        assert {(name[0], name[3]) for name in router.blocks} == both
        ranks[0].kill()
        ranks[1].publish(removed(1))
        router.wait_for(2)
