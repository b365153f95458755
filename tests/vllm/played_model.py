"""A model that is played: a token's KV is a number, in each KV cache group another one.

It is made of the weights, the token, and in every group of what the token reads there: the token
before it and the first one that the group's window or chunk contains.  So one wrong block of one
group gives other numbers in all groups, from there on.  In a group that keeps states, the number is
the state behind the token, and a token reads the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvshm._engine.groups import Group

GARBAGE = -1
Kv = list[int]
Read = Callable[[Group, int], int]


def reads(group: Group, position: int) -> Iterator[int]:
    """The positions that the token at ``position`` reads in a group."""
    first = max(0, position - group.window + 1) if group.window else 0
    if group.chunk:
        first = position // group.chunk * group.chunk
    if group.state:
        first = position - 1
    if 0 <= first < position:
        yield from (first, position - 1)


@dataclass
class PlayedModel:
    """A model with these groups."""

    groups: tuple[Group, ...]
    known: dict[tuple[int, bytes], list[Kv]] = field(default_factory=dict)
    """What ``last_block`` has worked out, by weights and hash."""

    def token(self, weights: int, position: int, token: int, read: Read) -> list[int]:
        """KV of one token, by group."""
        seen = tuple(read(g, p) for g in self.groups for p in reads(g, position))
        return [hash((weights, g.number, token, seen)) for g in self.groups]

    def contents(self, weights: int, tokens: list[int]) -> list[Kv]:
        """KV, by group, of tokens that one set of weights has computed from the first on."""
        kv: list[Kv] = [[] for _ in self.groups]
        for position, token in enumerate(tokens):
            made = self.token(weights, position, token, lambda g, p: kv[g.number][p])
            for each, number in zip(kv, made, strict=True):
                each.append(number)
        return kv

    def last_block(self, weights: int, block_hash: bytes, tokens: list[int], group: int) -> Kv:
        """What a block of this hash has to hold; the hash is that of these tokens."""
        if (key := (weights, block_hash)) not in self.known:
            self.known[key] = self.contents(weights, tokens)
        kept = 1 if self.groups[group].state else self.groups[group].block_size
        return self.known[key][group][-kept:]
