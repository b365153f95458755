"""Questions about prefixes that only a public node asks: all lengths, and single blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvshm._engine.epoch_state import EpochState
from kvshm._engine.groups import Group, Groups
from kvshm._engine.prefix_search import PrefixSearch

from .load import Found

_Find = Callable[[Group, int, int], tuple[object, int]]
_AT_ONCE = 64
"""Blocks, or keys of single blocks, in one search."""


def all_lengths(search: PrefixSearch, state: EpochState, found: Found) -> tuple[int, ...]:
    """Return every length, in keys, to which a prefix can be restored that was found."""
    find = search.finder(state, found.keys)
    return restorable_lengths(search.groups, found.start, found.length, len(found.keys), find)


def restorable_lengths(
    groups: Groups, start: int, longest: int, keys: int, find: _Find
) -> tuple[int, ...]:
    """Return every length up to ``longest``, in keys, to which a load can restore a prefix of
    ``keys`` keys behind the first ``start`` keys.  Asks ``find`` for each block once, so the time
    grows with the number of keys."""
    known = []
    for group in groups.all:
        first = start // group.scale
        stop = min(longest // group.scale + group.ahead, keys // group.scale)
        known.append((group, first, _run_begins(group, first, stop, find)))

    def restorable(length: int) -> bool:
        anything = False
        for group, at, begins in known:
            first, end = group.needed(start, length)
            stop = end + group.ahead
            if stop * group.scale > keys or (first < stop and begins[stop - at] > first):
                return False
            anything = anything or first < end
        return anything

    shortest = start - start % groups.step + groups.step
    return tuple(filter(restorable, range(shortest, longest + 1, groups.step)))


def _run_begins(group: Group, first: int, stop: int, find: _Find) -> list[int]:
    """Return for each index from ``first`` to ``stop`` where the held blocks that end before it
    begin; the index itself if the block before it is not held."""
    begins, at = [first], first
    while at < stop:
        end = min(at + _AT_ONCE, stop)  # a search prepares for as many as it is asked for
        _, reached = find(group, at, end)
        begins += begins[-1:] * (reached - at)
        if reached < end:
            reached += 1
            begins.append(reached)
        at = reached
    return begins


def held_by_peers(state: EpochState, keys: Sequence[bytes], group: Group) -> list[bool]:
    """Return for each key whether some usable peer seems to hold its block.  A key within a block
    of several keys has none."""
    held, scale = [False] * len(keys), group.scale
    at, blocks = 0, len(keys) // scale
    while at < blocks:
        stop = min(at + _AT_ONCE, blocks)  # a search prepares for as many as it is asked for
        runs = state.peers.lookup(keys, at, stop, group=group.number, scale=scale)
        found = sum(run.num_blocks for run in runs)
        for block in range(at, at + found):
            held[(block + 1) * scale - 1] = True
        at += found + (at + found < stop)
    return held
