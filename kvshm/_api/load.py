"""What a lookup finds, and a load of what was found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvshm._base.ids import BlockId, LoadId
from kvshm._engine.groups import Part
from kvshm._engine.load_plan import Plan
from kvshm._shm.layout import RECORD_BYTES
from kvshm.errors import MisuseError

from .arguments import checked_seconds

_FIRST_PAUSE, _LONGEST_PAUSE = 0.00005, 0.002
"""Seconds between two looks at what is waited for: short at first, then twice as long each time."""


class LoadState(StrEnum):
    """State of a load."""

    PENDING = "pending"
    """Its blocks may be written at any time."""
    DONE = "done"
    """All its blocks hold what was asked for, and are the caller's."""
    FAILED = "failed"
    """Its blocks are the caller's; those in ``failed`` have to be computed."""


class Owner(NamedTuple):
    """Consecutive blocks of what was found, and the engine whose cache holds them."""

    name: str
    """As its ``join`` or its command line named the engine."""
    epoch: int
    """Random number of the engine's present epoch: two engines never have the same."""
    group: int
    """Number of the KV cache group."""
    first: int
    """Index of the first of these blocks in the prefix, in blocks of the group."""
    num_blocks: int
    """How many there are."""
    transport: str
    """The path that the bytes would take: ``posix_shm``, ``cuda_ipc``."""
    nbytes: int
    """Bytes of all of them."""


class FoundBy(Protocol):
    """What a Found comes from: its node."""

    def _lengths_of(self, found: Found) -> tuple[int, ...]: ...


class Found:
    """A prefix that other engines seem to hold: a hint, until it is loaded.  Holds no lease, so it
    may be dropped at any time; five seconds later it loads nothing.  Lengths are counted in keys:
    with one group, one key is one block.

    ``bool(found)``: whether there is anything to load.
    """

    def __init__(
        self,
        node: FoundBy,
        keys: Sequence[bytes],
        start: int,
        plan: Plan | None,
    ) -> None:
        """Only ``Node.lookup`` makes these."""
        self._node = node
        self.keys = keys
        """Those that were looked up."""
        self.start = start
        """Keys whose blocks the caller said to have."""
        self.length: int = start + (plan.length if plan is not None else 0)
        """Keys whose prefix can be restored, those before ``start`` included; ``start`` if nothing
        was found."""
        self._plan = plan
        self._lengths: tuple[int, ...] | None = None
        self.loaded: bool = False
        """Whether it was given to ``Node.load``, which takes it once."""

    def __bool__(self) -> bool:
        return self._plan is not None

    @property
    def num_blocks(self) -> int:
        """How many blocks a load of it fills, in all groups; with one group ``length - start``."""
        return self._plan.num_blocks if self._plan is not None else 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The blocks that a load fills, group by group: group, index of the first, number.  The
        blocks given to ``load`` stand in this order."""
        return self._plan.parts if self._plan is not None else ()

    @property
    def nbytes(self) -> int:
        """Bytes that a load copies."""
        return self._plan.nbytes if self._plan is not None else 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """All lengths, in keys, to which the prefix can be restored, the longest last.  With one
        group of full attention every length up to ``length``; windows keep blocks at some lengths
        only, which are looked up when this is first read."""
        if self._lengths is None:
            self._lengths = self._node._lengths_of(self)
        return self._lengths

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Who holds the blocks, in the order of ``parts``."""
        if self._plan is None:
            return ()
        runs, found = iter(self._plan.runs), []
        for group, first, num_blocks in self._plan.parts:
            done = 0
            while done < num_blocks:
                peer, records = next(runs)
                count = len(records) // RECORD_BYTES
                info, nbytes = peer.info, count * peer.block_bytes
                path = info.ranks[0].memory.transport if info.ranks else ""
                found.append(Owner(info.name, info.epoch, group, first + done, count, path, nbytes))
                done += count
        return tuple(found)

    def __repr__(self) -> str:
        return f"<Found keys {self.start} to {self.length}, {self.num_blocks} blocks>"


