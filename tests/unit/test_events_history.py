"""What subscribers of a node's KV events can ask for again, however late they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvshm.tools.events.history import History
from kvshm.tools.events.wire import decode_batch

from .kv_events import CLEARED, Subscriber, payload, removed, stored

NOW = 7.0


def late(history: History, start: int = 0, router: Subscriber | None = None) -> Subscriber:
    """What a subscriber knows who asks for everything from ``start`` on."""
    router = router or Subscriber()
    for _, text in history.since(start, NOW):
        router.take(text)
    return router


def test_recent_batches_are_replayed_as_they_were() -> None:
    history = History(max_batches=3)
    texts = [payload(stored(i)) for i in range(3)]
    assert [history.add(text) for text in texts] == [0, 1, 2]
    assert list(history.since(1, NOW)) == [(1, texts[1]), (2, texts[2])]
    assert list(history.since(3, NOW)) == []


def test_who_heard_a_stream_before_it_was_started_anew_asks_for_all_of_the_next() -> None:
    old, new, router = History(), History(max_batches=2, first=1000), Subscriber()
    router.take(payload(stored(1, 2)))
    heard = old.add(payload(stored(1, 2)))
    for events in ([CLEARED], [stored(2)], [stored(3)]):
        assert new.add(payload(*events)) > heard + 1
    assert late(new, heard + 1, router).hashes == {2, 3}


def test_in_the_place_of_older_batches_stands_what_they_came_to() -> None:
    history = History(max_batches=1)
    for events in ([stored(1, 2, 3)], [stored(4, parent=3), removed(2)], [stored(5)], [removed(1)]):
        history.add(payload(*events))
    first, last = history.since(0, NOW)
    assert (first.number, last.number) == (2, 3)
    router = Subscriber()
    began = router.take(first.payload)
    assert began.at == NOW
    then = [stored(1), stored(3, parent=2), stored(4, parent=3), stored(5)]
    assert began.events == [CLEARED, *then]
    router.take(last.payload)
    assert router.hashes == {3, 4, 5}


def test_who_missed_some_batches_that_are_gone_loses_what_has_gone_meanwhile() -> None:
    history = History(max_batches=1)
    router = Subscriber()
    for block in range(3):
        history.add(text := payload(stored(block)))
        router.take(text)
    for block in range(3):
        history.add(payload(removed(block)))
    history.add(payload(stored(9)))
    assert min(number for number, _ in history.since(3, NOW)) >= 3
    assert late(history, 3, router).hashes == {9}


def test_a_clearing_leaves_nothing_of_what_was_before() -> None:
    history = History(max_batches=1)
    for event in (stored(1), CLEARED, stored(2), stored(3)):
        history.add(payload(event))
    assert late(history).hashes == {2, 3}


def test_each_rank_has_a_beginning_of_its_own() -> None:
    history = History(max_batches=1)
    for text in (payload(stored(0)), payload(stored(3), rank=3), payload()):
        history.add(text)
    assert {(name[0], name[3]) for name in late(history).blocks} == {(0, 0), (3, 3)}


def test_a_block_without_tokens_of_its_own_keeps_those_of_its_event() -> None:
    history = History(max_batches=1)
    sparse = stored(1, 3) | {"token_ids": list(range(8))}
    history.add(payload(sparse))
    history.add(payload(removed(1)))
    history.add(payload())
    (began, _) = history.since(0, NOW)
    _, event = decode_batch(began.payload).events
    assert event == sparse | {"block_hashes": [3], "extra_keys": [["salt 3"]]}


def test_memory_is_bounded_by_bytes_too() -> None:
    history = History(max_bytes=2000)
    for _ in range(200):
        history.add(payload(stored(*range(10))))
        history.add(payload(removed(*range(10))))
    assert sum(len(text) for _, text in history.since(0, NOW)) < 2100


BLOCKS = st.integers(0, 5)


RANKS = st.integers(0, 2)


@given(st.lists(st.tuples(RANKS, BLOCKS), max_size=30), st.integers(1, 4), st.integers(0, 30))
def test_who_believes_numbers_that_rise_alone_knows_each_rank_too(
    toggled: list[tuple[int, int]], length: int, missed_from: int
) -> None:
    """As vLLM's example of a subscriber: it takes no number that it has had."""
    history, always, lost = History(max_batches=length), Subscriber(), Subscriber()
    for number, (rank, block) in enumerate(toggled):
        there = (rank, "GPU", 0, block) in always.blocks
        text = payload(removed(block) if there else stored(block), rank=rank)
        assert history.add(text) == number
        always.take(text)
        if number < missed_from:
            lost.take(text)
    last = min(missed_from, len(toggled)) - 1
    for number, text in history.since(last + 1, NOW):
        assert number > last
        last = number
        lost.take(text)
    assert last == len(toggled) - 1
    assert lost.blocks == always.blocks


@given(st.lists(BLOCKS, max_size=30), st.integers(1, 4), st.integers(0, 30))
def test_who_comes_late_knows_what_others_know(
    toggled: list[int], length: int, missed_from: int
) -> None:
    history, always, lost = History(max_batches=length), Subscriber(), Subscriber()
    for number, block in enumerate(toggled):
        event = removed(block) if block in always.hashes else stored(block)
        history.add(text := payload(event))
        always.take(text)
        if number < missed_from:
            lost.take(text)
    assert late(history).blocks == always.blocks
    assert late(history, missed_from, lost).blocks == always.blocks
