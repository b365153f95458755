"""What a node's stream of KV events says of the copies of its engines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshm.tools.events.copies import NodeCopies, last_bits
from kvshm.tools.events.wire import Event

from .kv_events import CLEARED, Subscriber, batch, removed, stored


class Heard:
    """A node's copies, and a subscriber that hears all that is said of them."""

    def __init__(self, **options: int) -> None:
        self.copies = NodeCopies(**options)
        self.router = Subscriber()

    def tell(self, source: int, *events: Event, rank: int = 0) -> list[Event]:
        said = self.copies.apply(source, batch(*events, rank=rank))
        self.router.hear(said.events, said.rank)
        return said.events

    def forget(self, source: int) -> None:
        for said in self.copies.forget(source):
            self.router.hear(said.events, said.rank)

    def keep(self, *blocks: int) -> None:
        for said in self.copies.keep({(0, block) for block in blocks}):
            self.router.hear(said.events, said.rank)


def test_a_block_is_stored_with_its_first_copy_and_removed_with_its_last() -> None:
    heard = Heard()
    assert heard.tell(0, stored(1, 2)) == [stored(1, 2)]
    assert heard.tell(1, stored(1, 2)) == []
    assert heard.tell(0, removed(2, 1)) == []
    assert heard.tell(1, removed(2)) == [removed(2)]
    assert heard.router.hashes == {1}
    assert heard.tell(1, CLEARED) == [removed(1)]


def test_of_an_event_that_is_news_in_part_the_news_is_said_with_its_own_tokens() -> None:
    heard = Heard()
    heard.tell(0, stored(1), stored(3, parent=2))
    said = heard.tell(1, stored(1, 2, 3, 4, 5, new_field="x", of_each=[1, 2, 3, 4, 5]))
    assert said == [
        stored(2, parent=1, new_field="x", of_each=[2]),
        stored(4, 5, parent=3, new_field="x", of_each=[4, 5]),
    ]


def test_an_engine_that_stores_a_block_again_has_it_once() -> None:
    heard = Heard()
    heard.tell(0, stored(1), stored(1))
    assert heard.copies.count(0) == 1
    assert heard.tell(0, removed(1)) == [removed(1)]
    assert heard.tell(0, removed(1)) == []


def test_what_an_engine_removes_that_it_never_stored_leaves_the_others_copies() -> None:
    heard = Heard()
    heard.tell(0, stored(1))
    assert heard.tell(1, removed(1)) == []
    assert heard.copies.count(1) == 0
    heard.forget(1)
    assert heard.router.hashes == {1}


def test_groups_and_media_are_counted_apart() -> None:
    heard = Heard()
    heard.tell(0, stored(1), stored(1, group_idx=1), stored(1, medium="CPU"))
    heard.tell(0, removed(1, group_idx=1))
    assert set(heard.router.blocks) == {(0, "GPU", 0, 1), (0, "CPU", 0, 1)}


def test_blocks_of_which_vllm_left_out_some_keep_all_tokens_of_the_event() -> None:
    heard = Heard()
    sparse = stored(1, 3) | {"token_ids": list(range(8))}
    heard.copies.apply(0, batch(stored(3)))
    said = heard.copies.apply(1, batch(sparse)).events
    assert said == [sparse | {"block_hashes": [1], "extra_keys": [["salt 1"]]}]


def test_ranks_are_one_cache_unless_they_are_kept_apart(subtests: pytest.Subtests) -> None:
    for apart, ranks in ((False, {0}), (True, {0, 3})):
        with subtests.test(apart=apart):
            heard = Heard(apart=apart)
            heard.tell(0, stored(1), rank=0)
            heard.tell(1, stored(1), rank=3)
            assert {name[0] for name in heard.router.blocks} == ranks
            heard.forget(1)
            assert set(heard.router.blocks) == {(0, "GPU", 0, 1)}


def test_a_block_that_a_keeper_has_is_removed_when_the_keeper_lets_it_go() -> None:
    heard = Heard()
    heard.tell(0, stored(1, 2, 3))
    heard.keep(1, 2)
    assert heard.tell(0, removed(1, 2, 3)) == [removed(3)]
    assert heard.tell(1, stored(1)) == []  # it was never away
    heard.keep(2)
    assert heard.router.hashes == {1, 2}
    heard.keep()
    assert heard.router.hashes == {1}
    assert heard.tell(1, removed(1)) == [removed(1)]


def test_keepers_know_blocks_by_whole_hashes_and_have_none_of_other_media() -> None:
    heard = Heard()
    whole = bytes(range(32))
    assert last_bits(whole) == int.from_bytes(whole[-8:], "big")
    heard.keep(last_bits(whole))
    event = stored(1) | {"block_hashes": [whole], "extra_keys": [[f"salt {whole!r}"]]}
    heard.tell(0, event, event | {"medium": "CPU"})
    heard.tell(0, CLEARED)
    assert {name[1] for name in heard.router.blocks} == {"GPU"}


def test_an_engine_that_says_too_much_is_cut_short() -> None:
    heard = Heard(max_blocks=2)
    heard.tell(0, stored(1, 2, 3, 4))
    assert heard.router.hashes == {1, 2}
    heard.tell(0, removed(3, 1), stored(5))
    heard.tell(1, stored(3))
    assert heard.router.hashes == {2, 5, 3}


BLOCKS = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True)
KINDS = st.sampled_from(("store", "remove", "clear", "forget", "keep"))
STEPS = st.lists(st.tuples(KINDS, st.integers(0, 2), BLOCKS), max_size=40)


@given(STEPS)
def test_the_stream_tells_of_exactly_what_is_on_the_node(
    steps: list[tuple[str, int, list[int]]],
) -> None:
    heard = Heard()
    there: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    keepers: set[int] = set()
    told: set[int] = set()
    for what, source, blocks in steps:
        if what == "store":
            heard.tell(source, stored(*blocks))
            there[source] |= set(blocks)
        elif what == "remove":
            heard.tell(source, removed(*blocks))
            there[source] -= set(blocks)
        elif what == "keep":
            heard.keep(*blocks)
            keepers = set(blocks)
        else:
            heard.forget(source) if what == "forget" else heard.tell(source, CLEARED)
            there[source] = set()
        engines = set().union(*there.values())
        told = engines | (told & keepers)
        assert heard.router.hashes == told
