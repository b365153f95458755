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

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
from .free_order import FreeOrder
from .pending_blocks import CompletedRuns, PendingBlocks
from .pool_watch import CACHED, TABLES, by_group


class TrackedRequest:
    """A request and the state of its block tables."""

    __slots__ = ("complete", "doubtful", "epochs", "preemptions", "prompt", "request", "sound")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.epochs = self.preemptions = -1
        """The tracker's epochs and the request's preemptions when its table was read last."""
        self.sound = False  # whether the blocks that the request's steps compute are sound
        self.prompt = 0  # its length, which grows with each input of a session
        self.complete = 0  # no block behind this number of hashes has a mark, in any table
        self.doubtful: list[BlockId] = []
        """Marked blocks that are complete only if drafts of a step under way are accepted."""


class BlockTracker:
    """Tracks every block from its computation to its reuse.  Scheduler's thread."""

    def __init__(
        self,
        cache: SchedulerHalf,
        manager: Any,
        groups: Groups,
        may_share: Callable[[Any], bool],
        marks: Marks,
        free_order: FreeOrder,
        delay: int = 0,
    ) -> None:
        """``manager``: vLLM's KV cache manager with these ``groups``; ``may_share``: whether a
        request may share its blocks; ``marks``: of all its blocks; ``delay``: for how many
        further steps marks are held back, 1 with speculation, because a drafter writes after its
        step's output has arrived.  Raises PoolChanged if this vLLM keeps no block tables where they
        are read."""
        self._publisher = cache.publisher
        self._pool = manager.block_pool
        self.free_order = free_order
        tables: list[Mapping[str, Sequence[Any]]] = by_group(manager, TABLES, len(groups.all))
        self._tables = list(zip(groups.all, tables, strict=True))
        cached = by_group(manager, CACHED, len(groups.all))
        self._cached = cached if any(map(_keeps_some, groups.all)) else []
        self._block_size = groups.all[0].block_size // groups.all[0].scale  # tokens per hash
        self._may_share = may_share
        self._drafts = delay > 0
        self.expecting = True
        """Whether an epoch has begun or will: blocks computed before are published then."""
        self.pending_changes = False
        """Whether ``publish_computed`` and the publisher's ``drain_before_dispatch`` must be called
        before the next step is dispatched: blocks were retracted, or wait for hashes."""
        self._marks = marks
        self._epochs = 0  # how many have ended
        self._requests: dict[str, TrackedRequest] = {}
        self._pending = PendingBlocks(delay)
        self._computed: list[Run] = []
        """Runs of computed blocks; some blocks of each have no hash yet."""

    # -- requests

    def track(self, request: Any) -> None:
        """Track the steps of a request that has arrived."""
        self._requests[request.request_id] = TrackedRequest(request)

    def untrack(self, request_id: str) -> None:
        """Forget a request that has ended.  Its computed blocks stay published."""
        self._requests.pop(request_id, None)

    def last_of_prompt(self, request: Any) -> BlockId | None:
        """The block of a request's prompt that is published last: it is already, or will be once
        the output of its step is handled.  None if the prompt has none to show."""
        if not self.expecting or not self._may_share(request):
            return None
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        ends: list[tuple[int, int, Any]] = []
        for group, tables in self._tables:
            table, count = tables.get(request.request_id, ()), tokens // group.block_size
            # A state may stand anywhere, and is published with the blocks of its step.
            if 0 < count <= len(table) and not group.state:
                ends.append((count * group.block_size, group.number, table[count - 1]))
        block = max(ends)[2] if ends else self._pool.null_block
        if block is self._pool.null_block or not self._marks.sound([block], 1):
            return None
        return BlockId(block.block_id)

    # -- changes, before the step that makes them is dispatched

    def blocks_change(self, blocks: Sequence[BlockId]) -> None:
        """Retract these blocks, which lose their hashes."""
        if published := self._marks.withdraw(blocks):
            self._retract(published)

    def blocks_handed_out(self, blocks: Sequence[Any]) -> None:
        """Retract these pool blocks, which are about to get new contents."""
        for block in blocks if self._pending.promised else ():
            self._pending.promised.pop(block.block_id, None)  # its request did not wait for it
        if self._publisher.retract_marked(self._marks, blocks):
            self.pending_changes = True
        self.free_order.changed()

    def stop_expecting(self) -> None:
        """Forget all marks: the epoch has ended, and no block computed so far may be published, nor
        any computed on top of it.  vLLM may keep such blocks."""
        self.expecting = False
        self._epochs += 1
        self._marks.clear_all()
        self._pending.clear()
        self._computed.clear()

    def update_expecting(self, epoch_state: object | None, failed: object) -> None:
        """Call before a step is built, with ``epoch_state`` and ``failed`` of the cache.  If no
        epoch can begin, stop expecting one; once one has, publish what is computed from now on."""
        if self.expecting and epoch_state is None and failed:
            self.stop_expecting()
        elif epoch_state is not None:
            self.expecting = True

    def step_built(
        self, number: int, scheduled: dict[str, int], preempted: Iterable[str] | None = None
    ) -> CompletedRuns:
        """Retract what a step writes that computes ``scheduled`` tokens of each request, and is
        about to be dispatched; returns the blocks that it completes.  ``preempted``: requests that
        vLLM has preempted for it."""
        runs: CompletedRuns = []
        for name in preempted or ():
            self._clear_doubtful(name)
        if not self.expecting:
            return runs
        size, epochs, drafts = self._block_size, self._epochs, self._drafts
        for tracked, first, end in touching(self._requests, scheduled, size, epochs, drafts):
            if completed := self._writes(number, tracked, first, end):
                shared = self._may_share(tracked.request)
                runs += [(shared, run) for run in completed]
        if runs:
            self._pending.steps.append((number, runs))
        return runs

    def _clear_doubtful(self, request_id: str) -> None:
        """Take back the marks of blocks that ended with drafts: vLLM may give a block its hash and
        preempt its request at once, and no step of the request follows that would take them back.
        """
        if (tracked := self._requests.get(request_id)) is None or not tracked.doubtful:
            return
        if published := self._marks.clear(tracked.doubtful):
            self._retract(published)
        tracked.doubtful = []

    def _writes(self, number: int, tracked: TrackedRequest, first: int, end: int) -> list[Run]:
        """``step_built`` for one request, whose tokens the step computes up to ``end``, from hash
        ``first`` on."""
        request = tracked.request
        if tracked.epochs != self._epochs or tracked.preemptions != request.num_preemptions:
            self._start(number, tracked)
        # In a streaming-input session vLLM drops what a step has computed behind a stop token and
        # goes on: accepted drafts stay in the KV, and the stop token in a state, under the hash of
        # the next input.
        if request.num_prompt_tokens > tracked.prompt and (
            self._drafts or any(group.state for group, _ in self._tables)
        ):
            tracked.sound = False
        # With asynchronous scheduling the last token's value is not known yet.
        known = min(end, request.num_tokens + request.num_output_placeholders)
        tracked.complete, tracked.doubtful = 0, []
        runs = []
        for group, tables in self._tables:
            table, start = tables.get(request.request_id, ()), first // group.scale
            complete = known // group.block_size
            tracked.complete = max(tracked.complete, complete * group.scale)
            last = min(-(-end // group.block_size), len(table))
            if group.state:
                start = self._first_state(table, start, last)
            packed, published = self._marks.write(
                table, start, last, complete if tracked.sound else start
            )
            if published:
                self._retract(published)
            if packed:
                held = _held_block(group, table[start], start)
                run = _run(request.block_hashes, held, packed, group, request.request_id)
                runs.append(run)
                if self._drafts:
                    sure = max(request.num_tokens // group.block_size - start, 0)
                    tracked.doubtful += blocks_of([run])[sure:]
        return runs

    def _first_state(self, table: Sequence[Any], start: int, last: int) -> int:
        """The first of ``table[start:last]`` that a step writes.  It writes the state at its end,
        and perhaps that at the boundary before; vLLM has null blocks for all others."""
        first = last
        while first > start and table[first - 1] is not self._pool.null_block:
            first -= 1
        return first

    def _start(self, number: int, tracked: TrackedRequest) -> None:
        """Check the blocks below a request's first step, in its tables or in this epoch."""
        request = tracked.request
        tracked.epochs, tracked.preemptions = self._epochs, request.num_preemptions
        tracked.prompt = request.num_prompt_tokens
        tracked.sound, below = True, []
        for group, tables in self._tables:
            whole = -(-request.num_computed_tokens // group.block_size)
            table = tables.get(request.request_id, ())
            if whole and self._marks.touch(table, whole) != whole:
                tracked.sound = False
            elif self._pending.promised:
                below += [block.block_id for block in table[:whole]]
        if tracked.sound:
            self._pending.build_on(below, number)

    # -- imports

    def blocks_promised(self, blocks: Sequence[BlockId]) -> None:
        """Count blocks as sound that a load of the step being built will fill.

        Call before ``step_built``: the same step may compute on top of them.  What it and later
        steps compute is published once each promised block below was passed to ``blocks_loaded``
        or ``blocks_failed``, or a new epoch has begun.
        """
        if self.expecting:
            self._pending.promise(blocks)
            self._marks.make_sound(blocks)

    def import_ended(self, request_id: str, good: Iterable[LoadedBlocks]) -> None:
        """Publish what an import has filled if its request still runs and may share it."""
        tracked = self._requests.get(request_id)
        shown = tracked is not None and self._may_share(tracked.request)
        for loaded in good:
            self.blocks_loaded(loaded, shown, request_id)

    def blocks_loaded(self, loaded: LoadedBlocks, shown: bool = True, request_id: str = "") -> None:
        """Publish blocks that were imported and checked on every rank.  Call before ``step_done``
        of the same output, also if they are not to be ``shown``.  Those of a load that began in an
        earlier epoch are ignored."""
        chain, first, blocks, number = loaded
        group = self._tables[number][0]
        promised = self._pending.release(blocks)
        if not shown:
            return
        whole = [(first, blocks)]
        if not all(promised):
            whole = [(first + i, [block]) for i, block in enumerate(blocks) if promised[i]]
        for index, some in whole:
            packed = self._marks.with_versions(some)
            self._computed.append(_run(chain, index, packed, group, request_id))

    def blocks_failed(self, blocks: Iterable[BlockId]) -> None:
        """Retract blocks that loads, kvshm's or another connector's, did not fill, and all behind
        them in the block tables of every request, in all groups, and what steps computed on top of
        them for ended requests.  Call before ``blocks_loaded`` and ``step_done`` of the same
        output.

        vLLM drops tokens of a running request and computes them again in place, perhaps one that it
        did not know yet: what such a request computes until it is preempted is not sound either.
        """
        if not (doubtful := self._pending.fail(set(blocks))):
            return
        for tracked in self._requests.values():
            if behind := self._behind(tracked.request.request_id, doubtful):
                tracked.sound = False
                doubtful.update(behind)
        self._pending.release(doubtful)
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
        """As ``PendingBlocks.fence``."""
        return self._pending.fence

    def step_done(self, number: int, fenced: bool = False) -> None:
        """Publish what a step has computed whose output has arrived.  ``fenced``: every rank has
        passed a fence behind it: memory holds all that it wrote, the drafter's part included."""
        if self._pending.steps:
            self._computed += self._pending.computed(number, fenced)
        if self._computed:
            self.publish_computed()

    def publish_computed(self) -> None:
        """Publish the blocks that are computed and hashed by now; the others get hashes later."""
        if self._computed:
            left = self._publisher.publish_marked(self._marks, self._pool.blocks, self._computed)
            self._computed = list(filter(self._awaits_hashes, left)) if self._cached else left
            self.pending_changes |= bool(self._computed)

    def _awaits_hashes(self, run: Run) -> bool:
        """Whether vLLM may still give blocks of the run a hash: in windowed groups not to those
        that no hit needs."""
        if run.owner is None:
            return True
        request_id, group = run.owner
        looked_at: int = self._cached[group].get(request_id, run.end)
        return looked_at < run.end

    def _retract(self, published: list[BlockId]) -> None:
        self.pending_changes = True
        self._publisher.retract(published)


def _keeps_some(group: Group) -> bool:
    """Whether vLLM gives hashes only to blocks that some hit could need."""
    return group.window > 0 or group.state


def _held_block(group: Group, block: Any, place: int) -> int:
    """Which block of the prompt a pool block holds that stands at ``place`` of a table.  With draft
    layers vLLM keeps a prefill checkpoint one block before its place, and hashes it as that."""
    tokens = block.block_hash_num_tokens if group.state else None
    return place if not tokens or tokens % group.block_size else tokens // group.block_size - 1


def _run(chain: list[bytes], first: int, packed: bytes, group: Group, request_id: str) -> Run:
    """A run of a request's blocks; its owner tells whether it would wait for hashes in vain."""
    owner = (request_id, group.number) if _keeps_some(group) else None
    return Run(chain, first, packed, group.scale, owner)
