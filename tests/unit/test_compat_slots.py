"""kvshm.compat._slots: which masks and slot mappings are right in whole blocks of four tokens."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from kvshm.compat._slots import (
    MaskError,
    SlotMappingError,
    blocks_at,
    refuse_doubles,
    region_of_interest,
    wanted_runs,
)
from kvshm.errors import MisuseError

T, F = [True] * 4, [False] * 4


def test_a_mask_is_runs_of_whole_blocks(subtests: pytest.Subtests) -> None:
    for mask, num_tokens, runs in [
        (None, 8, [(0, 2)]),
        (None, 11, [(0, 2)]),
        (None, 3, []),
        ([], 0, []),
        ([*F, *T], 8, [(1, 2)]),
        ([*T, *F, *T, *T], 16, [(0, 1), (2, 4)]),
        ([*F, *F], 8, []),
        ([*T, True, False, True], 7, [(0, 1)]),
        (bytes([0] * 4 + [1] * 4), 8, [(1, 2)]),
        (array("b", [1] * 4 + [0] * 4), 8, [(0, 1)]),
    ]:
        with subtests.test(mask=mask, num_tokens=num_tokens, runs=runs):
            assert wanted_runs(mask, num_tokens, 4) == runs


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([*T, True, True, True, False], "tokens 4 to 7"),
        ([False, True, True, True, *T], "tokens 0 to 3"),
        ([*T, *F, *T], "12 values for 8 tokens"),
        (T, "4 values for 8 tokens"),
    ],
)
def test_a_mask_that_is_not_is_refused(mask: list[bool], says: str) -> None:
    with pytest.raises(MaskError, match=says):
        wanted_runs(mask, 8, 4)


def test_slots_in_order_are_blocks(subtests: pytest.Subtests) -> None:
    for slots, begin, end, blocks in [
        ([8, 9, 10, 11, 0, 1, 2, 3], 0, 8, [2, 0]),
        ([-1, -1, -1, -1, 0, 1, 2, 3], 4, 8, [0]),
        ([8, 9, 10, 11, 0, 1], 0, 6, [2, 0]),
        (array("q", [8, 9, 10, 11]), 0, 4, [2]),
        ([np.array(8), np.int32(9), 10, 11], 0, 4, [2]),
        ([], 0, 0, []),
    ]:
        with subtests.test(slots=slots, begin=begin, end=end, blocks=blocks):
            assert blocks_at(slots, begin, end, 4) == blocks


def test_other_slots_are_refused(subtests: pytest.Subtests) -> None:
    for slots in [
        [0, 1, 2, 3, 4, 6, 5, 7],
        [0, 1, 2, 3, 7, 6, 5, 4],
        [0, 1, 2, 3, 5, 6, 7, 8],
        [0, 1, 6, 7, 4, 5, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 8],
        [0, 1, 2, 3, -1, -1, -1, -1],
        [0, 1, 2, 3, -4, -3, -2, -1],
        [0, 1, 2, 3, 4, 4, 4, 4],
        [0, 1, 2, 3, 4, 5, 6],
    ]:
        with subtests.test(slots=slots), pytest.raises(SlotMappingError):
            blocks_at(slots, 0, 8, 4)


NO_NUMBERS = [None, 5, "01234567", ["0"] * 8, [None] * 8, np.zeros((2, 4), int), np.arange(8.0)]


def test_what_are_no_numbers_are_no_slots(subtests: pytest.Subtests) -> None:
    for slots in [*NO_NUMBERS, [np.arange(4), np.arange(4)]]:
        with subtests.test(slots=slots), pytest.raises(SlotMappingError, match="whole numbers"):
            blocks_at(slots, 0, 8, 4)


def test_what_is_no_mask_is_refused() -> None:
    for mask in (5, [np.arange(4), np.arange(4)]):
        with pytest.raises(MaskError, match="mask"):
            wanted_runs(mask, 8, 4)
        with pytest.raises(MaskError, match="roi"):
            region_of_interest(mask, 8)


def test_what_is_wrong_is_named_and_what_to_do() -> None:
    with pytest.raises(SlotMappingError, match=r"tokens 4 to 7 have slots 4 to 7.*block id \* "):
        blocks_at([0, 1, 2, 3, 4, 6, 5, 7], 0, 8, 4)
    with pytest.raises(SlotMappingError, match=r"\[3, 5\]"):
        refuse_doubles([3, 5, 2, 5, 3])
    assert issubclass(MaskError, MisuseError)
    assert issubclass(SlotMappingError, MisuseError)


def test_a_region_of_interest_is_a_prefix() -> None:
    assert region_of_interest(None, 3) == 3
    assert region_of_interest([True, True, False], 3) == 2
    assert region_of_interest([False, False], 2) == 0
    for roi in ([True, False, True], [False, True, True], [True, True]):
        with pytest.raises(MaskError, match="mark a prefix"):
            region_of_interest(roi, 3)
