"""The export of blocks: which blocks this engine publishes, and when it retracts them.

A block is published only if it is *known computed*, on top of sound blocks only.  vLLM gives a
block its hash when it is scheduled, before a single byte is written, and other connectors fill
blocks too; so neither the hash nor a request's hit on it proves that the block is computed.
Instead (kvshm/_engine/marks.py holds the marks):

    step k is built:     every block the step writes is retracted and loses its marks; a block
                         whose last token the step computes becomes SOUND if all blocks before it
                         are, and is noted with its version
    output of k is in:   noted blocks whose version still holds are COMPUTED
    computed and hashed: the block is published

SOUND: computed by this engine on top of sound blocks, or imported and checked, in this epoch.
Retracting what a step may write also makes a published block immutable: only a reuse, which
``pool_watch`` reports, changes its bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from kvshm._base.ids import BlockId
from kvshm.halves import (
    Group,
    Groups,
    Marks,
    Run,
    SchedulerHalf,
    blocks_of,
    touching,
)

from ..imports.request_import import LoadedBlocks
from .kept_blocks import KeptBlocks
from .pool_watch import block_tables, cached_counts


class TrackedRequest:
    """A request and the state of its block tables."""

    __slots__ = ("complete", "epochs", "preemptions", "prompt", "request", "sound")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.epochs = self.preemptions = -1
        """The tracker's epochs and the request's preemptions when its table was read last."""
        self.sound = False
        """Whether the blocks that the request's steps compute are sound."""
        self.prompt = 0
        """Length of the prompt; grows with each input of a session."""
        self.complete = 0
        """No block behind so many hashes has a mark, in any table."""


CompletedRuns: TypeAlias = list[tuple[bool, Run]]
"""The blocks that a step completes, and whether their request may share them."""


