"""The exporter's side: which blocks may be shown to others, and when no longer.

A block is published only if it is *known computed*.  vLLM gives a block its hash when it is
scheduled, before a single byte is written, so neither the hash nor a request's hit on it
proves anything.  Instead:

    step k is built:     every block the step writes is withdrawn and loses its mark; those
                         whose last token it computes are TAGGED with (step, generation)
    output of k is in:   tags whose generation still holds become COMPUTED marks
    mark and hash:       the block is published

"Withdraw what the step may write" is also what makes a published block immutable: nothing
else ever changes its bytes but the reuse that ``pool_watch`` reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvshm.cache import SharedCache
from kvshm.exports import Publication
from kvshm.terms import BlockHash, BlockId, block_hash

GROUP_ID_BYTES = 4
"""vLLM appends the KV cache group id to a block's hash (BlockHashWithGroupId)."""


class Written(NamedTuple):
    """A block a step writes."""

    block_id: BlockId
    position: int
    """Its place in the request's block table."""
    chain: list[bytes]
    """The request's block hashes; grows as the request does."""
    complete: bool
    """Whether the step computes the block's last token."""


class _Tag(NamedTuple):
    written: Written
    generation: int


@dataclass
class _Step:
    number: int
    tags: list[_Tag]


class Exporter:
    """Follows every block from its computation to its reuse.  Scheduler's thread."""

    def __init__(self, cache: SharedCache, pool: Any, block_size: int, delay: int = 0) -> None:
        """``delay`` holds marks back for so many further steps: 1 with speculative decoding,
        whose drafter writes after the output it belongs to was handed over."""
        self._cache = cache
        self._pool = pool
        self._block_size = block_size
        self._delay = delay
        self.expecting = True
        """Whether an epoch is to begin: what is computed until then is shown once it has.
        Without one, marks would only pile up."""
        self._generations: list[int] = [0] * len(pool.blocks)
        self._steps: deque[_Step] = deque()
        self._computed: dict[BlockId, Written] = {}
        self._published: dict[BlockId, BlockHash] = {}
        self._owners: dict[BlockHash, BlockId] = {}
        self._outdated: set[BlockId] = set()
        """Blocks that vLLM still uses although their contents are of an earlier life, perhaps
        of other weights, or not to be trusted, and those computed from them since."""

    # -- changes, before the step that makes them is dispatched

    def blocks_change(self, blocks: Sequence[BlockId]) -> None:
        """The blocks' bytes or hashes are about to change: forget what was known of them."""
        for block in blocks:
            self._generations[block] += 1
            self._computed.pop(block, None)
        if published := [block for block in blocks if block in self._published]:
            self._unpublish(published)

    def blocks_handed_out(self, blocks: Sequence[BlockId]) -> None:
        """The blocks are about to get new contents, whatever they held."""
        self._outdated.difference_update(blocks)
        self.blocks_change(blocks)

    def spoilt(self, blocks: Sequence[BlockId]) -> None:
        """The blocks may hold anything, and vLLM goes on with them."""
        self._outdated.update(blocks)
        self.blocks_change(blocks)

    def life_ends(self) -> None:
        """Nothing computed so far may be shown any more, nor what is computed from it: vLLM may
        have kept all of it, for requests that run on or as its own cache."""
        self._steps.clear()
        self._computed.clear()
        self._published.clear()
        self._owners.clear()
        self._generations = [g + 1 for g in self._generations]
        kept = (b for b in self._pool.blocks if b.ref_cnt or b.block_hash is not None)
        self._outdated = {b.block_id for b in kept}

    def builds_on_outdated(self, blocks: Sequence[Any], begin: int, end: int) -> bool:
        """Whether a step that writes ``blocks[begin:end]`` of a block table computes them from
        outdated ones; then they are outdated too."""
        if not self._outdated:
            return False
        table = [block.block_id for block in blocks[:end]]
        if self._outdated.isdisjoint(table):
            return False
        self._outdated.update(table[begin:])
        return True

    def forget_steps(self) -> None:
        """What steps under way compute is not to be trusted: they leave no marks."""
        self._steps.clear()

    def step_built(self, number: int, writes: Iterable[Written]) -> list[BlockId]:
        """A step is about to be dispatched; returns the blocks it completes."""
        written = list(writes)
        self.blocks_change([each.block_id for each in written])
        if not (self.expecting or self._cache.table is not None):
            return []
        tags = [_Tag(w, self._generations[w.block_id]) for w in written if w.complete]
        if tags:
            self._steps.append(_Step(number, tags))
        return [tag.written.block_id for tag in tags]

    # -- what is known computed, once a step's output has arrived

    def step_done(self, number: int) -> None:
        """The output of a step that ran the model has arrived: everything it wrote, and all
        steps before it, stands in memory on every rank."""
        while self._steps and self._steps[0].number <= number - self._delay:
            for tag in self._steps.popleft().tags:
                if self._generations[tag.written.block_id] == tag.generation:
                    self._computed[tag.written.block_id] = tag.written
        self.publish_computed()

    def blocks_loaded(self, blocks: Iterable[Written]) -> None:
        """These blocks were imported and checked on every rank, in this life or just before."""
        for written in blocks:
            if written.block_id not in self._outdated:
                self._computed[written.block_id] = written

    def publish_computed(self) -> None:
        """Publish what is computed and hashed by now.  The rest keeps its mark: decoded and
        imported blocks get their hash a little later."""
        if self._cache.table is None:
            return
        ready = [p for w in self._computed.values() if (p := self._publication(w)) is not None]
        if not ready:
            return
        done = self._cache.publish([p for p in ready if p.block_hash not in self._owners])
        for publication in ready:
            if publication.block_id in done:
                self._published[publication.block_id] = publication.block_hash
                self._owners[publication.block_hash] = publication.block_id
                del self._computed[publication.block_id]
            elif publication.block_hash in self._owners:
                del self._computed[publication.block_id]  # a twin of a published block

    def _publication(self, written: Written) -> Publication | None:
        """What to publish of a computed block, or None while it cannot be."""
        block = self._pool.blocks[written.block_id]
        index, chain = written.position, written.chain
        if block.block_hash is None or block.is_null or index >= len(chain):
            return None
        full = block.block_hash_num_tokens in (None, (index + 1) * self._block_size)
        if not full or bytes(block.block_hash)[:-GROUP_ID_BYTES] != bytes(chain[index]):
            return None
        parent = block_hash(bytes(chain[index - 1])) if index else None
        return Publication(written.block_id, block_hash(bytes(chain[index])), parent, index)

    def _unpublish(self, blocks: Sequence[BlockId]) -> None:
        self._cache.retract(blocks)
        for block in blocks:
            owned = self._published.pop(block)
            if self._owners.get(owned) == block:
                del self._owners[owned]
