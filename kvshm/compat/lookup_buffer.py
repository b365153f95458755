"""The lookup buffer of vLLM V0, on a Node: one process inserts prefixes, another selects them.

The KV of a prefix stays in the blocks in which its engine computed it, and is read there.  What
blocks cannot hold, the prefix's tokens and its hidden states, is in a row of memory that the buffer
joins with as a second Node, under the key of the prefix's last block:

    Node of the engine    block | block | block | last, perhaps not full
                           key     key     key     key
                                                    |
    Node of the buffer                             row: tokens, hidden states

Both are published, leased and re-checked alike; a row is of use only with all of its blocks.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from .._api.arguments import whole
from ..api import Config, Identity, MisuseError, Node, Reader, prefix_keys
from ._rows import Rows, buffer_of
from ._slots import (
    MaskError,
    SlotMappingError,
    blocks_at,
    deadline,
    listed,
    one_group,
    region_of_interest,
)
from .retrieval import finish

__all__ = ["NOTHING", "LookupBuffer", "MaskError", "RowTooSmall", "Selected", "SlotMappingError"]

_HEAD = struct.Struct("<II")


class RowTooSmall(MisuseError):
    """A prefix or its hidden states do not fit into a row; names both sizes."""


class Selected(NamedTuple):
    """What ``drop_select`` has loaded into the caller's slots.  Nothing: all three are None."""

    tokens: list[int] | None
    roi: list[bool] | None
    """True for each of ``tokens``: their KV is in the slots."""
    hidden: bytes | None
    """The bytes that were inserted, only if ``tokens`` are all that was: with the KV of them all
    the forward can be skipped."""


NOTHING = Selected(None, None, None)


