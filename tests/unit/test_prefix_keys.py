"""Keys: equal keys mean equal prefixes, and the same prompt has the same keys for ever."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvshm import MisuseError, prefix_keys

tokens = st.lists(st.integers(0, 3), max_size=9)
texts = st.sampled_from([b"", b"a", b"aa"])  # few, so that cut otherwise they are often alike
extras = texts | st.dictionaries(st.integers(0, 8), texts, max_size=2)


def last(prompt: list[int], size: int, salt: bytes = b"", extra: Any = b"") -> bytes | None:
    """The key of the whole prompt's full blocks, which covers all of them."""
    return next(reversed(prefix_keys(prompt, size, salt=salt, extra=extra)), None)


def test_keys_never_change() -> None:
    plain = prefix_keys(range(5), 2)
    assert [key.hex()[:16] for key in plain] == KNOWN[:2]
    salted = prefix_keys(range(4), 4, salt=b"tenant", extra=b"adapter")
    images = prefix_keys([7, 2**32 - 1], 1, extra={1: b"cat"})
    assert [key.hex()[:16] for key in (*salted, *images)] == KNOWN[2:]


KNOWN = [
    "6694b2138f669e8e",
    "702a6f381f3912e3",
    "23e12198b7f99674",
    "62e73c646b2e1e7a",
    "37ccb0548399aa80",
]


def test_only_full_blocks_have_keys() -> None:
    assert [len(prefix_keys(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert prefix_keys(range(11), 4) == prefix_keys(range(8), 4)


@given(tokens, st.integers(1, 4), texts, extras, st.integers(0, 9))
def test_keys_of_a_shorter_part_need_not_be_computed_again(
    prompt: list[int], size: int, salt: bytes, extra: Any, count: int
) -> None:
    prompt += [0] * (9 - len(prompt))  # so that no extra is outside
    whole = prefix_keys(prompt, size, salt=salt, extra=extra)
    known = [bytes(32) for _ in whole[:count]]  # never looked at, but for the last
    known[-1:] = whole[len(known) - 1 : len(known)] if known else []
    again = prefix_keys(prompt, size, salt=salt, extra=extra, known=known)
    assert again == known + whole[len(known) :]
    assert prefix_keys(prompt, size, salt=salt, extra=extra, known=[*whole, bytes(32)]) == whole


@given(tokens, st.integers(1, 4), texts, extras)
def test_a_prefix_has_the_keys_of_its_prompt(
    prompt: list[int], size: int, salt: bytes, extra: bytes | Mapping[int, bytes]
) -> None:
    whole = {} if isinstance(extra, bytes) else extra
    prompt += [0] * (9 - len(prompt))
    keys = prefix_keys(prompt, size, salt=salt, extra=extra)
    for end in range(len(prompt)):
        if all(token < end for token in whole):
            assert prefix_keys(prompt[:end], size, salt=salt, extra=extra) == keys[: end // size]


parts = st.tuples(tokens, st.integers(1, 4), texts, extras)


@given(parts, parts, st.lists(st.booleans(), min_size=4, max_size=4))
def test_different_prefixes_have_different_keys(one: Any, other: Any, same: list[bool]) -> None:
    """Whatever decides a prefix decides its key, however it is spread over salt and extra."""
    other = tuple(a if alike else b for a, b, alike in zip(one, other, same, strict=True))
    keys = []
    for prompt, size, salt, extra in (one, other):
        full = len(prompt) // size * size
        counted = extra or b""
        if isinstance(extra, dict):
            extra = {token: value for token, value in extra.items() if token < len(prompt)}
            counted = {token: value for token, value in extra.items() if token < full} or b""
        key = last(prompt, size, salt, extra)
        keys.append((key, key and (prompt[:full], size, salt, counted)))
    (key, meant), (other_key, other_meant) = keys
    assert (key == other_key) == (meant == other_meant)


@given(st.binary(max_size=4), st.integers(0, 4), st.integers(0, 4))
def test_salt_and_extra_do_not_run_into_each_other(text: bytes, cut: int, other: int) -> None:
    one, two = (
        last([1], 1, text[:at], text[at:]) for at in (min(cut, len(text)), min(other, len(text)))
    )
    assert (one == two) == (min(cut, len(text)) == min(other, len(text)))


def test_an_extra_counts_from_its_block_on() -> None:
    plain, image = prefix_keys(range(8), 2), prefix_keys(range(8), 2, extra={5: b"cat"})
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, True, False, False]
    assert image != prefix_keys(range(8), 2, extra={4: b"cat"})
    adapter = prefix_keys(range(8), 2, extra=b"cat")
    assert not set(adapter) & {*plain, *image}


@pytest.mark.parametrize(
    "same",
    [(1, 2, 3, 4), range(1, 5), array("q", [1, 2, 3, 4]), b"\1\2\3\4"],
    ids=lambda same: type(same).__name__,
)
def test_any_sequence_of_tokens_will_do(same: Any) -> None:
    assert prefix_keys(same, 2) == prefix_keys([1, 2, 3, 4], 2)


def test_numbers_of_numpy_will_do() -> None:
    one: Any = np.int64(1)
    made = prefix_keys(np.arange(1, 5), 2 * one, extra={one: b"cat"})
    assert made == prefix_keys([1, 2, 3, 4], 2, extra={1: b"cat"})


def test_what_is_no_prompt_is_refused(subtests: pytest.Subtests) -> None:
    for prompt, size, more, reported in [
        ([1, -1], 1, {}, "whole numbers from 0"),
        ([2**32], 1, {}, "whole numbers from 0"),
        ([1.5], 1, {}, "whole numbers from 0"),
        ("ab", 1, {}, "whole numbers from 0"),
        (None, 1, {}, "whole numbers from 0"),
        ([1], 0, {}, "tokens of a block, 1 or more"),
        ([1], -4, {}, "tokens of a block, 1 or more"),
        ([1], 1.5, {}, "give a whole number"),
        ([1], None, {}, "give a whole number"),
        ([1], 2**64, {}, "tokens of a block, 1 or more"),
        ([1], 1, {"salt": "tenant"}, "salt is bytes, not str; encode it"),
        ([1], 1, {"salt": None}, "salt is bytes"),
        ([1], 1, {"extra": "cat"}, "extra is bytes"),
        ([1], 1, {"extra": {0: "cat"}}, "extra is bytes"),
        ([1], 1, {"extra": {1: b"cat"}}, "the prompt has 1 tokens"),
        ([1], 1, {"extra": {-1: b"cat"}}, "the prompt has 1 tokens"),
        ([1], 1, {"extra": {"0": b"cat"}}, "give a whole number"),
        ([1], 1, {"extra": {0: b"cat", "0": b"cat"}}, "give a whole number"),
        ([1], 1, {"known": b"k" * 32}, "give a list of them"),
    ]:
        with (
            subtests.test(prompt=prompt, size=size, more=more, reported=reported),
            pytest.raises(MisuseError, match=reported),
        ):
            prefix_keys(prompt, size, **more)
