"""Masks and slot mappings as vLLM and LMCache write them: one entry for each token.

The slot of a token is ``block id * block_size + place in the block``.  kvshm copies whole blocks,
in place, so a slot mapping is right if it addresses whole own blocks in order.
"""

from __future__ import annotations

import math
import operator
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._api.arguments import checked_seconds
from ..api import MisuseError, Node

Extra = bytes | Mapping[int, bytes]
"""As ``Node.keys`` takes it."""


class MaskError(MisuseError):
    """A mask cannot be honoured in whole blocks; names the tokens and says what to do."""


class SlotMappingError(MisuseError):
    """A slot mapping does not address whole own blocks in order; names the slots."""


def one_group(node: Node) -> Node:
    """Return the node.  Raises MisuseError unless a slot mapping can say where all KV lies."""
    if len(node.groups) != 1 or not node.groups[0].is_full:
        raise MisuseError(
            f"node {node.name} has {len(node.groups)} KV cache groups, or a window: these calls "
            "are for one group of full attention, so call the Node itself"
        )
    return node


def listed(
    what: str,
    values: Any,
    misuse: type[MisuseError] = MisuseError,
    kind: Callable[[Any], Any] = operator.index,
) -> list[Any]:
    """Return a sequence, array or tensor as a list of plain numbers.  Raises ``misuse``."""
    try:
        return [*map(kind, values.tolist() if hasattr(values, "tolist") else values)]
    except (TypeError, ValueError):  # the latter of a tensor that is no number
        raise misuse(
            f"{what}: {reprlib.repr(values)} is not a sequence, array or tensor of "
            f"{'true and false' if kind is truth else 'whole numbers'}"
        ) from None


def truth(value: Any) -> bool:
    """Return what stands for True or False, as numpy's do.  Raises TypeError or ValueError."""
    if value in (0, 1):
        return bool(value)
    raise ValueError


def deadline(timeout: float | None) -> float:
    """Return when ``timeout`` seconds are over, on the monotonic clock.  Raises MisuseError."""
    return math.inf if timeout is None else time.monotonic() + checked_seconds("timeout", timeout)


def wanted_runs(mask: Any, num_tokens: int, block_size: int) -> list[tuple[int, int]]:
    """Return the runs (first block, behind the last block) of full blocks whose tokens are all
    True in ``mask`` (None: all are).  The tokens behind the last full block do not count.  Raises
    MaskError unless there is one value for each token and all tokens of a full block are equal.
    """
    values = [True] * num_tokens if mask is None else listed("mask", mask, MaskError, truth)
    if len(values) != num_tokens:
        raise MaskError(f"mask has {len(values)} values for {num_tokens} tokens: give one for each")
    runs: list[tuple[int, int]] = []
    for block in range(num_tokens // block_size):
        begin, end = block * block_size, (block + 1) * block_size
        if len({*values[begin:end]}) > 1:
            raise MaskError(
                f"tokens {begin} to {end - 1} are one block, which is loaded whole or not at all: "
                f"make mask equal in all {block_size}"
            )
        if values[begin] and runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        elif values[begin]:
            runs.append((block, block + 1))
    return runs


def region_of_interest(roi: Any, num_tokens: int) -> int:
    """Return how many tokens from the first one on ``roi`` marks (None: all).  Raises MaskError if
    it marks others: the KV of a token depends on every token before it."""
    values: list[bool] = [True] * num_tokens
    if roi is not None:
        values = listed("roi", roi, MaskError, truth)
    count = sum(values)
    if len(values) != num_tokens or not all(values[:count]):
        raise MaskError(
            f"roi marks {count} of {num_tokens} tokens, but not the first {count}: the KV of a "
            "token depends on every token before it, so mark a prefix"
        )
    return count


def blocks_at(slot_mapping: Any, begin: int, end: int, block_size: int) -> list[int]:
    """Return the own blocks that the slots of tokens ``begin`` to ``end`` (a full block's first
    one; behind the last one) address.  Raises SlotMappingError."""
    slots: Sequence[int] = listed("slot_mapping", slot_mapping, SlotMappingError)
    if len(slots) < end:
        raise SlotMappingError(f"slot_mapping has {len(slots)} slots, but {end} are needed")
    blocks = []
    for first in range(begin, end, block_size):
        have = slots[first : min(first + block_size, end)]
        block, offset = divmod(have[0], block_size)
        if offset or block < 0 or have != [*range(have[0], have[0] + len(have))]:
            raise SlotMappingError(
                f"tokens {first} to {first + len(have) - 1} have slots {have[0]} to {have[-1]}, "
                f"which are not one block in order: kvshm copies whole blocks of {block_size} "
                "slots, so give each block's slots as block id * block_size + 0, 1, 2, ..."
            )
        blocks.append(block)
    return blocks


def refuse_doubles(blocks: Sequence[int]) -> None:
    """Raises SlotMappingError if a block is named twice."""
    if doubles := {block for block, count in Counter(blocks).items() if count > 1}:
        raise SlotMappingError(
            f"slot mappings address blocks {sorted(doubles)} more than once: a block has the KV of "
            "one place of one prompt"
        )
