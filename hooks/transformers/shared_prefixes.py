"""What a paged cache shares: which of its blocks hold which prefix.

A block is published only if all blocks before it in its request are sound: known to hold the prefix
of their whole keys.  The 64 bits by which transformers finds blocks prove nothing to other engines.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvshm.api import Identity, Node

from ..boundary import guarded


@dataclass
class _Request:
    """A request that began after the last change of weights.  A list of transformers', which never
    changes one in place, is compared once, and known again as the same object."""

    prompt: Sequence[int]  # when the request was last considered
    tokens: list[int]  # the prompt, and the generated tokens that keys were made of
    keys: Sequence[bytes]  # of the full blocks of ``tokens``
    initial: Sequence[int] | None = None  # the prompt when a block was completed
    sound: int = 0  # number of its first blocks that are sound


class SharedPrefixes:
    """One cache's.  Generation thread; ``renew`` and ``close`` also on another one while that
    stands still.  No method raises, unless ``strict``: after a failure nothing is shared any
    more."""

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
        self._keys: dict[int, bytes] = {}  # of the published blocks

    def hook_failed(self, hook: str, exc: Exception) -> None:
        """Withdraw everything, for good (hooks/boundary.py)."""
        self.hook_errors += 1
        self.close()

    @guarded(lambda *_: [])
    def begin(self, request_id: str, prompt: Sequence[int]) -> Sequence[bytes]:
        """Return the keys of the full blocks of a prompt that is about to be scheduled, or
        considered again; none once nothing is shared any more."""
        if self.closed:
            return []
        known = self._requests.get(request_id)
        # As long as a request waits, it is considered with the same list in every step.  One that
        # has generated tokens may go on with others: its keys are not those of the prompt alone.
        same = known is not None and len(known.tokens) == len(prompt)
        if known is not None and same and (known.prompt is prompt or known.tokens == prompt):
            known.prompt, known.initial, known.sound = prompt, None, 0
        else:
            keys = self.node.keys(prompt, salt=self._salt)
            known = self._requests[request_id] = _Request(prompt, list(prompt), keys)
        return known.keys

    def end(self, request_id: str) -> None:
        """Forget a request, which has lost its blocks."""
        self._requests.pop(request_id, None)

    def end_all(self) -> None:
        """Forget all requests, which have lost their blocks."""
        self._requests.clear()

    def are_sound(self, blocks: Sequence[int], keys: Sequence[bytes]) -> bool:
        """Whether each of the blocks is known to hold the prefix of its key."""
        return all(self._keys.get(block) == key for block, key in zip(blocks, keys, strict=False))

    def sound_blocks(self, request_id: str) -> int | None:
        """Return how many blocks of a request are sound; None: nothing more of it is published."""
        request = self._requests.get(request_id)
        return None if request is None else request.sound

    @guarded(lambda *_: None)
    def completed(
        self,
        request_id: str,
        initial: Sequence[int],
        generated: Sequence[int],
        complete: Sequence[int],
        computed: Collection[int],
    ) -> None:
        """Publish those of a request's ``complete`` blocks, which follow its sound ones, that it
        has ``computed``, if all blocks before them are sound.  ``initial``, ``generated``: all its
        tokens.  Costs only what is new."""
        request = self._requests.get(request_id)
        if request is None or not self._is_of(request, initial):
            self.end(request_id)
            return
        start = request.sound
        self._make_keys(request, generated, start + len(complete))
        new: dict[int, int] = {}
        for index, block in enumerate(complete, start):
            if block in computed:
                new[index] = block
            elif self._keys.get(block) != request.keys[index]:
                # This block never becomes known, so nothing behind it is published.
                self.end(request_id)
                break
            request.sound = index + 1
        self._publish(request.keys, new)

    def _is_of(self, request: _Request, initial: Sequence[int]) -> bool:
        """Whether the request that completed a block is the one that was considered."""
        if request.initial is not initial:
            if request.tokens != initial:
                return False
            request.initial = initial
        return True

    def _make_keys(self, request: _Request, generated: Sequence[int], blocks: int) -> None:
        """Make the keys that are missing for a request's first ``blocks`` blocks."""
        if len(request.keys) < blocks:
            assert request.initial is not None
            first = len(request.initial)
            behind = generated[len(request.tokens) - first : blocks * self._page_size - first]
            request.tokens += behind
            request.keys = self.node.keys(request.tokens, salt=self._salt, known=request.keys)

    @guarded(lambda *_: None)
    def imported(self, keys: Sequence[bytes], blocks: dict[int, int]) -> None:
        """Publish imported blocks, by their index in the prefix."""
        self._publish(keys, blocks)

    def _publish(self, keys: Sequence[bytes], blocks: dict[int, int]) -> None:
        for start, run in _runs(blocks):
            end = start + len(run)
            self._keys.update(zip(run, keys[start:end], strict=True))
            self.node.publish(keys[:end], run, start=start)

    @guarded(lambda *_: None)
    def retract(self, blocks: Sequence[int]) -> None:
        """Retract blocks that are about to be handed out.  Blocks until no engine reads them, for
        the drain budget at most."""
        known = [block for block in blocks if self._keys.pop(block, None) is not None]
        if known and not self.closed:
            self.node.retract(known)

    @guarded(lambda *_: None)
    def renew(self, identity: Identity) -> None:
        """Forget all blocks and requests, unless the engine's identity is still the same."""
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
