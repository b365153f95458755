"""A joined engine's life: its epochs, its end, and what a fork leaves of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from kvshm._base.core_lines import CoreLine
from kvshm._base.forks import guard_forks
from kvshm._base.log import LogLimit, logger
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.groups import Groups
from kvshm.errors import KvshmError, MisuseError

from .halves_in_one import HalvesInOne
from .identity import Identity
from .load import wait_until, wait_until_async
from .loads import Loads
from .own_blocks import OwnBlocks, pack_contents

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
        self._refusal = ""
        self._own = own
        self._groups = groups
        self._fields = fields
        self._lock = threading.RLock()
        self._loads = Loads(own)
        self._log_limit = LogLimit()
        self._paused = self._closed = False
        self._open: EpochState | None = None
        self._halves: HalvesInOne | None = None
        try:
            self._halves = open_halves(self._opened)
        except Exception as exc:  # any, of a transport: for example, no directory or descriptors
            self._refuse(exc)
        guard_forks(self)

    @property
    def refusal(self) -> str:
        """Why this engine shares nothing: for good, or for as long as the coordinator refuses it.
        Empty if it may share."""
        halves = self._halves
        return self._refusal or (halves.cache.refusal if halves is not None else "")

    def _refuse(self, exc: Exception) -> None:
        """Share nothing, for good.  An unforeseen error is logged in full."""
        foreseen = isinstance(exc, KvshmError | OSError)
        self._refusal = str(exc) if foreseen else f"{type(exc).__name__}: {exc}"
        log.line(CoreLine.NOT_SHARING, self._refusal, exc_info=None if foreseen else exc)

    # -- joining

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called: a call that needs the cache raises MisuseError then."""
        return self._closed

    @property
    def joined(self) -> bool:
        """Whether a coordinator knows this engine, and other engines may read its blocks."""
        halves, state = self._halves, self._open
        return halves is not None and state is halves.cache.epoch_state and halves.cache.is_member

    @property
    def epoch(self) -> int:
        """Random number of this engine's present epoch, by which others name it; 0 while it has
        none."""
        state = self._open
        return state.table.epoch if state is not None else 0

    def wait_joined(self, timeout: float | None = None) -> bool:
        """Wait until ``joined``, ``timeout`` seconds at most (None: for ever).  Returns ``joined``;
        at once, False, if this engine shares nothing, also if the coordinator refuses it:
        ``refusal`` says why.  It still joins later if the coordinator's reason has gone by then."""
        wait_until(self._need_not_wait, timeout)
        return self.joined

    @property
    def _shares(self) -> bool:
        """Whether neither ``close``, its settings nor its memory forbid it to share."""
        return self._halves is not None

    @property
    def _is_refused(self) -> bool:
        """Whether waiting is of no use, because this engine may not share."""
        halves = self._halves
        return halves is None or halves.cache.is_refused

    async def wait_joined_async(self, timeout: float | None = None) -> bool:
        """Like ``wait_joined``, without blocking the event loop."""
        await wait_until_async(self._need_not_wait, timeout)
        return self.joined

    def _need_not_wait(self) -> bool:
        return self.joined or self._is_refused

    def _meet_peers(self, timeout: float) -> None:
        """Wait until the engines that the roster named at the join are known, for ``join``."""
        wait_until(
            lambda: (halves := self._halves) is None or not halves.cache.meets_peers, timeout
        )

    def _start(self, identity: Identity) -> None:
        with self._lock:
            unusable = self._begin(identity)
        self._give_up(unusable)

    def _begin(self, identity: Identity) -> HalvesInOne | None:
        """Begin an epoch.  Returns both halves if they cannot: close them without the lock."""
        self._identity, halves = identity, self._halves
        if halves is not None:
            try:
                halves.begin_epoch(self._fields(identity), self._groups, self._own.find_run)
            except Exception as exc:  # any, of a transport
                self._refuse(exc)
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
            if not isinstance(identity, Identity):
                raise MisuseError(f"identity is {identity!r}; give an Identity")
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
        """An epoch is open on both halves: publish what waits.  Client's thread."""
        with self._lock:
            if self._closed or self._halves is None or state is not self._halves.cache.epoch_state:
                return
            self._open = state
            self._own.begin_epoch()
            if not self._paused:
                self._publish_waiting()

    def _living(self) -> HalvesInOne | None:
        """Both halves, None if this engine shares nothing.  Takes note of the loads that have
        ended.  Raises MisuseError once closed."""
        if self._closed:
            raise MisuseError(f"node {self.name} is closed; join() again")
        if (halves := self._halves) is not None:
            self._loads.collect(halves)
        return halves

    # -- what an epoch begins and a call does alike

    def _publish_waiting(self) -> int:
        """Show what is published and not shown yet.  Returns how many blocks became readable."""
        halves, state = self._halves, self._open
        if halves is None or state is None or state is not halves.cache.epoch_state:
            return 0
        contents = self._own.take_waiting()
        try:
            halves.ranks.write_checksums(list(contents))
            return halves.cache.publisher.publish(*pack_contents(contents))
        except Exception:  # any, of a transport: these blocks stay unshown
            if self._log_limit.allows(CoreLine.PUBLISH_FAILED):
                log.line(CoreLine.PUBLISH_FAILED, exc_info=True)
            return 0

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
        try:
            if halves is not None:
                halves.close()  # without the lock, which the client's thread may want
        except Exception:  # any, of a transport
            log.line(CoreLine.EXPORT_NOT_CLOSED, exc_info=True)
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        self._loads.end_all()
        self._halves = self._open = None

    def forget_in_child(self) -> None:
        """Internal: a forked child has no part in the node (kvshm/_base/forks.py)."""
        self._lock = threading.RLock()
        self._refusal = "this process was forked from the engine that has joined"
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{', joined' if self.joined else ''}>"
