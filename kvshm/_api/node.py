"""One engine's place in the node's prefix cache, if one process has both its halves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from kvshm._base.ids import BlockHash
from kvshm._engine.groups import Group
from kvshm._engine.load_plan import Plan
from kvshm.errors import MisuseError

from .arguments import checked_keys, checked_seconds, checked_start
from .block_node import BlockNode
from .load import Found, Load, wait_until, wait_until_async
from .lookups import all_lengths, held_by_peers
from .prefix_keys import Extra, prefix_keys


class Held(StrEnum):
    """Who holds a block (``Node.contains``)."""

    OWN = "own"
    """This engine."""
    PEER = "peer"
    """Another one."""
    NONE = ""
    """No engine that is known."""


class Node(BlockNode):
    """A joined engine.  ``kvshm.join`` makes it; ``close`` or a ``with`` statement ends it.

    Any thread may call; calls take turns.  Only ``wait_*``, ``retract``, ``drain`` and ``close``
    wait for others; all else takes microseconds to milliseconds, more for more keys.  What fails on
    the node (no coordinator, no memory, a peer that hangs or dies) is a miss and a counter; the
    only error raised is MisuseError, before anything is done.  It has all calls of BlockNode, but
    no ``news``.
    """

    @property
    def groups(self) -> tuple[Group, ...]:
        """The KV cache groups that ``join`` got, or the one that it made."""
        return self._groups.all

    # -- keys and lookups

    def keys(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        extra: Extra = b"",
        known: Sequence[bytes] = (),
    ) -> list[BlockHash]:
        """``kvshm.prefix_keys`` with this engine's block size."""
        return prefix_keys(tokens, self.block_size, salt=salt, extra=extra, known=known)

    def keys_batch(
        self, prompts: Iterable[Sequence[int]], salt: bytes = b"", extra: Extra = b""
    ) -> list[list[BlockHash]]:
        """``keys`` of several prompts with the same ``salt`` and ``extra``."""
        return [self.keys(tokens, salt, extra) for tokens in prompts]

    def lookup(self, keys: Sequence[bytes], start: int = 0) -> Found:
        """Find the longest prefix of ``keys`` that other engines hold, behind the first ``start``
        keys, whose blocks the caller has.  A search in memory: no message, no lease.  Changes
        nothing, except counters.

        ``keys``: of the whole prompt from its first block on, 32 bytes each.  Blocks that were
        published are found some milliseconds later; before this engine has joined, nothing is.
        Raises MisuseError for what is no key, and for a ``start`` beyond the keys."""
        keys = checked_keys(keys)
        start = checked_start(start, len(keys))
        with self._lock:
            halves = self._living()
            plan: Plan | None = None
            if halves is not None and not self._paused and self._open is not None:
                planner = halves.cache.planner
                if planner.has_peers() and start < len(keys):
                    plan = planner.lookup(keys, start, len(keys))
            return Found(self, keys, start, plan)

    def _lengths_of(self, found: Found) -> tuple[int, ...]:
        with self._lock:
            halves, state = self._halves, self._open
            if self._groups.is_single_full_attention or halves is None or state is None:
                return tuple(range(found.start + 1, found.length + 1))
            return all_lengths(halves.cache.planner.search, state, found)

    def contains(self, keys: Sequence[bytes], group: int = 0) -> list[Held]:
        """Return who holds the block of each key: Held.OWN if this engine has published it, or will
        once it may, else Held.PEER if another one seems to hold it, else Held.NONE, which is false.
        Counts nothing."""
        keys = checked_keys(keys)
        self._own.check_group(group)
        with self._lock:
            held = [False] * len(keys)
            if self._living() is not None and self._open is not None and not self._paused:
                held = held_by_peers(self._open, keys, self._groups.all[group])
            own = (self._own.find(key, group) is not None for key in keys)
            peer = (Held.PEER if there else Held.NONE for there in held)
            return [Held.OWN if o else other for o, other in zip(own, peer, strict=True)]

    def wait_for(
        self, keys: Sequence[bytes], timeout: float | None = None, start: int = 0
    ) -> Found:
        """Wait until all of ``keys`` can be loaded, or as many as a prefix of this engine's groups
        can have of them, ``timeout`` seconds at most (None: for ever); return what can be then.
        Returns at once if this engine shares nothing (``refusal``)."""
        keys = checked_keys(keys)
        start = checked_start(start, len(keys))
        wait_until(lambda: self._all_there(keys, start), timeout)
        return self.lookup(keys, start)

    async def wait_for_async(
        self, keys: Sequence[bytes], timeout: float | None = None, start: int = 0
    ) -> Found:
        """Like ``wait_for``, without blocking the event loop."""
        keys = checked_keys(keys)
        start = checked_start(start, len(keys))
        await wait_until_async(lambda: self._all_there(keys, start), timeout)
        return self.lookup(keys, start)

    def _all_there(self, keys: Sequence[bytes], start: int) -> bool:
        """Whether a lookup would find all of ``keys``, or never will; counts nothing."""
        with self._lock:
            halves = self._living()
            enough = self._groups.reach(start, len(keys))
            if halves is None or self._is_refused or start >= enough:
                return True
            if self._open is None or self._paused:
                return False
            search = halves.cache.planner.search
            found = search.longest(self._open, keys, start, len(keys), len(keys))
            return bool(found.runs) and found.length >= enough

    # -- loads

    def load(self, found: Found, into: Iterable[int]) -> Load:
        """Begin to copy what was found into own blocks.  Does not block, unless blocks were
        retracted without waiting: then as ``drain`` does.

        ``into``: block ids, as many as ``found.num_blocks``, in the order of ``found.parts``;
        neither published nor being loaded, and unused until the load has ended.  Leases are
        taken here, and given back by whoever ends the load.  From blocks that are gone meanwhile
        on, the load fails.  Raises MisuseError for a Found of nothing, of another node, or loaded
        before, and for other blocks than these.
        """
        with self._lock:
            halves = self._living()
            if not isinstance(found, Found):
                raise MisuseError(f"{found!r} cannot be loaded; give what lookup() returned")
            if found._node is not self:
                raise MisuseError("another node found this; look the keys up on this one")
            if found._plan is None:
                raise MisuseError("nothing was found, so nothing can be loaded; ask `if found`")
            if found.loaded:
                raise MisuseError("this Found was loaded already; look the keys up again")
            targets = self._own.check_targets(into, found.num_blocks)
            found.loaded = True
            if halves is None:
                return self._loads.failed(self, targets)
            self._drain(halves)  # first: the targets must not be read any more
            return self._loads.begin(self, halves, found._plan, targets)

    # -- publishing

    def publish(
        self, keys: Sequence[bytes], block_ids: Iterable[int], start: int = 0, group: int = 0
    ) -> int:
        """Let other engines read own blocks, whose bytes are complete: work of a GPU that writes
        them has ended.  Returns how many of them have become readable; if the epoch is not open
        yet, or this engine is paused, they become so later.  Does not block; with KVSHM_VERIFY it
        reads all their bytes.

        ``keys``: from the prefix's first block up to that of the last block given.  ``block_ids``:
        its blocks of ``group`` from block ``start`` on.  From now on until ``retract`` the caller
        must not change them.  Blocks that are published with the same key already are left out and
        not counted; several blocks may have one key.  Raises MisuseError for another number of keys
        than blocks need, and for a block that is published with another key or is being
        loaded.
        """
        with self._lock:
            self._living()
            new = self._own.check_contents(keys, block_ids, start, group)
            self._own.add(new)
            return 0 if self._paused else self._publish_waiting()

    def hold(self, keys: Sequence[bytes], seconds: float, group: int = 0) -> int:
        """Ask the engines that have these blocks, this one included, to reuse others first for
        ``seconds``, an hour at most.  A hint to engines that ask ``kept``, as vLLM's hooks do,
        which ends by itself, even if this engine dies.  Returns how many blocks were found."""
        keys = checked_keys(keys)
        self._own.check_group(group)
        if (seconds := checked_seconds("seconds", seconds, "give 0 or more")) < 0:
            raise MisuseError(f"a hold of {seconds!r} seconds; give 0 or more")
        with self._lock:
            halves = self._living()
            return halves.cache.planner.hold(keys, seconds, group) if halves is not None else 0
