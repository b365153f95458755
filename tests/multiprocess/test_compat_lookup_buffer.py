"""kvshm.compat.lookup_buffer between two processes: what vLLM V0 asked its buffer, byte by byte."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvshm.compat.lookup_buffer import (
    NOTHING,
    LookupBuffer,
    MaskError,
    RowTooSmall,
    Selected,
    SlotMappingError,
)
from kvshm.errors import MisuseError

from .compat_engine import BLOCK_SIZE, ROW_BYTES, slots_of
from .compat_nodes import Calls, Other, calls_on
from .processes import PATIENCE_SECONDS, Node, wait_until

TOKENS = list(range(100, 110))
HIDDEN = b"hidden states of the last token"


@pytest.fixture
def calls(node: Node) -> Iterator[Calls]:
    with calls_on(node) as calls:
        yield calls
        calls.own.buffer.close()


@pytest.fixture
def other(calls: Calls) -> Other:
    other = calls.other()
    assert calls.own.buffer.drop_select(TOKENS, None, slots_of([0, 1, 2], 10)) == NOTHING
    assert other.do("insert", TOKENS, [5, 3, 8], HIDDEN.hex()) == 10
    return other


def select(
    calls: Calls,
    tokens: list[int],
    blocks: list[int],
    *,
    roi: list[bool] | None = None,
    timeout: float = PATIENCE_SECONDS,
) -> Selected:
    slots = slots_of(blocks, len(tokens))
    selected = calls.own.buffer.drop_select(tokens, roi, slots, timeout)
    if selected.tokens is not None:
        assert selected.roi == [True] * len(selected.tokens)
        for number in range(-(-len(selected.tokens) // BLOCK_SIZE)):
            calls.own.expect(selected.tokens, number, blocks[number])
    return selected


def test_a_full_hit_has_all_kv_and_the_hidden_states(calls: Calls, other: Other) -> None:
    assert select(calls, TOKENS, [2, 0, 7]) == Selected(TOKENS, [True] * 10, HIDDEN)
    whole = list(range(8))
    assert other.do("insert", whole, [0, 1], "") == 8
    assert select(calls, whole, [1, 3]) == Selected(whole, [True] * 8, b"")


def test_a_longer_or_shorter_prompt_has_the_common_prefix_only(calls: Calls, other: Other) -> None:
    """In whole blocks, and no hidden states, which belong to another token."""
    calls.wait_found(TOKENS, 8)
    for tokens in ([*TOKENS, 7, 7, 7], TOKENS[:9], [*TOKENS[:9], 7], TOKENS[:8]):
        assert select(calls, tokens, [2, 0, 7, 9], timeout=0.0).tokens == TOKENS[:8]
        assert calls.own.buffer.drop_select(tokens, None, slots_of([2, 0, 7, 9], 13)).hidden is None
    assert select(calls, TOKENS[:7], [4, 6], timeout=0.0).tokens == TOKENS[:4]
    assert select(calls, [7, *TOKENS], [4, 6, 10], timeout=0.0) == NOTHING


def test_a_region_of_interest_is_what_counts(calls: Calls, other: Other) -> None:
    tokens, roi = [*TOKENS, 1, 2, 3], [*[True] * 10, False, False, False]
    assert select(calls, tokens, [2, 0, 7, 9], roi=roi).hidden == HIDDEN
    for wrong in ([False, *roi[1:]], [True, False, *roi[2:]], roi[:-1]):
        with pytest.raises(MaskError, match="mark a prefix"):
            calls.own.buffer.drop_select(tokens, wrong, slots_of([2, 0, 7, 9], 13))
        with pytest.raises(MaskError, match="mark a prefix"):
            calls.own.buffer.insert(tokens, wrong, slots_of([2, 0, 7, 9], 13))
    with pytest.raises(MisuseError, match="at least one"):
        calls.own.buffer.insert(tokens, [False] * 13, [])


def test_prefixes_are_selected_in_any_order(calls: Calls, other: Other) -> None:
    """And the oldest makes room: the other process keeps rows of three."""
    prompts = [[number] * 6 for number in range(5)]
    for number, tokens in enumerate(prompts):
        hidden = bytes([number] * 20).hex()
        assert other.do("insert", tokens, [2 * number, 2 * number + 1], hidden) == 6
    for number in random.Random(1).sample(range(5), 5):
        select(calls, prompts[number], [3, 8], timeout=PATIENCE_SECONDS if number > 1 else 0.0)
    wait_until(lambda: select(calls, TOKENS[:8], [4, 5], timeout=0.0) == NOTHING, "block reuse")
    for number in random.Random(2).sample(range(5), 5):
        hidden = None if number < 2 else bytes([number] * 20)
        wait_until(
            lambda n=number, h=hidden: (
                select(calls, prompts[n], [3, 8], timeout=0.0)  # type: ignore[misc]  # defaults bind the loop's values
                == Selected(prompts[n], [True] * 6, h)
            ),
            f"prefix {number}",
        )


def test_any_prefix_will_do(calls: Calls, other: Other) -> None:
    assert other.do("insert", [7] * 6, [0, 1], None) == 6
    slots, got = slots_of([2, 0, 7], 10), [NOTHING]

    def selects() -> bool:
        got.append(calls.own.buffer.drop_select(None, None, slots))
        return got[-1] != NOTHING

    wait_until(selects, "a row and its blocks")
    assert got[-1] in [Selected(TOKENS, [True] * 10, HIDDEN), Selected([7] * 6, [True] * 6, None)]
    tokens = got[-1].tokens or []
    for number, block in enumerate([2, 0, 7][: -(-len(tokens) // BLOCK_SIZE)]):
        calls.own.expect(tokens, number, block)


def test_a_prefix_that_is_longer_than_the_slots_is_left_out(calls: Calls, other: Other) -> None:
    calls.wait_found(TOKENS, 8)
    assert select(calls, TOKENS, [2, 0, 7]).hidden == HIDDEN  # its row is known
    assert calls.own.buffer.drop_select(None, None, slots_of([4, 6], 8)) == NOTHING
    assert other.do("insert", [7] * 6, [0, 1], "aa") == 6
    assert select(calls, [7] * 6, [9, 10]).hidden == b"\xaa"
    selected = calls.own.buffer.drop_select(None, None, slots_of([9, 10], 8))
    assert selected == Selected([7] * 6, [True] * 6, b"\xaa")
    with pytest.raises(SlotMappingError):
        calls.own.buffer.drop_select(None, None, None)


def test_hidden_states_may_be_numbers(calls: Calls) -> None:
    """An object's bytes count, not its items."""
    states, reader = array("f", range(8)), calls.engine()
    try:
        assert reader.node.wait_joined(PATIENCE_SECONDS)
        calls.own.compute(TOKENS[:4], [5])
        calls.own.buffer.insert(TOKENS[:4], None, slots_of([5], 4), states)
        selected = reader.buffer.drop_select(
            TOKENS[:4], None, slots_of([2], 4), timeout=PATIENCE_SECONDS
        )
        assert selected.hidden == states.tobytes()
    finally:
        reader.close()


