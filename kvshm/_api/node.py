"""One engine's place in the node's prefix cache, if one process has both its halves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from kvshm._engine.epoch_state import EpochState
from kvshm._engine.groups import Groups
from kvshm._engine.load_plan import Plan
from kvshm._ground.forks import guard_forks
from kvshm._ground.ids import BlockHash, BlockId
from kvshm._ground.log import logger
from kvshm.errors import KvshmError, MisuseError

from .halves_in_one import HalvesInOne
from .identity import Identity
from .load import Found, Load, pauses
from .loads import Loads
from .lookups import all_lengths, held_by_peers
from .own_blocks import Content, OwnBlocks, check_keys, check_prefix, pack_contents
from .prefix_keys import Extra, prefix_keys

log = logger(__name__)

OpenHalves = Callable[[Callable[[EpochState], None]], HalvesInOne]


class Node:
    """A joined engine.  ``kvshm.join`` makes it; ``close`` or a ``with`` statement ends it.

    Any thread may call; calls take turns.  Only ``wait_*``, ``retract``, ``drain`` and ``close``
    block.  What fails on the node (no coordinator, no memory, a peer that hangs or dies) is a miss
    and a counter; the only error raised is MisuseError, before anything is done.
    """

    def __init__(
        self,
        name: str,
        block_size: int,
        own: OwnBlocks,
        groups: Groups,
        fields: Callable[[Identity], dict[str, str]],
        open_halves: OpenHalves,
    ) -> None:
        """Only ``join`` makes these."""
        self.name = name
        """As the other engines' logs and lists show it."""
        self.block_size = block_size
        """Tokens for each key."""
        self.refusal = ""
        """Why this engine shares nothing until it is joined again; empty if it may."""
        self._own = own
        self._groups = groups
        self._fields = fields
        self._lock = threading.RLock()
        self._loads = Loads(own)
        self._paused = self._closed = False
        self._open: EpochState | None = None
        """The epoch that is open on both halves."""
        self._halves: HalvesInOne | None = None
        try:
            self._halves = open_halves(self._opened)
        except (KvshmError, OSError) as exc:  # for example, no directory, descriptors or memory
            self._refuse(str(exc))
        guard_forks(self)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        log.warning("not sharing the prefix cache: %s", reason)

    # -- joining

    @property
    def joined(self) -> bool:
        """Whether a coordinator knows this engine, and other engines may read its blocks."""
        halves, state = self._halves, self._open
        return halves is not None and state is halves.cache.epoch_state and halves.cache.is_member

    def wait_joined(self, timeout: float | None = None) -> bool:
        """Wait until ``joined``, ``timeout`` seconds at most.  Returns ``joined``; at once if this
        engine shares nothing."""
        for pause in pauses(timeout):
            if self.joined or self._halves is None:
                break
            time.sleep(pause)
        return self.joined

    def begin(self, identity: Identity) -> None:
        """Begin the first epoch.  Only ``join`` calls this."""
        with self._lock:
            unusable = self._begin(identity)
        self._give_up(unusable)

    def _begin(self, identity: Identity) -> HalvesInOne | None:
        """Begin an epoch.  Returns both halves if they cannot: close them without the lock, which
        the client's thread may want."""
        self._identity, halves = identity, self._halves
        if halves is not None:
            try:
                halves.begin_epoch(self._fields(identity), self._groups)
            except KvshmError as exc:
                self._refuse(str(exc))
                self._halves = None
                return halves
        return None

    def _give_up(self, unusable: HalvesInOne | None) -> None:
        if unusable is not None:
            unusable.close()
            with self._lock:
                self._loads.end_all()

    def reset(self, identity: Identity | None = None) -> None:
        """Retract all blocks for good, and begin another epoch: the cache was dropped or, with an
        ``identity``, the weights or settings have changed.  Does not wait for readers: what they
        copy from now on, they discard.  Loads under way fail; wait for them before their blocks are
        written."""
        if identity is not None:
            self._fields(identity)  # may raise: nothing has been done
        with self._lock:
            halves, unusable = self._living(), None
            self._own.clear()
            self._open = None
            if halves is not None:
                halves.end_epoch()
                unusable = self._begin(identity or self._identity)
        self._give_up(unusable)

    def _opened(self, state: EpochState) -> None:
        """An epoch is open on both halves: publish what was to be published meanwhile.  Client's
        thread."""
        with self._lock:
            if self._closed or self._halves is None or state is not self._halves.cache.epoch_state:
                return
            self._open = state
            if not self._paused:
                self._publish_now(self._own.contents)

    def _living(self) -> HalvesInOne | None:
        """Both halves, None if this engine shares nothing.  Takes note of the loads that have
        ended: their blocks are the caller's, who need not have watched.  Raises MisuseError once
        closed."""
        if self._closed:
            raise MisuseError(f"node {self.name} is closed; join() again")
        if (halves := self._halves) is not None:
            self._loads.collect(halves)
        return halves

    # -- keys and lookups

    def keys(self, tokens: Sequence[int], salt: bytes = b"", extra: Extra = b"") -> list[BlockHash]:
        """``kvshm.prefix_keys`` with this engine's block size."""
        return prefix_keys(tokens, self.block_size, salt=salt, extra=extra)

    def keys_batch(
        self, prompts: Iterable[Sequence[int]], salt: bytes = b"", extra: Extra = b""
    ) -> list[list[BlockHash]]:
        """``keys`` of several prompts with the same ``salt`` and ``extra``."""
        return [self.keys(tokens, salt, extra) for tokens in prompts]

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> Found:
        """Find the longest prefix of ``keys`` that other engines hold, behind the first ``start``
        keys, whose blocks the caller has.  A search in memory: no message, no lease.  Changes
        nothing, except counters."""
        check_prefix(keys, start)
        with self._lock:
            halves = self._living()
            plan: Plan | None = None
            if halves is not None and not self._paused and self._open is not None:
                planner = halves.cache.planner
                if planner.has_peers() and start < len(keys):
                    plan = planner.lookup(keys, start, len(keys))
            return Found(self, keys, start, plan)

    def lengths_of(self, found: Found) -> tuple[int, ...]:
        """``Found.lengths``, which calls this."""
        with self._lock:
            halves, state = self._halves, self._open
            if self._groups.one_full or halves is None or state is None:
                return tuple(range(found.start + 1, found.length + 1))
            return all_lengths(halves.cache.planner.search, state, found)

    def contains(self, keys: Sequence[bytes], group: int = 0) -> list[str]:
        """Return who holds the block of each key: ``own`` if this engine has published it, else
        ``peer`` if another one seems to hold it, else an empty string.  Counts nothing."""
        check_keys(keys)
        self._own.check_group(group)
        with self._lock:
            held = [False] * len(keys)
            if self._living() is not None and self._open is not None and not self._paused:
                held = held_by_peers(self._open, keys, self._groups.all[group])
            own = (self._own.find(key, group) is not None for key in keys)
            return ["own" if o else "peer" * h for o, h in zip(own, held, strict=True)]

    def wait_for(
        self, keys: Sequence[bytes], timeout: float | None = None, start: int = 0
    ) -> Found:
        """Wait until all of ``keys`` can be loaded, ``timeout`` seconds at most; return what can be
        then."""
        check_prefix(keys, start)
        for pause in pauses(timeout):
            if self._all_there(keys, start):
                break
            time.sleep(pause)
        return self.lookup(keys, start)

    async def wait_for_async(
        self, keys: Sequence[bytes], timeout: float | None = None, start: int = 0
    ) -> Found:
        """Like ``wait_for``, without blocking the event loop."""
        check_prefix(keys, start)
        for pause in pauses(timeout):
            if self._all_there(keys, start):
                break
            await asyncio.sleep(pause)
        return self.lookup(keys, start)

    def _all_there(self, keys: Sequence[bytes], start: int) -> bool:
        """Whether a lookup would find all of ``keys``, or never will; counts nothing."""
        with self._lock:
            halves = self._living()
            if halves is None or start >= len(keys):
                return True
            if self._open is None or self._paused:
                return False
            search = halves.cache.planner.search
            found = search.longest(self._open, keys, start, len(keys), len(keys))
            return bool(found.runs) and found.length >= len(keys)

    # -- loads

    def load(self, found: Found, into: Iterable[int]) -> Load:
        """Begin to copy what was found into own blocks.  Does not block, unless blocks were
        retracted without waiting: then as ``drain`` does.

        ``into``: block ids, as many as ``found.num_blocks``, in the order of ``found.parts``;
        neither published nor being loaded.  Leases are taken here, and given back by whoever ends
        the load.  From blocks that are gone meanwhile on, the load fails.
        """
        with self._lock:
            halves = self._living()
            if found.node is not self:
                raise MisuseError("another node found this; look the keys up on this one")
            if found.plan is None:
                raise MisuseError("nothing was found, so nothing can be loaded; ask `if found`")
            if found.loaded:
                raise MisuseError("this Found was loaded already; look the keys up again")
            targets = self._own.check_targets(into, found.num_blocks)
            found.loaded = True
            if halves is None:
                return self._loads.failed(self, targets)
            self._drain(halves)  # first: nobody may read the targets any more
            return self._loads.begin(self, halves, found.plan, targets)

    def advance_loads(self) -> None:
        """Take note of the loads that have ended; does not block.  Loads and lookups call this."""
        with self._lock:
            if self._halves is not None:
                self._loads.collect(self._halves)

    def cancel_load(self, load: Load) -> None:
        """``Load.cancel``, which calls this."""
        with self._lock:
            if self._halves is not None:
                self._halves.rank.cancel(load.load_id)

    # -- publishing

    def publish(
        self, keys: Sequence[bytes], block_ids: Iterable[int], start: int = 0, group: int = 0
    ) -> int:
        """Let other engines read own blocks, whose bytes are complete: work of a GPU that writes
        them has ended.  Returns how many of them are readable now; if the epoch is not open yet, or
        this engine is paused, they become so later.  Does not block.

        ``keys``: of the whole prefix.  ``block_ids``: its blocks of ``group`` from block ``start``
        on.  From now on until ``retract`` the caller must not change them.  Blocks that are
        published with the same key already are left out.
        """
        with self._lock:
            self._living()
            new = self._own.check_contents(keys, block_ids, start, group)
            self._own.add(new)
            return 0 if self._paused else self._publish_now(new)

    def _publish_now(self, contents: Mapping[BlockId, Content]) -> int:
        halves, state = self._halves, self._open
        if halves is None or state is None or state is not halves.cache.epoch_state:
            return 0
        halves.rank.write_checksums(list(contents))
        return halves.cache.publisher.publish(*pack_contents(contents))

    def retract(self, block_ids: Iterable[int], wait: bool = True) -> None:
        """Let nobody read these blocks any more, before they are written or given other contents.
        Blocks that are not published are left alone.  Blocks until nobody reads them, for the drain
        budget (KVSHM_DRAIN_BUDGET_MS) at most: what is still being copied then, its importer
        discards.  Without ``wait`` it returns at once; then call ``drain`` before writing them."""
        with self._lock:
            halves = self._living()
            gone = self._own.remove(self._own.check_retractable(block_ids))
            if halves is None or not gone:
                return
            halves.cache.publisher.retract(gone)
            self._own.undrained.update(gone)
            if wait:
                self._drain(halves)

    async def retract_async(self, block_ids: Iterable[int]) -> None:
        """Like ``retract``, without blocking the event loop: on a thread."""
        await asyncio.to_thread(self.retract, list(block_ids))

    def drain(self) -> None:
        """Wait for the readers of all retracted blocks, for the drain budget at most."""
        with self._lock:
            if (halves := self._living()) is not None:
                self._drain(halves)

    def _drain(self, halves: HalvesInOne) -> None:
        halves.cache.publisher.drain_before_dispatch()
        self._own.undrained.clear()

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
                self._publish_now(self._own.contents)

    def stats(self) -> dict[str, int]:
        """Return the counters of the present epoch by name (docs/operations.md), and ``peers``:
        engines whose blocks can be used now.  Without an epoch only that."""
        with self._lock:
            halves = self._living()
            state = halves.cache.epoch_state if halves is not None else None
            if state is None:
                return {"peers": 0}
            return {**state.table.counters.snapshot(), "peers": state.peers.stats().usable}

    # -- the end

    def close(self) -> None:
        """Leave the node: retract everything, end all loads, close the memory's export.  Blocks for
        some seconds at most.  Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            halves = self._halves
        if halves is not None:
            halves.close()  # without the lock, which the client's thread may want
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        self._loads.end_all()
        self._halves = self._open = None

    def forget_in_child(self) -> None:
        """A forked child has no part in the node (kvshm/_ground/forks.py)."""
        self._lock = threading.RLock()
        self.refusal = "this process was forked from the engine that has joined"
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Node {self.name}{', joined' if self.joined else ''}>"
