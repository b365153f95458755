"""A joined engine that deals in single blocks, whatever lies before them in their prefixes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Iterator

from kvshm._base.ids import BlockHash, BlockId, Epoch
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.load_plan import Plan
from kvshm._replica.index import Heard
from kvshm._shm.layout import RecordKind, unpack_records
from kvshm._shm.statistics import EVICTED, EVICTED_US, Counter
from kvshm.errors import KvshmError, MisuseError

from .arguments import checked_seconds, whole
from .contents import BlockContent, BlockName
from .load import Load
from .membership import Membership
from .own_blocks import TAG_BYTES
from .single_blocks import Change, FoundBlocks, LoadOfBlocks, News

_BEGUN = Heard(Epoch(0), b"")
COUNTERS = {counter.label: counter for counter in Counter.REGISTRY.values()}


class BlockNode(Membership):
    """A joined engine.  ``kvshm.join_like`` makes it; ``close`` or a ``with`` statement ends it.

    Any thread may call; calls take turns.  Only ``wait_*``, ``retract``, ``drain`` and ``close``
    wait for others; all else takes microseconds to milliseconds, more for more blocks.  What fails
    on the node (no coordinator, no memory, a peer that hangs or dies) is a miss and a counter; the
    only error raised is MisuseError, before anything is done.
    """

    _heard: deque[Heard] | None = None

    # -- what other engines have

    def _follow(self) -> None:
        """Have ``news`` say what is heard; before the first epoch begins."""
        self._heard = deque()

    def news(self) -> list[News]:
        """Return what has been heard of other engines' blocks since the last call: a hint, as a
        lookup is.  Call it often: what is heard waits for it.  Of a node that ``join`` made there
        is none."""
        heard = self._heard
        return [_as_news(heard.popleft()) for _ in range(len(heard))] if heard is not None else []

    def keepers(self) -> frozenset[int]:
        """Return the epochs of the known engines that compute nothing (``EngineView.keeps``)."""
        with self._lock:
            state = self._open
            return state.peers.keepers() if state is not None else frozenset()

    def withdrawn(self) -> frozenset[int]:
        """Return the epochs whose engines have withdrawn what they had published, and go on: their
        prefix cache was reset, or weights were written.  Copies of their blocks may be wrong."""
        with self._lock:
            state = self._open
            return state.peers.withdrawn() if state is not None else frozenset()

    def giving_away(self) -> frozenset[int]:
        """Return the epochs of engines in drain (``kvshm drain``): what they alone have is to be
        copied now."""
        with self._lock:
            state = self._open
            return state.peers.giving_away() if state is not None else frozenset()

    def in_drain(self) -> frozenset[int]:
        """Return the epochs of all engines in drain, also of those of which no more is to be
        copied: they are about to be stopped, and what they have goes with them."""
        with self._lock:
            state = self._open
            return state.peers.in_drain() if state is not None else frozenset()

    def lookup_blocks(self, names: Iterable[BlockName]) -> FoundBlocks:
        """Find single blocks in other engines.  Those that no engine holds are left out.  A search
        in memory: no message, no lease, no counter; changes nothing.  Raises MisuseError for what
        is no key."""
        wanted = list(names)
        with self._lock:
            halves = self._living()
            plan: Plan | None = None
            if halves is not None and not self._paused and self._open is not None:
                plan = halves.cache.planner.find_blocks(wanted)
            return FoundBlocks(self, plan, list(_contents(plan)) if plan is not None else ())

    def load_blocks(self, found: FoundBlocks, into: Iterable[int]) -> LoadOfBlocks:
        """Begin to copy what was found into own blocks.  Does not block, unless blocks were
        retracted without waiting: then as ``drain`` does.  Takes no leases, so no engine ever waits
        for it; blocks that are reused meanwhile fail, each for itself.

        ``into``: block ids, one for each of ``found.contents``; neither published nor being loaded,
        and unused until the load has ended.  Raises MisuseError for a FoundBlocks of nothing, of
        another node, or loaded before, and for other blocks than these.
        """
        with self._lock:
            halves = self._living()
            if not isinstance(found, FoundBlocks) or found._node is not self or not found:
                raise MisuseError(f"{found!r} cannot be loaded; look blocks up on this node")
            if found.loaded or found._plan is None:
                raise MisuseError("this was loaded already; look the blocks up again")
            targets = self._own.check_targets(into, len(found.contents))
            found.loaded = True
            if halves is None:
                return self._loads.failed_blocks(self, targets)
            self._drain(halves)  # first: the targets must not be read any more
            return self._loads.begin_blocks(self, halves, found._plan, targets)

    def _advance_loads(self) -> None:
        with self._lock:
            if self._halves is not None:
                self._loads.collect(self._halves)

    def _cancel_load(self, load: Load) -> None:
        with self._lock:
            if self._halves is not None:
                self._halves.ranks.cancel(load._id)

    # -- own blocks

    def publish_blocks(self, contents: Iterable[BlockContent], block_ids: Iterable[int]) -> int:
        """Let other engines read own blocks that hold these contents.  Returns how many of them
        have become readable; if the epoch is not open yet, or this engine is paused, they become
        so later.  From now on until ``retract`` the caller must not change them.  Does not block;
        with KVSHM_VERIFY it reads all their bytes.  Raises MisuseError for blocks that are
        published or being loaded."""
        with self._lock:
            self._living()
            self._own.add(self._own.check_separate(contents, block_ids))
            return 0 if self._paused else self._publish_waiting()

    def contents(self) -> dict[BlockId, BlockContent]:
        """Return what own published blocks hold."""
        with self._lock:
            return dict(self._own.contents)

    def retract(self, block_ids: Iterable[int], wait: bool = True) -> None:
        """Let no engine read these blocks any more, before they are written or get other contents.
        Blocks that are not published are left alone.  Waits until none reads them, for the drain
        budget (KVSHM_DRAIN_BUDGET_MS, 1 ms) at most: what is still being copied then, its importer
        discards.  Raises MisuseError for a block that is being loaded.  Without ``wait`` it returns
        at once; then call ``drain`` before writing them."""
        with self._lock:
            halves = self._living()
            blocks = self._own.check_retractable(block_ids)
            gone = self._own.remove(blocks)
            if halves is None:
                return
            if gone:
                halves.cache.publisher.retract(gone)
                self._own.undrained.update(gone)
            if wait and not self._own.undrained.isdisjoint(blocks):
                self._drain(halves)

    def evict(self, block_id: int, seconds: float) -> None:
        """``retract`` an own block without waiting, because it gives way to another one; count it,
        and the ``seconds`` for which it was kept.  Raises MisuseError as ``retract`` does, and for
        less than 0 seconds."""
        kept = checked_seconds("seconds", seconds)
        if not 0 <= kept < math.inf:
            raise MisuseError(f"seconds is {seconds!r}; give 0 or more")
        with self._lock:
            self.retract([block_id], wait=False)
            if (state := self._open) is not None:
                state.table.counters.add(EVICTED)
                state.table.counters.add(EVICTED_US, int(kept * 1e6))

    async def retract_async(self, block_ids: Iterable[int]) -> None:
        """Like ``retract``, on a thread, so that the event loop goes on.  Other calls of this node
        wait meanwhile, those of the loop included: for the drain budget at most."""
        await asyncio.to_thread(self.retract, list(block_ids))

    def drain(self) -> None:
        """Wait for the readers of all retracted blocks, for the drain budget at most."""
        with self._lock:
            if (halves := self._living()) is not None:
                self._drain(halves)

    async def drain_async(self) -> None:
        """Like ``drain``, on a thread, as ``retract_async``."""
        await asyncio.to_thread(self.drain)

    def kept(self, block_ids: Iterable[int]) -> list[BlockId]:
        """Return which of these own blocks are held, or being read, by anybody: reuse others first,
        if there are others.  While there are none it takes 0.15 us for each block, else 0.5 us."""
        with self._lock:
            blocks, halves = self._own.check_exist(block_ids), self._living()
            state = halves.cache.epoch_state if halves is not None else None
            return state.table.kept(blocks) if state is not None else []

    def pause(self) -> None:
        """Find nothing and publish nothing until ``resume``.  Published blocks stay readable, and
        loads go on."""
        with self._lock:
            self._living()
            self._paused = True

    def resume(self) -> None:
        """End ``pause``; publish what was to be published meanwhile."""
        with self._lock:
            self._living()
            if self._paused:
                self._paused = False
                self._publish_waiting()

    def stats(self) -> dict[str, int]:
        """Return the counters of the present epoch by name (docs/operations.md), and ``peers``:
        engines whose blocks can be used now.  Without an epoch only that."""
        with self._lock:
            halves = self._living()
            state = halves.cache.epoch_state if halves is not None else None
            if state is None:
                return {"peers": 0}
            return {**state.table.counters.snapshot(), "peers": state.peers.stats().usable}

    def count(self, label: str, amount: int = 1) -> None:
        """Add to a counter of the present epoch (docs/operations.md names them), if there is one.
        Raises MisuseError for a name that is none, and for less than 0."""
        found = COUNTERS.get(label)
        if found is None:
            raise MisuseError(f"{label!r} is no counter; docs/operations.md names them")
        with self._lock:
            if (state := self._open) is not None:
                state.table.counters.add(found, whole("amount", amount, 0))

    def _opened(self, state: EpochState) -> None:
        with self._lock:
            if self._heard is not None:  # before it joins, and hears of anybody
                self._heard.append(_BEGUN)
                state.peers.replica.heard = self._heard
        super()._opened(state)


def _as_news(heard: Heard) -> News:
    if heard.records is None:
        return News(heard.epoch, (), gone=True)
    return News(heard.epoch, tuple(_changes(heard.records)))


def _changes(records: bytes) -> Iterator[Change]:
    for key, block, generation, depth, kind, group in unpack_records(records):
        name = BlockName(key, group) if kind is RecordKind.PUBLISH else None
        yield Change(block, generation, name, depth)


def _contents(plan: Plan) -> Iterator[BlockContent]:
    """What the blocks of a plan hold, each of which is a run of its own."""
    for peer, packed in plan.runs:
        (record,) = unpack_records(packed)
        try:
            slot = peer.table.slot(record.block_id)
            parent, depth = slot.parent_tag, slot.depth
        except (KvshmError, IndexError):  # the load will find the block gone
            parent = depth = 0
        tag = parent.to_bytes(TAG_BYTES, "little")
        yield BlockContent(BlockHash(record.block_hash), tag, depth, record.group)
