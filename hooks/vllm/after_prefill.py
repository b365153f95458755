"""The exporter's side: which blocks may be shown to others, and when no longer.

A block is published only if it is *known computed*, and computed from nothing but what this
engine may vouch for.  vLLM gives a block its hash when it is scheduled, before a single byte is
written, and other connectors fill blocks too; so neither the hash nor a request's hit on it
proves anything.  Instead (kvshm/engine/marks.py holds the marks):

    step k is built:     every block the step writes is withdrawn and loses its marks; those
                         whose last token it computes become SOUND if all blocks before them
                         are, and are TAGGED with (step, version)
    output of k is in:   tags whose version still holds are COMPUTED
    computed and hashed: the block is published

SOUND: computed by this engine on top of sound blocks, or imported and checked, in this epoch.
"Withdraw what the step may write" is also what makes a published block immutable: nothing
else ever changes its bytes but the reuse that ``pool_watch`` reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from kvshm.engine.cache import SharedCache
from kvshm.engine.marks import Marks, Run, blocks_of, touching
from kvshm.ids import BlockId

from .pool_watch import block_tables


class LoadedBlocks(NamedTuple):
    """Consecutive blocks of a request that a load has filled."""

    chain: list[bytes]
    """The request's block hashes; grows as the request does."""
    first: int
    """Index of the first block in the request's block table."""
    blocks: Sequence[BlockId]


class TrackedRequest:
    """A request, and what is known of its block table."""

    __slots__ = ("complete", "epochs", "preemptions", "prompt", "request", "sound")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.epochs = self.preemptions = -1
        """The tracker's epochs and the request's preemptions when its table was read last."""
        self.sound = False
        """Whether what its steps compute is sound."""
        self.prompt = 0
        """Its length, which grows as a session goes on."""
        self.complete = 0
        """From this index on no block of the table has a mark."""


CompletedRuns: TypeAlias = list[tuple[bool, Run]]
"""What a step completes, and whether its request wants it shown."""


