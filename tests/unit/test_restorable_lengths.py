"""All lengths to which a prefix can be restored: what each alone says, and what they cost."""

from __future__ import annotations

import random

import pytest

from kvshm._api.lookups import restorable_lengths
from kvshm._engine.groups import Group, Groups
from kvshm._node.peer import PlannedRun

KEYS = 13
GROUPS = [
    [Group(0, 2), Group(1, 2)],
    [Group(0, 2), Group(1, 4, scale=2)],
    [Group(0, 2), Group(1, 2, window=5)],
    [Group(0, 2, ahead=1), Group(1, 2, window=4, ahead=1)],
    [Group(0, 6, scale=3), Group(1, 4, scale=2, window=5), Group(2, 2, chunk=8)],
    [Group(0, 2, window=6)],
    [Group(0, 2, window=6, ahead=1)],
    [Group(0, 2, chunk=6)],
]


class Holders:
    def __init__(self, held: set[tuple[int, int]]) -> None:
        self.held = held
        self.asked = 0

    def find(self, group: Group, first: int, stop: int) -> tuple[list[PlannedRun], int]:
        self.asked += stop - first
        while first < stop and (group.number, first) in self.held:
            first += 1
        return [], first


def can_be_restored(
    groups: list[Group], held: set[tuple[int, int]], start: int, length: int
) -> bool:
    """Whether each group has every block that this length needs, one of them behind the start."""
    loaded = 0
    for group in groups:
        first, end = group.needed(start, length)
        needed = range(first, end + group.ahead)
        if length % group.scale or (end + group.ahead) * group.scale > KEYS:
            return False
        if any((group.number, index) not in held for index in needed):
            return False
        loaded += max(0, end - first)
    return loaded > 0


def test_each_length_that_can_be_restored_is_reported(subtests: pytest.Subtests) -> None:
    for groups in GROUPS:
        with subtests.test(groups=groups):
            draw, all_groups, reported = random.Random(7), Groups(groups), 0
            for _ in range(300):
                rate = draw.choice([0.5, 0.8, 0.95, 1.0])
                held = {(g.number, i) for g in groups for i in range(KEYS) if draw.random() < rate}
                start = draw.randrange(0, KEYS, all_groups.step)
                longest = draw.randrange(start, KEYS + 1)
                lengths = restorable_lengths(all_groups, start, longest, KEYS, Holders(held).find)
                each = range(start + 1, longest + 1)
                assert list(lengths) == [n for n in each if can_be_restored(groups, held, start, n)]
                reported += len(lengths)
            assert reported > 50


@pytest.mark.parametrize("every", [1, 2, 5], ids="held but each {}th".format)
def test_each_block_is_asked_for_only_some_times(every: int) -> None:
    keys, full, window = 2000, Group(0, 2), Group(1, 2, window=4)
    held = {(0, index) for index in range(keys)}
    held |= {(1, index) for index in range(keys) if every == 1 or index % every}
    holders = Holders(held)
    lengths = restorable_lengths(Groups([full, window]), 0, keys, keys, holders.find)
    assert len(lengths) == {1: 2000, 2: 0, 5: 1200}[every]
    assert holders.asked < 70 * keys
