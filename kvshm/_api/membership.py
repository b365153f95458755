"""A joined engine's life: its epochs, its end, and what a fork leaves of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

from kvshm._engine.epoch_state import EpochState
from kvshm._engine.groups import Groups
from kvshm._ground.forks import guard_forks
from kvshm._ground.ids import BlockId
from kvshm._ground.log import logger
from kvshm.errors import KvshmError, MisuseError

from .halves_in_one import HalvesInOne
from .identity import Identity
from .load import pauses
from .loads import Loads
from .own_blocks import Content, OwnBlocks, pack_contents

log = logger(__name__)

OpenHalves = Callable[[Callable[[EpochState], None]], HalvesInOne]


class Membership:
    """What ``Node`` is besides its calls."""

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
        self.refusal: str = ""
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
    def closed(self) -> bool:
        """Whether ``close`` was called: any other call raises MisuseError then."""
        return self._closed

    @property
    def joined(self) -> bool:
        """Whether a coordinator knows this engine, and other engines may read its blocks."""
        halves, state = self._halves, self._open
        return halves is not None and state is halves.cache.epoch_state and halves.cache.is_member

    def wait_joined(self, timeout: float | None = None) -> bool:
        """Wait until ``joined``, ``timeout`` seconds at most (None: for ever).  Returns ``joined``;
        at once if this engine shares nothing."""
        for pause in pauses(timeout):
            if self.joined or self._halves is None:
                break
            time.sleep(pause)
        return self.joined

    async def wait_joined_async(self, timeout: float | None = None) -> bool:
        """Like ``wait_joined``, without blocking the event loop."""
        for pause in pauses(timeout):
            if self.joined or self._halves is None:
                break
            await asyncio.sleep(pause)
        return self.joined

    def _start(self, identity: Identity) -> None:
        """Begin the first epoch, for ``join``."""
        with self._lock:
            unusable = self._begin(identity)
        self._give_up(unusable)

    def _begin(self, identity: Identity) -> HalvesInOne | None:
        """Begin an epoch.  Returns both halves if they cannot: close them without the lock, which
        the client's thread may want."""
        self._identity, halves = identity, self._halves
        if halves is not None:
            try:
                halves.begin_epoch(self._fields(identity), self._groups, self._own.find_run)
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

    # -- what an epoch begins and a call does alike

    def _publish_now(self, contents: Mapping[BlockId, Content]) -> int:
        halves, state = self._halves, self._open
        if halves is None or state is None or state is not halves.cache.epoch_state:
            return 0
        halves.rank.write_checksums(list(contents))
        return halves.cache.publisher.publish(*pack_contents(contents))

    def _drain(self, halves: HalvesInOne) -> None:
        halves.cache.publisher.drain_before_dispatch()
        self._own.undrained.clear()

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
        """Internal: a forked child has no part in the node (kvshm/_ground/forks.py)."""
        self._lock = threading.RLock()
        self.refusal = "this process was forked from the engine that has joined"
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{', joined' if self.joined else ''}>"