class LoadDriver(Protocol):
    """What drives a load: its node."""

    def _advance_loads(self) -> None:
        """Look for loads that have ended; does not block."""

    def _cancel_load(self, load: Load) -> None: ...


class Load:
    """Blocks that are being copied from other engines.  Any thread.

    It ends by itself, watched or not; then its blocks are the caller's again.
    """

    def __init__(self, node: LoadDriver, load_id: LoadId, targets: Sequence[BlockId]) -> None:
        """Only ``Node.load`` makes these."""
        self._node = node
        self._id = load_id
        self.targets: tuple[BlockId, ...] = tuple(targets)
        """The blocks that it fills, as they were given."""
        self.state: LoadState = LoadState.PENDING
        """As of the last ``poll``, of this load or another one."""
        self._good = 0

    @property
    def good(self) -> int:
        """After the end: how many of the blocks, from the first on, hold what was asked for.  With
        several groups all or none.  Raises MisuseError before: kvshm may still write all of
        them."""
        if self.state is LoadState.PENDING:
            raise MisuseError("the load is still going on; wait() or poll() until it has ended")
        return self._good

    @property
    def failed(self) -> tuple[BlockId, ...]:
        """After the end: the blocks that have to be computed: the first that could not be filled,
        and all behind it.  Raises MisuseError before."""
        return self.targets[self.good :]

    def poll(self) -> LoadState:
        """Return the present state; does not block."""
        if self.state is LoadState.PENDING:
            self._node._advance_loads()
        return self.state

    def wait(self, timeout: float | None = None) -> LoadState:
        """Wait for the end, ``timeout`` seconds at most (None: for ever); return the state, which
        is PENDING if the time is over.  Without ``timeout`` it takes as long as the copies do: some
        milliseconds, and up to two seconds if a peer hangs."""
        wait_until(self._has_ended, timeout)
        return self.poll()

    async def wait_async(self, timeout: float | None = None) -> LoadState:
        """Like ``wait``, without blocking the event loop."""
        await wait_until_async(self._has_ended, timeout)
        return self.poll()

    def _has_ended(self) -> bool:
        return self.poll() is not LoadState.PENDING

    def __await__(self) -> Generator[object, None, LoadState]:
        return self.wait_async().__await__()

    def cancel(self) -> None:
        """Have it end early and deliver nothing.  Does not block: the blocks are the caller's only
        when ``poll`` says FAILED.  Nothing happens if it has ended."""
        if self.state is LoadState.PENDING:
            self._node._cancel_load(self)

    def _end(self, good: int, bad: Collection[BlockId]) -> None:
        """``good``: blocks before the first bad one; ``bad``: all targets that are not filled."""
        self._good = good
        self.state = LoadState.DONE if good == len(self.targets) else LoadState.FAILED

    def __repr__(self) -> str:
        return f"<Load {self._id} of {len(self.targets)} blocks, {self.state}>"


def wait_until(is_over: Callable[[], bool], timeout: float | None) -> None:
    """Wait until ``is_over`` is true, ``timeout`` seconds at most.  Raises MisuseError."""
    for pause in _pauses(timeout):
        if is_over():
            break
        time.sleep(pause)  # nothing calls back (ADR 0022)


async def wait_until_async(is_over: Callable[[], bool], timeout: float | None) -> None:
    """Like ``wait_until``, without blocking the event loop."""
    for pause in _pauses(timeout):
        if is_over():
            break
        await asyncio.sleep(pause)


def _pauses(timeout: float | None) -> Iterator[float]:
    """Yield how long to wait until each next look, for ``timeout`` seconds.  Raises MisuseError."""
    pause, until = _FIRST_PAUSE, None
    if timeout is not None:
        until = time.monotonic() + checked_seconds("timeout", timeout)
    while until is None or time.monotonic() < until:
        left = pause if until is None else min(pause, until - time.monotonic())
        yield max(0.0, left)
        pause = min(2 * pause, _LONGEST_PAUSE)
