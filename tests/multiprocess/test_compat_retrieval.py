"""kvshm.compat.retrieval between two processes: what LMCache's engine is asked, byte by byte."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from kvshm.api import Found
from kvshm.compat.lookup_buffer import NOTHING
from kvshm.compat.retrieval import CopyRefused, MaskError, Place, SlotMappingError
from kvshm.errors import MisuseError

from .compat_engine import BLOCK_SIZE, slots_of
from .compat_nodes import Calls, calls_on
from .processes import Node, wait_until

TOKENS = list(range(100, 100 + 5 * BLOCK_SIZE))
T, F = [True] * BLOCK_SIZE, [False] * BLOCK_SIZE


@pytest.fixture
def calls(node: Node) -> Iterator[Calls]:
    with calls_on(node) as calls:
        yield calls


def retrieve(
    calls: Calls, blocks: list[int], mask: Any = None, tokens: list[int] = TOKENS
) -> list[bool]:
    result = calls.own.calls.retrieve(tokens, mask, slots_of(blocks, len(tokens)))
    for number in range(len(tokens) // BLOCK_SIZE):
        of_block = result[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
        assert of_block in (T, F)
        if of_block == T:
            calls.own.expect(tokens, number, blocks[number])
    return result


def test_an_engine_finds_what_it_has_stored(calls: Calls) -> None:
    tokens = [*TOKENS, 1, 2, 3]
    calls.own.compute(tokens, [3, 1, 4, 0, 5, 9])
    assert calls.own.calls.lookup(tokens) == 0
    assert calls.own.calls.store(tokens, None, slots_of([3, 1, 4, 0, 5, 9], 23)) == 20
    assert calls.own.calls.lookup(tokens) == 20
    assert calls.own.calls.contains(tokens) == (Place("", "own", 20),)
    assert calls.own.calls.lookup_batch([TOKENS[:8], [5, *TOKENS], TOKENS[:3]]) == [8, 0, 0]


def test_another_engine_finds_it_and_loads_it_into_scattered_blocks(calls: Calls) -> None:
    other = calls.other()
    assert other.do("store", TOKENS, [2, 0, 7, 5, 11]) == 20
    calls.wait_found(TOKENS)
    (place,) = calls.own.calls.contains(TOKENS)
    assert (place.tier, place.num_tokens) == ("posix_shm", 20)
    assert str(other.process.pid) in place.owner
    assert calls.own.calls.lookup(TOKENS) == 20
    assert retrieve(calls, [9, 3, 0, 8, 1]) == [True] * 20


def test_arrays_and_views_do_as_well_as_lists(calls: Calls) -> None:
    calls.other().do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    slots = array("q", slots_of([9, 3, 0, 8, 1], 20))
    result = calls.own.calls.retrieve(array("i", TOKENS), bytes([1] * 20), memoryview(slots))
    assert result == [True] * 20
    for number, block in enumerate([9, 3, 0, 8, 1]):
        calls.own.expect(TOKENS, number, block)


def test_what_the_mask_leaves_out_is_not_loaded(calls: Calls) -> None:
    """Not a byte of it: at the beginning, in a hole, in several, nowhere."""
    calls.other().do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    for mask in (
        [*F, *F, *T, *T, *T],
        [*F, *F, *F, *F, *F],
        [*T, *F, *T, *T, *F],
        [*T, *F, *T, *F, *T],
    ):
        calls.own.forget()
        assert retrieve(calls, [9, 3, 0, 8, 1], mask) == mask
        assert calls.own.wrong_blocks() == []


def test_a_block_that_no_one_has_ends_it(calls: Calls) -> None:
    """Although the blocks behind it could be had."""
    other = calls.other()
    other.do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    other.do("retract", [2])
    wait_until(lambda: calls.own.calls.lookup(TOKENS) == 8, "the retract")
    assert retrieve(calls, [9, 3, 0, 8, 1]) == [*T, *T, *F, *F, *F]
    assert retrieve(calls, [9, 3, 0, 8, 1], [*T, *F, *T, *T, *T]) == [*T, *F, *F, *F, *F]
    assert retrieve(calls, [9, 3, 0, 8, 1], [*T, *T, *T, *F, *T]) == [*T, *T, *F, *F, *F]


def test_a_load_that_fails_ends_it(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the first block is killed between lookup and load; the blocks behind the hole
    come from another one, but without the first they are no prefix."""
    killed, living = calls.other(), calls.other()
    killed.do("store", TOKENS[:4], [0])
    calls.wait_found(TOKENS[:4])
    living.do("store", [*TOKENS], [0, 1, 2, 3, 4])
    living.do("retract", [0])
    node, lookup = calls.own.node, calls.own.node.lookup
    wait_until(lambda: lookup(node.keys(TOKENS), 1).length == 5, "blocks of the other")
    wait_until(lambda: len(lookup(node.keys(TOKENS)).owners) == 2, "the retract")

    def lookup_and_kill(keys: list[bytes], start: int = 0) -> Found:
        found = lookup(keys, start)
        killed.process.kill()
        return found

    monkeypatch.setattr(node, "lookup", lookup_and_kill)
    result = calls.own.calls.retrieve(TOKENS, [*T, *F, *T, *T, *T], slots_of([9, 3, 0, 8, 1], 20))
    assert result == [False] * 20
    assert node.stats()["loads_done"] == 1
    for number, block in ((2, 0), (3, 8), (4, 1)):
        calls.own.expect(TOKENS, number, block)