class LookupBuffer:
    """Prefixes with their hidden states.  Any thread; ``node`` remains the caller's.  ``capacity``:
    prefixes that this process keeps rows of; the oldest makes room.  ``row_bytes``:  8, and 4 for
    each token, and the hidden states; equal in all processes that are to share."""

    def __init__(
        self,
        node: Node,
        identity: Identity,
        *,
        capacity: int,
        row_bytes: int,
        config: Config | None = None,
    ) -> None:
        capacity, row_bytes = whole("capacity", capacity, 1), whole("row_bytes", row_bytes, 1)
        self._node = one_group(node)
        self._block_size = node.block_size
        self._config = config
        self._model = f"{identity.model} (lookup buffer)"
        self._row_bytes = row_bytes
        self._inbox = capacity
        engine = f"{identity.engine}, rows of blocks of {node.block_size} tokens"
        who = replace(identity, engine=engine, model=self._model)
        self._rows = Rows(who, capacity + 1, row_bytes, config)
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(capacity))

    def __len__(self) -> int:
        """How many prefixes this process has rows of."""
        return len(self._held)

    def insert(self, tokens: Any, roi: Any, slot_mapping: Any, hidden: Any = None) -> int:
        """Publish the KV of the tokens that ``roi`` marks, a prefix, where the slots hold it, and
        their hidden states, a C-contiguous object with the buffer protocol; return how many tokens
        that were.

        The last block need not be full: the engine must not write to it, nor to the others, before
        it has retracted them.  Blocks only while a process reads the row that makes room.
        """
        tokens = _marked(tokens, roi)
        keys, blocks = self._keys_and_blocks(tokens, slot_mapping)
        states = None if hidden is None else buffer_of("hidden", hidden).tobytes()
        row = _HEAD.pack(len(tokens), 0 if states is None else len(states) + 1)
        row += struct.pack(f"<{len(tokens)}I", *tokens) + (states or b"")
        if len(row) > self._row_bytes:
            raise RowTooSmall(
                f"{len(tokens)} tokens and their hidden states need row_bytes={len(row)}, and a "
                f"row has {self._row_bytes}: join with larger ones, in all processes"
            )
        with self._lock:
            self._check_open()
            self._node.publish(keys, blocks)
            if (number := self._held.pop(keys[-1], None)) is None:
                number = self._free.pop() if self._free else self._held.popitem(last=False)[1]
            self._rows.publish(number, keys[-1], row)
            self._held[keys[-1]] = number
        return len(tokens)

    def drop_select(
        self, tokens: Any, roi: Any, slot_mapping: Any, timeout: float = 0.0
    ) -> Selected:
        """Load the longest prefix of the tokens that ``roi`` marks which another process has, into
        the slots; wait for all of it for ``timeout`` seconds.  ``tokens`` None: any prefix that
        another process has inserted and for which there are slots, without waiting.

        The blocks that are loaded into are retracted first.  The process that inserted the prefix
        keeps it, so several processes may select it."""
        if tokens is None:
            slots = listed("slot_mapping", slot_mapping, SlotMappingError)
            rows = (row for row in self._any_rows() if len(row) <= len(slots))
            selected = ((row, self.drop_select(row, None, slots)) for row in rows)
            return next((one for row, one in selected if one.tokens == row), NOTHING)
        self._check_open()
        until, tokens = deadline(timeout), _marked(tokens, roi)
        keys, blocks = self._keys_and_blocks(tokens, slot_mapping)
        if not (good := self._load(keys, blocks, timeout)):
            return NOTHING
        hidden = None
        if good == len(keys):
            self._rows.node.wait_for(keys[-1:], until - time.monotonic())
            row = self._row(keys[-1])
            hidden = row[1] if row and row[0] == tokens else None
        tokens = tokens[: good * self._block_size]
        return Selected(tokens, [True] * len(tokens), hidden)

    def _load(self, keys: list[bytes], blocks: list[int], timeout: float) -> int:
        """Return how many blocks from the first one on are loaded."""
        found = self._node.wait_for(keys, timeout)
        if not found:
            return 0
        into = blocks[: found.num_blocks]
        self._node.retract(into)
        load = self._node.load(found, into=into)
        try:
            load.wait()
        finally:
            finish(load)
        return load.good

    def _row(self, key: bytes) -> tuple[list[int], bytes | None] | None:
        """Return the tokens and hidden states under ``key`` in another process."""
        with self._lock:
            row = self._rows.fetch(self._inbox, key, 0.0)
        if row is None:
            return None
        num_tokens, num_hidden = _HEAD.unpack_from(row)
        begin = _HEAD.size + 4 * num_tokens
        tokens = [*struct.unpack_from(f"<{num_tokens}I", row, _HEAD.size)]
        return tokens, row[begin : begin + num_hidden - 1] if num_hidden else None

    def _any_rows(self) -> Iterator[list[int]]:
        """Yield the tokens of prefixes that other processes have inserted."""
        with Reader(self._config) as reader:
            epochs = [one.epoch for one in reader.engines() if one.model == self._model]
            keys = [block.key for epoch in epochs for block in reader.list(epoch)]
        yield from (row[0] for key in keys if (row := self._row(key)))

    def _keys_and_blocks(self, tokens: list[int], slots: Any) -> tuple[list[bytes], list[int]]:
        """The keys of a prefix's blocks, the last of which need not be full, and the blocks."""
        blocks = blocks_at(slots, 0, len(tokens), self._block_size)
        keys: list[bytes] = [*self._node.keys(tokens)]
        if tail := tokens[len(keys) * self._block_size :]:
            keys += prefix_keys(tail, len(tail), salt=b"not full" + b"".join(keys[-1:]))
        return keys, blocks

    def _check_open(self) -> None:
        if self._rows.node.closed:
            raise MisuseError("the lookup buffer is closed: make another one")

    def close(self) -> None:
        """Withdraw the rows; blocks up to a few seconds.  The KV is withdrawn by the node."""
        with self._lock:
            self._rows.close()


def _marked(tokens: Any, roi: Any) -> list[int]:
    """Return the tokens that ``roi`` marks, at least one.  Raises MaskError or MisuseError."""
    marked = (every := listed("tokens", tokens))[: region_of_interest(roi, len(every))]
    if not marked:
        raise MisuseError("no tokens: a prefix has at least one")
    return marked
