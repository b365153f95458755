"""What a subscriber may ask for again: the last batches, and what all earlier ones come to.  Pure.

vLLM forgets a batch that is too old.  Here it is folded into the *beginning*: the blocks that were
there after it.  So a subscriber that comes late knows every block all the same.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from . import wire
from .wire import Batch, BlockHash, Event, Place

MAX_BATCHES = 10_000
"""As many as vLLM keeps by default.  The most that may be kept: a replay has to fit in a queue."""
MAX_BYTES = 64 << 20


class Numbered(NamedTuple):
    number: int
    """Position in the stream."""
    payload: bytes


class History:
    def __init__(
        self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES, first: int = 0
    ) -> None:
        """``first``: number of the first batch."""
        self._max_batches, self._max_bytes = max_batches, max_bytes
        self._recent: deque[Numbered] = deque()
        self._bytes = 0
        self._next = first
        self._beginning: dict[int, dict[tuple[Place, BlockHash], bytes]] = {}
        """For each rank the blocks that were there before ``_recent``, each with the event that
        stored it."""
        self._folded: dict[int, int] = {}
        """For each of them the number of its last batch that is in there, in rising order."""

    def add(self, payload: bytes) -> int:
        """Take in the stream's next batch; return its number."""
        added = Numbered(self._next, payload)
        self._next += 1
        self._recent.append(added)
        self._bytes += len(payload)
        while len(self._recent) > self._max_batches or self._bytes > self._max_bytes:
            oldest = self._recent.popleft()
            self._bytes -= len(oldest.payload)
            self._fold(oldest.number, wire.decode_batch(oldest.payload))
        return added.number

    def since(self, start: int, now: float) -> Iterator[Numbered]:
        """Yield the batches from ``start`` on, each with a higher number than the one before it.

        In the place of those that are folded stands one for each rank, which clears all and then
        stores what was there.  It has the number of the last of them: who asks from a higher one
        on has heard all that it comes to."""
        for rank, number in self._folded.items():
            if number >= start:
                events = [*_as_events(self._beginning[rank])]
                yield Numbered(number, wire.encode([now, events, rank]))
        for batch in self._recent:
            if batch.number >= start:
                yield batch

    def _fold(self, number: int, batch: Batch) -> None:
        self._folded.pop(batch.rank, None)
        self._folded[batch.rank] = number
        blocks = self._beginning.setdefault(batch.rank, {})
        for event in batch.events:
            if event["type"] == wire.CLEARED:
                blocks.clear()
                continue
            place, hashes = wire.place_of(event), event["block_hashes"]
            if event["type"] == wire.REMOVED:
                for block in hashes:
                    blocks.pop((place, block), None)
            else:
                for part in wire.single_blocks(event):
                    text = wire.encode(part)
                    blocks |= {(place, block): text for block in part["block_hashes"]}


def _as_events(
    blocks: dict[tuple[Place, BlockHash], bytes],
) -> Iterator[Event | msgspec.Raw]:
    yield {"type": wire.CLEARED}
    for _, group in itertools.groupby(blocks.items(), lambda item: id(item[1])):
        items = list(group)
        text = items[0][1]
        there = {block for (_, block), _ in items}
        whole: Event = msgspec.msgpack.decode(text)
        if len(there) == len(whole["block_hashes"]):
            yield msgspec.Raw(text)
        else:
            yield from wire.stored_parts(whole, [b in there for b in whole["block_hashes"]])