class BlockTracker:
    """Follows every block from its computation to its reuse.  Scheduler's thread."""

    def __init__(
        self,
        cache: SharedCache,
        manager: Any,
        block_size: int,
        may_share: Callable[[Any], bool],
        delay: int = 0,
    ) -> None:
        """``manager`` is vLLM's KV cache manager; ``may_share`` tells whether a request may
        share its blocks.  ``delay`` holds marks back for so many further steps: 1 with speculative
        decoding, whose drafter writes after the output it belongs to was handed over.  Raises
        PoolChanged if vLLM does not keep what has to be looked at."""
        self._cache = cache
        self._publisher = cache.publisher
        self._tables = block_tables(manager)
        self._pool = manager.block_pool
        self._block_size = block_size
        self._may_share = may_share
        self._delay = delay
        self.expecting = True
        """Whether an epoch is to begin, or has: what is computed until then is shown once it has.
        Without one, marks would only pile up."""
        self.pending_changes = False
        """Whether blocks were withdrawn since this was last set to False, or some still have to
        be shown: call ``publish_computed`` and the cache's ``publisher.drain_before_dispatch``
        before the next step is dispatched."""
        self._marks = Marks(len(self._pool.blocks))
        self._epochs = 0
        """How many epochs have ended."""
        self._requests: dict[str, TrackedRequest] = {}
        self._steps: deque[tuple[int, CompletedRuns]] = deque()
        """Steps under way that complete something, by their numbers."""
        self._computed: list[Run] = []
        """Runs of computed blocks some of which have no hash yet."""
        self._promised: dict[BlockId, Sequence[BlockId]] = {}
        """Block that a load under way is to fill -> all blocks of that load, in order."""
        self._held: dict[BlockId, int] = {}
        """Promised block -> the first step that computes on top of it."""

    # -- requests

    def track(self, request: Any) -> None:
        """A request has arrived; its steps are looked at from now on."""
        self._requests[request.request_id] = TrackedRequest(request)

    def untrack(self, request_id: str) -> None:
        """The request has ended.  What its steps computed stays."""
        self._requests.pop(request_id, None)

    def shares(self, request_id: str) -> bool:
        """Whether the request is there and its blocks may be shown."""
        tracked = self._requests.get(request_id)
        return tracked is not None and self._may_share(tracked.request)

    # -- changes, before the step that makes them is dispatched

    def blocks_change(self, blocks: Sequence[BlockId]) -> None:
        """The blocks lose their hashes: show them no more."""
        if published := self._marks.withdraw(blocks):
            self._retract(published)

    def blocks_handed_out(self, blocks: Sequence[Any]) -> None:
        """These pool blocks are about to get new contents, whatever they held."""
        for block in blocks if self._promised else ():
            self._promised.pop(block.block_id, None)  # of a request that did not wait for it
        if self._publisher.retract_marked(self._marks, blocks):
            self.pending_changes = True

    def epoch_ended(self) -> None:
        """Nothing computed so far may be shown any more, nor what is computed from it: vLLM may
        have kept all of it, for requests that run on or as its own cache."""
        self._epochs += 1
        self._marks.clear_all()
        self._steps.clear()
        self._computed.clear()
        self._promised.clear()
        self._held.clear()

    def stop_expecting(self) -> None:
        """No epoch is to begin, for the time being."""
        self.epoch_ended()
        self.expecting = False

    def update_expecting(self, epoch_state: object | None) -> None:
        """Call before a step is built, with the cache's ``epoch_state``.  If no epoch can begin,
        stop expecting one; if one has begun after all, publish what is computed from now on."""
        if self.expecting and epoch_state is None and self._cache.failed:
            self.stop_expecting()
        elif epoch_state is not None:
            self.expecting = True

    def step_built(self, number: int, scheduled: dict[str, int]) -> CompletedRuns:
        """A step that computes so many tokens of each request is about to be dispatched.
        Returns what it completes."""
        runs: CompletedRuns = []
        if not self.expecting:
            return runs
        size, epochs, drafts = self._block_size, self._epochs, self._delay > 0
        for tracked, first, end in touching(self._requests, scheduled, size, epochs, drafts):
            if run := self._record_writes(number, tracked, first, end):
                runs.append((self._may_share(tracked.request), run))
        if runs:
            self._steps.append((number, runs))
        return runs

    def _record_writes(
        self, number: int, tracked: TrackedRequest, first: int, end: int
    ) -> Run | None:
        """The step computes a request's tokens up to ``end``, from block ``first`` on.  Returns
        what that completes."""
        request = tracked.request
        table = self._tables.get(request.request_id, ())
        if tracked.epochs != self._epochs or tracked.preemptions != request.num_preemptions:
            self._start(number, tracked, table)
        # vLLM lets a streaming-input session go on behind accepted drafts that it has dropped
        # with the tokens after a stop token: their KV stays, under the next input's hash.
        if self._delay and request.num_prompt_tokens > tracked.prompt:
            tracked.sound = False
        # With asynchronous scheduling the last token's value is still on its way.
        known = request.num_tokens + request.num_output_placeholders
        tracked.complete = complete = min(end, known) // self._block_size
        last = min(-(-end // self._block_size), len(table))
        packed, published = self._marks.write(
            table, first, last, complete if tracked.sound else first
        )
        if published:
            self._retract(published)
        return (request.block_hashes, first, packed) if packed else None

    def _start(self, number: int, tracked: TrackedRequest, table: Sequence[Any]) -> None:
        """A request's first step, in its table or in this epoch: check the blocks below it."""
        request = tracked.request
        tracked.epochs, tracked.preemptions = self._epochs, request.num_preemptions
        whole = -(-request.num_computed_tokens // self._block_size)
        tracked.prompt = request.num_prompt_tokens
        tracked.sound = not whole or self._marks.sound(table, whole) == whole
        if self._promised and tracked.sound:
            for block in table[:whole]:
                if block.block_id in self._promised:
                    self._held.setdefault(block.block_id, number)

    # -- imports

    def blocks_promised(self, blocks: Sequence[BlockId]) -> None:
        """A load that is to fill these blocks is handed to the ranks with the step being built.

        Call before ``step_built``.  The blocks count as sound while the load is under way, so
        the very step may compute on top of them; what it computes, and whatever is computed
        later, is shown only when each promised block it met was named to ``blocks_loaded`` or
        ``blocks_failed``, or a new epoch has begun.
        """
        if self.expecting:
            self._promised.update(dict.fromkeys(blocks, blocks))
            self._marks.make_sound(blocks)

    def blocks_loaded(self, loaded: LoadedBlocks, shown: bool = True) -> None:
        """These blocks of a load were imported and checked on every rank; call before
        ``step_done`` of the same output, also if the request is gone or does not want them
        ``shown``.  Blocks of a load that began in an earlier epoch are ignored."""
        chain, first, blocks = loaded
        promised = [self._promised.pop(block, None) is not None for block in blocks]
        if self._held:
            for block in blocks:
                self._held.pop(block, None)
        if shown and all(promised):
            self._computed.append((chain, first, self._marks.tag(blocks)))
        elif shown:
            left = [(first + i, block) for i, block in enumerate(blocks) if promised[i]]
            self._computed += [(chain, index, self._marks.tag([block])) for index, block in left]

    def blocks_failed(self, blocks: Iterable[BlockId]) -> None:
        """Loads, kvshm's or another connector's, did not fill these blocks; call before
        ``blocks_loaded`` and ``step_done`` of the same output.

        Everything from the first such block on, in every table that holds one, is withdrawn and
        not sound, and so is what steps computed on top of it for requests that are gone.  Where
        such a request runs already, vLLM drops tokens and computes again in place, with the
        hashes left as they are; with asynchronous scheduling it then computes a token that it
        has dropped before it was known.  So what that request computes until it is preempted is
        not sound either.
        """
        doubtful = set(blocks)
        if not doubtful:
            return
        for block in [b for b in doubtful if b in self._promised]:
            load = self._promised[block]  # nothing behind the block counts either
            doubtful.update(load[load.index(block) :])
        held = [self._held[block] for block in doubtful if block in self._held]
        while held and self._steps and self._steps[-1][0] >= min(held):
            doubtful.update(blocks_of(run for _, run in self._steps.pop()[1]))
        for tracked in self._requests.values():
            table = self._tables.get(tracked.request.request_id, ())
            ids = [block.block_id for block in table]
            first = next((i for i, block in enumerate(ids) if block in doubtful), len(ids))
            if first < len(ids):
                tracked.sound = False
                doubtful.update(ids[first:])
        for block in doubtful:
            self._promised.pop(block, None)
            self._held.pop(block, None)
        if published := self._marks.clear(list(doubtful)):
            self._retract(published)

    # -- what is known computed, once a step's output has arrived

    @property
    def fence(self) -> int:
        """The step of which marks are held back although nothing but a fence (``step_done``)
        is waited for; 0: there is none."""
        return self._steps[-1][0] if self._delay and self._steps and not self._held else 0

    def step_done(self, number: int, fenced: bool = False) -> None:
        """The output of a step that ran the model has arrived, or every rank says that it is
        past a fence behind that step: then everything the step wrote, and all steps before it,
        stands in memory on every rank, the drafter's part included."""
        done = number if fenced else number - self._delay
        if self._held:
            done = min(done, min(self._held.values()) - 1)
        while self._steps and self._steps[0][0] <= done:
            for wanted, run in self._steps.popleft()[1]:
                if wanted:
                    self._computed.append(run)
        if self._computed:
            self.publish_computed()

    def publish_computed(self) -> None:
        """Publish what is computed and hashed by now.  The rest keeps its mark: decoded and
        imported blocks get their hash a little later."""
        if self._computed:
            self._computed = self._publisher.publish_marked(
                self._marks, self._pool.blocks, self._computed
            )
            self.pending_changes |= bool(self._computed)

    def _retract(self, published: list[BlockId]) -> None:
        self.pending_changes = True
        self._publisher.retract(published)