class BlockTracker:
    """Tracks every block from its computation to its reuse.  Scheduler's thread."""

    def __init__(
        self,
        cache: SchedulerHalf,
        manager: Any,
        groups: Groups,
        may_share: Callable[[Any], bool],
        delay: int = 0,
    ) -> None:
        """``manager`` is vLLM's KV cache manager with these ``groups``; ``may_share`` tells whether
        a request may share its blocks.  ``delay`` holds marks back for so many further steps: 1
        with speculative decoding, because the drafter still writes after its step's output has
        arrived.  Raises PoolChanged if this vLLM keeps no block tables where they are read."""
        self._cache = cache
        self._publisher = cache.publisher
        self._pool = manager.block_pool
        self.kept = KeptBlocks(cache, manager.block_pool)
        self._tables = list(zip(groups.all, block_tables(manager, len(groups.all)), strict=True))
        self._cached = cached_counts(manager, len(groups.all))
        self._windows = any(group.window for group in groups.all)
        self._block_size = groups.all[0].block_size // groups.all[0].scale
        """Tokens per hash."""
        self._may_share = may_share
        self._delay = delay
        self.expecting = True
        """Whether an epoch has begun or will: blocks computed before its begin are published
        after it.  If none will begin, marks would only pile up."""
        self.pending_changes = False
        """Whether blocks were retracted since this was last set to False, or computed blocks are
        not published yet: call ``publish_computed`` and the cache's
        ``publisher.drain_before_dispatch`` before the next step is dispatched."""
        self._marks = Marks(len(self._pool.blocks), self._pool.null_block.block_id)
        self._epochs = 0
        """How many epochs have ended."""
        self._requests: dict[str, TrackedRequest] = {}
        self._steps: deque[tuple[int, CompletedRuns]] = deque()
        """Steps under way that complete blocks, by their numbers."""
        self._computed: list[Run] = []
        """Runs of computed blocks; some blocks of each have no hash yet."""
        self._promised: dict[BlockId, Sequence[BlockId]] = {}
        """Block that a load under way will fill -> all blocks of that load, in order."""
        self._held: dict[BlockId, int] = {}
        """Promised block -> the first step that computes on top of it."""

    # -- requests

    def track(self, request: Any) -> None:
        """A request has arrived: track its steps from now on."""
        self._requests[request.request_id] = TrackedRequest(request)

    def untrack(self, request_id: str) -> None:
        """The request has ended.  The blocks that its steps computed stay published."""
        self._requests.pop(request_id, None)

    def shares(self, request_id: str) -> bool:
        """Whether the request is running and may share its blocks."""
        tracked = self._requests.get(request_id)
        return tracked is not None and self._may_share(tracked.request)

    # -- changes, before the step that makes them is dispatched

    def blocks_change(self, blocks: Sequence[BlockId]) -> None:
        """The blocks lose their hashes: retract them."""
        if published := self._marks.withdraw(blocks):
            self._retract(published)

    def blocks_handed_out(self, blocks: Sequence[Any]) -> None:
        """These pool blocks are about to get new contents: retract them."""
        for block in blocks if self._promised else ():
            self._promised.pop(block.block_id, None)  # of a request that did not wait for it
        if self._publisher.retract_marked(self._marks, blocks):
            self.pending_changes = True

    def stop_expecting(self) -> None:
        """The epoch has ended, and none will begin for the time being.  Forget all marks: no block
        computed so far may be published any more, nor any block computed on top of it.  vLLM may
        keep such blocks, for running requests or as its cache."""
        self.expecting = False
        self._epochs += 1
        self._marks.clear_all()
        self._steps.clear()
        self._computed.clear()
        self._promised.clear()
        self._held.clear()

    def update_expecting(self, epoch_state: object | None) -> None:
        """Call before a step is built, with the cache's ``epoch_state``.  If no epoch can begin,
        stop expecting one; if one has begun after all, publish what is computed from now on."""
        if self.expecting and epoch_state is None and self._cache.failed:
            self.stop_expecting()
        elif epoch_state is not None:
            self.expecting = True

    def step_built(self, number: int, scheduled: dict[str, int]) -> CompletedRuns:
        """A step that computes ``scheduled`` tokens of each request is about to be dispatched.
        Returns the blocks that it completes."""
        runs: CompletedRuns = []
        if not self.expecting:
            return runs
        size, epochs, drafts = self._block_size, self._epochs, self._delay > 0
        for tracked, first, end in touching(self._requests, scheduled, size, epochs, drafts):
            if completed := self._writes(number, tracked, first, end):
                shared = self._may_share(tracked.request)
                runs += [(shared, run) for run in completed]
        if runs:
            self._steps.append((number, runs))
        return runs

    def _writes(self, number: int, tracked: TrackedRequest, first: int, end: int) -> list[Run]:
        """The step computes a request's tokens up to ``end``, from hash ``first`` on.  Returns
        the blocks that it completes, by group."""
        request = tracked.request
        if tracked.epochs != self._epochs or tracked.preemptions != request.num_preemptions:
            self._start(number, tracked)
        # In a streaming-input session vLLM drops accepted drafts after a stop token and goes on:
        # the KV of these drafts stays, under the hash of the next input.
        if self._delay and request.num_prompt_tokens > tracked.prompt:
            tracked.sound = False
        # With asynchronous scheduling the last token's value is not known yet.
        known = min(end, request.num_tokens + request.num_output_placeholders)
        tracked.complete = 0
        runs = []
        for group, tables in self._tables:
            table, begin = tables.get(request.request_id, ()), first // group.scale
            complete = known // group.block_size
            tracked.complete = max(tracked.complete, complete * group.scale)
            last = min(-(-end // group.block_size), len(table))
            packed, published = self._marks.write(
                table, begin, last, complete if tracked.sound else begin
            )
            if published:
                self._retract(published)
            if packed:
                runs.append(_run(request.block_hashes, begin, packed, group, request.request_id))
        return runs

    def _start(self, number: int, tracked: TrackedRequest) -> None:
        """A request's first step, in its tables or in this epoch: check the blocks below it."""
        request = tracked.request
        tracked.epochs, tracked.preemptions = self._epochs, request.num_preemptions
        tracked.prompt = request.num_prompt_tokens
        tracked.sound, below = True, []
        for group, tables in self._tables:
            whole = -(-request.num_computed_tokens // group.block_size)
            table = tables.get(request.request_id, ())
            if whole and self._marks.sound(table, whole) != whole:
                tracked.sound = False
            elif self._promised:
                below += [block.block_id for block in table[:whole]]
        if tracked.sound:
            for block in below:
                if block in self._promised:
                    self._held.setdefault(block, number)

    # -- imports

    def blocks_promised(self, blocks: Sequence[BlockId]) -> None:
        """The step being built hands the ranks a load that will fill these blocks.

        Call before ``step_built``.  The blocks count as sound while the load is under way, so
        the same step may compute on top of them.  The results of this step, and of all later
        ones, are published only when each promised block below them was passed to
        ``blocks_loaded`` or ``blocks_failed``, or a new epoch has begun.
        """
        if self.expecting:
            self._promised.update(dict.fromkeys(blocks, blocks))
            self._marks.make_sound(blocks)

    def import_ended(self, request_id: str, good: Iterable[LoadedBlocks]) -> None:
        """An import has ended: publish what it has filled if its request may share it."""
        shown = self.shares(request_id)
        for loaded in good:
            self.blocks_loaded(loaded, shown, request_id)

    def blocks_loaded(self, loaded: LoadedBlocks, shown: bool = True, request_id: str = "") -> None:
        """These blocks of a load were imported and checked on every rank.  Call before
        ``step_done`` of the same output, also if the request has ended or its blocks are not to
        be ``shown``.  Blocks of a load that began in an earlier epoch are ignored."""
        chain, first, blocks, number = loaded
        group = self._tables[number][0]
        promised = [self._promised.pop(block, None) is not None for block in blocks]
        for block in blocks if self._held else ():
            self._held.pop(block, None)
        if not shown:
            return
        whole = [(first, blocks)]
        if not all(promised):
            whole = [(first + i, [block]) for i, block in enumerate(blocks) if promised[i]]
        for index, some in whole:
            packed = self._marks.with_versions(some)
            self._computed.append(_run(chain, index, packed, group, request_id))

    def blocks_failed(self, blocks: Iterable[BlockId]) -> None:
        """Loads, kvshm's or another connector's, did not fill these blocks.  Call before
        ``blocks_loaded`` and ``step_done`` of the same output.

        In the block tables of every request, the first such block and all blocks behind it are
        retracted and no longer sound, in all groups; so are the blocks that steps computed on top
        of them for ended requests.  If such a request is running, vLLM drops tokens and computes
        them again in place, with the hashes left as they are; with asynchronous scheduling vLLM may
        then compute a token that it dropped before it knew the token.  So the blocks that this
        request computes until it is preempted are not sound either.
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
            if behind := self._behind(tracked.request.request_id, doubtful):
                tracked.sound = False
                doubtful.update(behind)
        for block in doubtful:
            self._promised.pop(block, None)
            self._held.pop(block, None)
        if published := self._marks.clear(list(doubtful)):
            self._retract(published)

    def _behind(self, request_id: str, doubtful: set[BlockId]) -> list[BlockId]:
        """The request's first doubtful block and all blocks behind it, in all groups."""
        null = self._pool.null_block.block_id
        tables = [
            (group.block_size, [block.block_id for block in tables.get(request_id, ())])
            for group, tables in self._tables
        ]
        places = [i * size for size, ids in tables for i, b in enumerate(ids) if b in doubtful]
        if not places:
            return []
        token = min(places)
        return [b for size, ids in tables for b in ids[token // size :] if b != null]

    # -- what is known computed, once a step's output has arrived

    @property
    def fence(self) -> int:
        """The step whose marks are held back only until a fence has passed (``step_done``).  0:
        there is none."""
        return self._steps[-1][0] if self._delay and self._steps and not self._held else 0

    def step_done(self, number: int, fenced: bool = False) -> None:
        """The output of a step that ran the model has arrived, or (``fenced``) every rank has
        passed a fence behind that step: then memory holds on every rank everything that this step
        and all earlier ones wrote, the drafter's part included."""
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
        """Publish the blocks that are computed and hashed by now.  The others keep their marks:
        decoded and imported blocks get their hash a little later."""
        if self._computed:
            left = self._publisher.publish_marked(self._marks, self._pool.blocks, self._computed)
            self._computed = list(filter(self._awaits_hashes, left)) if self._windows else left
            self.pending_changes |= bool(self._computed)

    def _awaits_hashes(self, run: Run) -> bool:
        """Whether vLLM may still give blocks of the run a hash.  In windowed groups it leaves out
        blocks that no hit needs."""
        if run.owner is None:
            return True
        request_id, group = run.owner
        looked_at: int = self._cached[group].get(request_id, run.end)
        return looked_at < run.end

    def _retract(self, published: list[BlockId]) -> None:
        self.pending_changes = True
        self._publisher.retract(published)


def _run(chain: list[bytes], first: int, packed: bytes, group: Group, request_id: str) -> Run:
    """A run of a request's blocks; its owner tells whether it would wait for hashes in vain."""
    owner = (request_id, group.number) if group.window else None
    return Run(chain, first, packed, group.scale, owner)