def test_no_one_has_any_prefix(calls: Calls) -> None:
    """What this process has inserted itself does not count, nor what a cache merely holds."""
    other = calls.other()
    other.do("store", TOKENS, [5, 3, 8])
    calls.wait_found(TOKENS, 8)
    calls.own.insert([7] * 6, [0, 1], None)
    assert calls.own.buffer.drop_select(None, None, slots_of([2, 9, 7], 10)) == NOTHING


def test_without_all_of_its_kv_a_prefix_has_no_hidden_states(calls: Calls, other: Other) -> None:
    assert select(calls, TOKENS, [2, 0, 7]).hidden == HIDDEN
    other.do("retract", [3])
    wait_until(
        lambda: (
            select(calls, TOKENS, [2, 0, 7], timeout=0.0) == Selected(TOKENS[:4], [True] * 4, None)
        ),
        "the retract",
    )
    assert calls.own.buffer.drop_select(None, None, slots_of([2, 0, 7], 10)) == NOTHING
    other.do("retract", [5, 8])
    wait_until(lambda: select(calls, TOKENS, [4, 6, 9], timeout=0.0) == NOTHING, "the retract")
    assert calls.own.buffer.drop_select(None, None, slots_of([2, 0, 7], 10)) == NOTHING


def test_a_last_block_that_is_not_full_has_all_tokens_before_it_in_its_key(
    calls: Calls, other: Other
) -> None:
    for number, blocks in ((1, [0, 1]), (2, [2, 4])):
        assert other.do("insert", [number] * 4 + [9, 9], blocks, bytes([number]).hex()) == 6
    for number, blocks in ((1, [0, 1]), (2, [2, 4])):
        assert select(calls, [number] * 4 + [9, 9], blocks).hidden == bytes([number])