def test_a_block_that_no_one_has_may_be_in_a_hole(calls: Calls) -> None:
    other = calls.other()
    other.do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    other.do("retract", [2])
    wait_until(lambda: calls.own.calls.lookup(TOKENS) == 8, "the retract")
    assert retrieve(calls, [9, 3, 0, 8, 1], [*T, *T, *F, *T, *T]) == [*T, *T, *F, *T, *T]


def test_the_tail_behind_the_last_full_block_is_not_looked_at(calls: Calls) -> None:
    """Neither its mask nor its slots, of which there need not be any."""
    calls.other().do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    tokens, slots = [*TOKENS[:8], 1, 2, 3], slots_of([6, 5], 8)
    result = calls.own.calls.retrieve(tokens, [*T, *T, True, False, True], slots)
    assert result == [*T, *T, False, False, False]
    calls.own.expect(TOKENS, 0, 6)
    calls.own.expect(TOKENS, 1, 5)


REFUSED = {
    "mixed mask": ([*T, True, False, True, True], slots_of([0, 1], 8), MaskError),
    "permuted": ([*T, *T], [0, 1, 2, 3, 4, 6, 5, 7], SlotMappingError),
    "in another request": ([*T, *T], slots_of([0, 7], 8), SlotMappingError),
    "not own": ([*T, *T], slots_of([0, 400], 8), MisuseError),
}


def test_what_cannot_be_right_is_refused_and_changes_nothing(calls: Calls) -> None:
    """Nothing is loaded, also for a request of the same batch that is right, and no one's block
    stays leased."""
    other = calls.other()
    other.do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    right = (TOKENS, None, slots_of([7, 8, 9, 10, 11], 20))
    for what, (mask, slots, error) in REFUSED.items():
        with pytest.raises(error):
            calls.own.calls.retrieve_batch([right, (TOKENS[:8], mask, slots)])
        assert calls.own.wrong_blocks() == [], what
    assert calls.own.node.stats()["loads_started"] == 0
    other.do("retract", [0, 1, 2, 3, 4])
    wait_until(lambda: calls.own.calls.lookup(TOKENS) == 0, "the retract")


def test_a_batch_is_loaded_as_its_requests_are(calls: Calls) -> None:
    first, second = calls.other(), calls.other()
    first.do("store", TOKENS[:8], [4, 6])
    second.do("store", [7] * 8, [4, 6])
    calls.wait_found(TOKENS[:8])
    calls.wait_found([7] * 8)
    requests = [(TOKENS[:8], None, slots_of([2, 0], 8)), ([7] * 8, [*F, *T], slots_of([1, 3], 8))]
    assert calls.own.calls.retrieve_batch(iter(requests)) == [[*T, *T], [*F, *T]]
    calls.own.expect(TOKENS, 0, 2)
    calls.own.expect(TOKENS, 1, 0)
    calls.own.expect([7] * 8, 1, 3)


def test_own_blocks_and_those_of_others_are_one_prefix(calls: Calls) -> None:
    calls.other().do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    calls.own.store(TOKENS[:8], [5, 6])
    own, there = calls.own.calls.contains(TOKENS)
    assert (own.tier, own.num_tokens, there.num_tokens) == ("own", 8, 12)
    assert retrieve(calls, [5, 6, 0, 1, 2], [*F, *F, *T, *T, *T]) == [*F, *F, *T, *T, *T]


def test_blocks_that_were_published_are_retracted_before_they_are_loaded_into(
    calls: Calls,
) -> None:
    calls.other().do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    calls.own.store([9] * 8, [3, 4])
    assert retrieve(calls, [4, 3, 0, 1, 2]) == [True] * 20
    assert calls.own.calls.lookup([9] * 8) == 0


