"""Which blocks a prompt needs of a store: the same prefix that an engine's own search would find in
them, and the blocks of that prefix."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshm._engine.groups import Group, Groups
from kvshm._engine.store_asks import Lacking, Wanted, decode_wanted, encode
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import RECORD_BYTES
from kvshm.api import BlockName
from kvshm.tools.keeper.wanted import Prompt

TOKENS = 16
KINDS: list[Callable[[int], Group]] = [
    lambda n: Group(n, TOKENS),
    lambda n: Group(n, TOKENS, ahead=1),
    lambda n: Group(n, 2 * TOKENS, scale=2),
    lambda n: Group(n, TOKENS, window=2 * TOKENS + 1),
    lambda n: Group(n, TOKENS, window=3 * TOKENS, ahead=1),
    lambda n: Group(n, 2 * TOKENS, scale=2, window=3 * TOKENS),
    lambda n: Group(n, TOKENS, chunk=4 * TOKENS),
    lambda n: Group(n, TOKENS, state=True),
    lambda n: Group(n, 2 * TOKENS, scale=2, state=True),
]


class Held:
    """What somebody has, as an engine's search looks for it."""

    def __init__(self, hashes: list[bytes], held: set[BlockName]) -> None:
        self._hashes, self._held = hashes, held

    def _has(self, group: Group, index: int) -> bool:
        return BlockName(self._hashes[(index + 1) * group.scale - 1], group.number) in self._held

    def __call__(self, group: Group, first: int, stop: int) -> tuple[list[PlannedRun], int]:
        end = first
        while end < stop and self._has(group, end):
            end += 1
        peer: Any = None
        runs = [PlannedRun(peer, bytes(RECORD_BYTES * (end - first)))] if end > first else []
        return runs, end

    def last(self, group: Group, start: int, stop: int) -> int:
        return next((i + 1 for i in range(stop - 1, start - 1, -1) if self._has(group, i)), start)


@given(
    kinds=st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=3),
    count=st.integers(1, 12),
    start=st.integers(0, 8),
    ends=st.integers(0, 2),
    data=st.data(),
)
def test_it_is_what_an_engines_search_would_find(
    kinds: list[int], count: int, start: int, ends: int, data: st.DataObject
) -> None:
    groups = Groups([KINDS[kind](number) for number, kind in enumerate(kinds)])
    start = min(start - start % groups.step, count)
    stop = max(count - ends, start)
    hashes = [sha256(bytes([i])).digest() for i in range(count)]
    every = [
        BlockName(hashes[(i + 1) * group.scale - 1], group.number)
        for group in groups.all
        for i in range(count // group.scale)
    ]
    lost = data.draw(st.sets(st.sampled_from(range(len(every))), max_size=4)) if every else set()
    held = {name for index, name in enumerate(every) if index not in lost}
    lacking = Lacking(start, start, stop)
    asked = decode_wanted(encode(Wanted(bytes(32), 1, b"".join(hashes), lacking, groups.all, 1.0)))
    assert asked is not None
    prompt = Prompt(asked)
    found = groups.longest(start, stop, count, Held(hashes, held))
    expected = found.length if found.runs else start
    length = prompt.longest(held.__contains__)
    assert length == expected
    if length > start:
        needed = set(prompt.needed(length))
        assert needed <= held & set(prompt.names())
        parts = {
            BlockName(hashes[(i + 1) * groups.all[part.group].scale - 1], part.group)
            for part in found.parts
            for i in range(part.first, part.first + part.num_blocks)
        }
        assert parts <= needed


@pytest.mark.timeout(60)
def test_a_length_that_no_prompt_has_ends_at_once() -> None:
    """Whatever an engine asks, the keeper has other engines."""
    hashes = [sha256(bytes([i])).digest() for i in range(4)]
    groups = Groups([Group(0, TOKENS, window=3 * TOKENS)])
    lacking = Lacking(0, 0, 2**32 - 1)
    asked = decode_wanted(encode(Wanted(bytes(32), 1, b"".join(hashes), lacking, groups.all, 1.0)))
    assert asked is not None
    assert Prompt(asked).longest(lambda _: True) == 4
    assert Prompt(asked).longest(lambda _: False) == 0
