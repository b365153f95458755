"""What a paged cache shares: which of its blocks hold which prefix, and who may read them.

A block is published only if all blocks before it in its request hold what their keys say.  What a
block holds is known here by its whole key: the 64 bits by which transformers finds blocks prove
nothing to other engines, and a block from before a change of weights is known no more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvshm.api import Identity, Node

from ..boundary import guarded


@dataclass
class _Request:
    """A request that began after the last change of weights."""

    prompt: list[int]
    keys: Sequence[bytes]
    """Of its full blocks, as far as they were needed."""
    sound: int = 0
    """So many of its blocks, from the first on, hold what their keys say."""


class SharedPrefixes:
    """One cache's.  For the generation thread; ``renew`` and ``close`` also for another one while
    that thread stands still.  No method raises, unless ``strict``: after a failure nothing is
    shared any more."""

    def __init__(
        self, node: Node, identity: Identity, memory: Any, *, salt: bytes, strict: bool
    ) -> None:
        """``memory``: what the node has joined with; it is closed with the node."""
        self.node = node
        self.strict = strict
        self._memory = memory
        self._identity = identity
        self.hook_errors = 0
        self.closed = False
        self._page_size = node.block_size
        self._salt = salt
        self._requests: dict[str, _Request] = {}
        self._keys: dict[int, bytes] = {}
        """What blocks hold.  These are published."""

    def hook_failed(self, hook: str, exc: Exception) -> None:
        """Withdraw everything, for good (hooks/boundary.py)."""
        self.hook_errors += 1
        self.close()

    @guarded(lambda *_: [])
    def begin(self, request_id: str, prompt: Sequence[int]) -> Sequence[bytes]:
        """A request is about to be scheduled, or considered again.  Return the keys of its prompt's
        full blocks; none once nothing is shared any more."""
        if self.closed:
            return []
        known = self._requests.get(request_id)
        count = len(prompt) // self._page_size
        if known is not None and known.prompt == prompt:
            # An earlier request of this name and prompt may have gone on with other tokens.
            if len(known.keys) > count:
                known.keys = known.keys[:count]
            known.sound = 0
        else:
            keys = self.node.keys(prompt, salt=self._salt)
            known = self._requests[request_id] = _Request(list(prompt), keys)
        return known.keys

    def end(self, request_id: str) -> None:
        """A request has lost its blocks."""
        self._requests.pop(request_id, None)

    def end_all(self) -> None:
        """All requests have lost their blocks."""
        self._requests.clear()

    def are_sound(self, blocks: Sequence[int], keys: Sequence[bytes]) -> bool:
        """Whether each of the blocks holds what its key says."""
        return all(self._keys.get(block) == key for block, key in zip(blocks, keys, strict=False))

    @guarded(lambda *_: None)
    def completed(
        self, request_id: str, tokens: list[int], table: Sequence[int], computed: Collection[int]
    ) -> None:
        """Publish the blocks that a request has just ``computed``, if it is known what stands in
        the blocks before them.  ``table``: all its blocks."""
        request = self._requests.get(request_id)
        if request is None or tokens[: len(request.prompt)] != request.prompt:
            return
        behind = table[request.sound :]
        known = list(takewhile(lambda b: b in computed or b in self._keys, behind))
        end = request.sound + len(known)
        if len(request.keys) < end:
            prefix = tokens[: end * self._page_size]
            request.keys = self.node.keys(prefix, salt=self._salt, known=request.keys)
        new: dict[int, int] = {}
        for index, block in enumerate(known, request.sound):
            if block in computed:
                new[index] = block
            elif self._keys[block] != request.keys[index]:
                break
            request.sound = index + 1
        self._publish(request.keys, new)

    @guarded(lambda *_: None)
    def imported(self, keys: Sequence[bytes], blocks: dict[int, int]) -> None:
        """Publish imported blocks, given by their index in the prefix."""
        self._publish(keys, blocks)

    def _publish(self, keys: Sequence[bytes], blocks: dict[int, int]) -> None:
        for start, run in _runs(blocks):
            self._keys.update(zip(run, keys[start:], strict=False))
            self.node.publish(keys[: start + len(run)], run, start=start)

    @guarded(lambda *_: None)
    def retract(self, blocks: Sequence[int]) -> None:
        """These blocks are about to be handed out.  Blocks until nobody reads them, for the drain
        budget at most."""
        known = [block for block in blocks if self._keys.pop(block, None) is not None]
        if known and not self.closed:
            self.node.retract(known)

    @guarded(lambda *_: None)
    def renew(self, identity: Identity) -> None:
        """The engine may have become another one: if so, what blocks hold, and what running
        requests compute, is the former one's."""
        if not self.closed and identity != self._identity:
            self._identity = identity
            self._forget()
            self.node.reset(identity)

    def close(self) -> None:
        """Share nothing any more.  Blocks up to a few seconds."""
        self.closed = True
        self._forget()
        self.node.close()
        self._memory.close()

    def _forget(self) -> None:
        self._keys.clear()
        self._requests.clear()


def _runs(blocks: dict[int, int]) -> list[tuple[int, list[int]]]:
    """Blocks by index, as runs of consecutive ones: the first index, the blocks."""
    runs: list[tuple[int, list[int]]] = []
    for index, block in sorted(blocks.items()):
        if runs and index == runs[-1][0] + len(runs[-1][1]):
            runs[-1][1].append(block)
        else:
            runs.append((index, [block]))
    return runs