def test_nothing_is_copied_at_export(calls: Calls) -> None:
    for arguments in ({"kv": b"bytes", "slot_mapping": [0, 1, 2, 3]}, {}):
        with pytest.raises(CopyRefused, match="slot_mapping"):
            calls.own.calls.store(TOKENS[:4], **arguments)
    assert calls.own.calls.lookup(TOKENS) == 0


def test_a_store_with_a_mask_publishes_what_it_marks(calls: Calls) -> None:
    calls.own.compute(TOKENS, [0, 1, 2, 3, 4])
    slots = slots_of([0, 1, 2, 3, 4], 20)
    assert calls.own.calls.store(TOKENS, [*F, *T, *T, *F, *F], slots) == 8
    keys = calls.own.node.keys(TOKENS)
    assert calls.own.node.contains(keys) == ["", "own", "own", "", ""]
    with pytest.raises(MaskError, match="hole"):
        calls.own.calls.store(TOKENS, [*T, *F, *F, *T, *F], slots)
    with pytest.raises(SlotMappingError):
        calls.own.calls.store(TOKENS, None, slots_of([7, 8, 9, 8, 10], 20))
    assert calls.own.node.contains(keys) == ["", "own", "own", "", ""]


def test_clear_withdraws_the_named_tokens_or_all(calls: Calls) -> None:
    calls.own.store(TOKENS, [0, 1, 2, 3, 4])
    calls.own.store([9] * 8, [5, 6])
    with pytest.raises(MisuseError, match="slot_mapping"):
        calls.own.calls.clear(TOKENS)
    calls.own.calls.clear([9] * 8, slots_of([5, 6], 8))
    assert calls.own.calls.lookup_batch([TOKENS, [9] * 8]) == [20, 0]
    calls.own.calls.clear()
    assert calls.own.calls.lookup(TOKENS) == 0


def test_what_another_engine_has_cleared_is_gone(calls: Calls) -> None:
    other = calls.other()
    other.do("store", TOKENS, [0, 1, 2, 3, 4])
    calls.wait_found(TOKENS)
    other.do("clear")
    wait_until(lambda: calls.own.calls.lookup(TOKENS) == 0, "the end of its epoch")
    assert retrieve(calls, [9, 3, 0, 8, 1]) == [False] * 20


def test_the_owners_know_what_was_pinned(calls: Calls) -> None:
    other = calls.other()
    other.do("store", TOKENS[:12], [4, 6, 2])
    calls.wait_found(TOKENS[:12])
    calls.own.store([9] * 8, [5, 3])
    assert calls.own.calls.pin([8] * 8) == 0
    assert (other.do("kept", [4, 6, 2]), calls.own.node.kept([5, 3])) == ([], [])
    assert calls.own.calls.pin(TOKENS[:8], 600.0) == 8
    assert calls.own.calls.pin([9] * 9, 600.0) == 8
    assert (other.do("kept", [4, 6, 2]), calls.own.node.kept([5, 3])) == ([4, 6], [5, 3])


def test_statistics_count_requests_and_tokens(calls: Calls) -> None:
    calls.other().do("store", TOKENS[:12], [4, 6, 2])
    calls.wait_found(TOKENS[:12])
    calls.own.calls.lookup_batch([TOKENS, [9] * 5])
    retrieve(calls, [9, 3, 0, 8, 1], [*F, *T, *T, *T, *T])
    calls.own.store([9] * 8, [5, 6])
    stats = calls.own.calls.stats()
    assert stats["peers"] == 1
    counted = {"lookups": 2, "lookup_tokens": 25, "hit_tokens": 12, "retrieves": 1}
    counted |= {"retrieve_tokens": 16, "retrieved_tokens": 8, "stores": 1, "stored_tokens": 8}
    assert counted.items() <= stats.items()


def test_without_a_coordinator_all_is_a_miss(node: Node) -> None:
    """Nothing is raised and nothing waits; what is stored can be read once there is one."""
    calls = Calls(node)
    try:
        own = calls.own
        assert own.store([9] * 8, [5, 6]) == 0
        assert own.calls.retrieve(TOKENS, None, slots_of([9, 3, 0, 8, 1], 20)) == [False] * 20
        assert own.calls.lookup_batch([TOKENS, [9] * 8]) == [0, 8]
        assert own.calls.pin(TOKENS) == 0
        assert own.buffer.drop_select(None, None, []) == NOTHING
        own.buffer.close()
        node.coordinator()
        other = calls.other()
        other.do("store", TOKENS, [0, 1, 2, 3, 4])
        calls.wait_found(TOKENS)
        assert retrieve(calls, [9, 3, 0, 8, 1]) == [True] * 20
        assert other.do("found", [9] * 8) == 8
        assert own.wrong_blocks() == []
    finally:
        calls.own.close()
