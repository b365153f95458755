"""Questions about prefixes that only a public node asks: all lengths, and single blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvshm._engine.epoch_state import EpochState
from kvshm._engine.groups import Group
from kvshm._engine.prefix_search import PrefixSearch

from .load import Found

_ANY_NUMBER = 1 << 30
_AT_ONCE = 64
"""Keys in one search for single blocks."""


def all_lengths(search: PrefixSearch, state: EpochState, found: Found) -> tuple[int, ...]:
    """Return every length, in keys, to which a prefix can be restored that was found."""
    lengths, stop = [], found.length
    while stop > found.start:
        longest = search.longest(state, found.keys, found.start, stop, _ANY_NUMBER)
        if not longest.runs:
            break
        lengths.append(longest.length)
        stop = longest.length - 1
    return tuple(reversed(lengths))


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