def test_blocks_that_were_published_are_retracted_before_they_are_loaded_into(
    calls: Calls, other: Other
) -> None:
    calls.own.insert([7] * 6, [2, 0], None)
    assert select(calls, TOKENS, [2, 0, 7]).hidden == HIDDEN
    assert calls.own.calls.lookup([7] * 6) == 0


def test_hidden_states_are_waited_for_like_kv(calls: Calls) -> None:
    """The KV was loaded before the row was there."""
    other = calls.other()
    assert calls.own.buffer.drop_select([8] * 8, None, slots_of([0, 1], 8)) == NOTHING
    other.do("store", TOKENS[:8], [5, 3])
    with ThreadPoolExecutor(1) as pool:
        selected = pool.submit(select, calls, TOKENS[:8], [2, 0])
        wait_until(lambda: calls.own.node.stats()["loads_done"] == 1, "the load")
        assert other.do("insert", TOKENS[:8], [9, 10], HIDDEN.hex()) == 8
        assert selected.result().hidden == HIDDEN


def test_another_models_rows_are_not_found(calls: Calls, other: Other) -> None:
    stranger = calls.other("another model")
    for tokens, blocks in (([7] * 6, [0, 1]), ([9] * 8, [2, 4])):
        assert stranger.do("insert", tokens, blocks, b"theirs".hex()) == len(tokens)
    assert other.do("store", [9] * 8, [2, 4]) == 8
    assert other.do("insert", [8] * 6, [0, 1], b"ours".hex()) == 6
    assert select(calls, [8] * 6, [2, 0]).hidden == b"ours"  # and what was said before is known
    assert select(calls, [7] * 6, [9, 10], timeout=0.0) == NOTHING
    assert select(calls, [9] * 8, [9, 10], timeout=0.0) == Selected([9] * 8, [True] * 8, None)


def test_what_does_not_fit_is_refused_and_nothing_is_published(calls: Calls) -> None:
    calls.own.compute([7] * 6, [0, 1])
    with pytest.raises(RowTooSmall, match=f"a row has {ROW_BYTES}"):
        calls.own.buffer.insert([7] * 6, None, slots_of([0, 1], 6), bytes(ROW_BYTES - 31))
    with pytest.raises(SlotMappingError):
        calls.own.buffer.insert([7] * 6, None, [0, 1, 2, 3, 5, 6])
    with pytest.raises(MisuseError, match="capacity"):
        LookupBuffer(calls.own.node, calls.own.identity, capacity=0, row_bytes=64)
    assert (calls.own.calls.lookup([7] * 6), len(calls.own.buffer)) == (0, 0)
    hidden = bytes(ROW_BYTES - 32)
    assert calls.own.buffer.insert([7] * 6, None, slots_of([0, 1], 6), hidden) == 6
    assert len(calls.own.buffer) == 1
