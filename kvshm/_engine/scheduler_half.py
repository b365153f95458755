"""The scheduler's half of a shared cache: the interface between an engine and kvshm.

After ``open_epoch`` a SchedulerHalf joins the node in the background, as soon as a coordinator
runs.  With ``publisher`` the scheduler publishes the blocks it has computed and retracts those it
is about to overwrite.  With ``planner`` the scheduler looks for prefixes in other engines and
begins loads, which the ranks carry out (kvshm/_rank/rank_half.py).  Nothing here knows vLLM.

Methods run on the scheduler's thread unless their docstring says otherwise; none blocks
except ``close``, and the publisher's ``drain_before_dispatch``, bounded by the drain budget.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvshm._base.core_lines import CoreLine
from kvshm._base.declined import declined_now, forget_declined, record_declined
from kvshm._base.forks import guard_forks
from kvshm._base.ids import BlockId, Epoch
from kvshm._base.log import engine_name, logger
from kvshm._base.rundir import start_command, tables_socket
from kvshm._base.timing import RetryPause
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.leftovers import clear
from kvshm._node.protocol import RankInfo
from kvshm._node.receipt import Receipt
from kvshm._shm.error_log import ErrorCode
from kvshm._shm.fds import is_served
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.statistics import HOOKS
from kvshm.config import Config, Share
from kvshm.errors import KvshmError

from .epoch_state import EngineSpec, EpochState, begin_epoch
from .load_planner import LoadPlanner
from .publisher import Publisher
from .roster_handler import RosterHandler
from .store_asks import StoreAsks

log = logger(__name__)

Fields = Mapping[str, str]


@dataclass(frozen=True)
class _EpochRequest:
    """Arguments of ``open_epoch``, kept to begin the epoch, and another one if that fails."""

    ranks: Sequence[RankInfo]
    fields: Callable[[], Fields | None]
    pause: RetryPause


@dataclass
class FirstMeeting:
    """When an engine that has just started first knows the blocks of its peers."""

    tables_socket: Path
    """Of the coordinator."""
    expected: bool | None = None
    """Whether the engine may have to wait for its peers.  None before that was asked."""
    early_until: float | None = None
    """When lookups count as early no more.  None before the first one."""


class SchedulerHalf:
    """One engine's place in the node's prefix cache."""

    def __init__(
        self,
        config: Config,
        spec: EngineSpec,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
        opened: Callable[[EpochState], None] | None = None,
    ) -> None:
        """``opened``: called on the client's thread with each epoch that has begun, if the ranks
        live in this process and need not wait for a step to hear of it."""
        who = engine_name(name=spec.name, pid=os.getpid())
        log.line(CoreLine.SHARES_IF, who, run_dir)
        self._config = config
        self.role = config.decide_role()
        """Whether the engine exports and imports.  Whoever finds more limits in the running engine
        sets it, before ``open_epoch``: an epoch's roster entry never changes."""
        self._spec = spec
        self._run_dir: Path | None = run_dir
        """None in a forked child, which leaves the directory alone."""
        self._clock = clock
        self._lock = threading.Lock()  # guards _requested and epoch_state across the two threads
        self._requested: _EpochRequest | None = None
        self.epoch_state: EpochState | None = None
        """The present epoch, None without one.  Any thread may read it; only SchedulerHalf sets
        it."""
        self.failed = False
        """Whether the last attempt to begin an epoch failed; there will be another."""
        start = start_command(run_dir, config.namespace)
        self._opened = opened
        self._handler = RosterHandler(self._open, lambda: self.epoch_state, start)
        self._client = CoordinatorClient(run_dir, config.namespace, self._handler)
        self._meeting = FirstMeeting(tables_socket(run_dir, config.namespace))
        budget = config.step_budget_ms(spec.asynchronous) / 1000
        self.publisher = Publisher(self, self._client.send_events, budget, clock)
        self.planner = LoadPlanner(config, self, clock)
        self.planner.store = StoreAsks(run_dir, config.namespace, clock)
        guard_forks(self)

    # -- epochs

    @property
    def table(self) -> OwnSlotTable | None:
        """Own slot table of the present epoch.  Any thread."""
        state = self.epoch_state
        return state.table if state else None

    @property
    def is_member(self) -> bool:
        """Whether the coordinator has the present epoch in its roster, as far as known.  Any
        thread."""
        return self.epoch_state is not None and self._client.is_member

    @property
    def refusal(self) -> str:
        """Why the coordinator refuses this engine; empty if it does not.  Any thread."""
        return "" if self.is_member else self._handler.refusal  # which hears a moment later

    @property
    def is_refused(self) -> bool:
        """Internal: whether the coordinator refuses the present epoch for a reason that does not
        pass by itself.  Any thread."""
        state = self.epoch_state
        return state is not None and self._handler.refused == state.table.epoch

    @property
    def meets_peers(self) -> bool:
        """Whether a lookup may find less than there is, because this engine joins for the first
        time and does not yet know the blocks of all engines in the roster.  False for good once it
        does, or cannot: without a coordinator, or if it imports nothing, is refused, or cannot
        begin its epoch.  Does not block.  Any thread, one at a time."""
        meeting = self._meeting
        if meeting.expected is None:
            meeting.expected = not self.role.no_imports
        if meeting.expected and self._requested is None:  # its cache was reset: perhaps later
            return False
        if meeting.expected and not self.is_member:  # the coordinator may end meanwhile
            meeting.expected = is_served(meeting.tables_socket)
        if meeting.expected:
            state = self.epoch_state
            known = state is not None and self._handler.knows_roster(Epoch(state.table.epoch))
            meeting.expected = not (known or self.failed or self.is_refused)
        return meeting.expected

    @property
    def lookups_are_early(self) -> bool:
        """Whether a lookup should wait for peers, if that holds up nothing else: as long as
        ``meets_peers``, and for KVSHM_JOIN_WAIT_MS after the first call at most."""
        meeting = self._meeting
        if meeting.expected is False:  # as soon as the engine has met its peers: costs nothing
            return False
        if meeting.early_until is None:
            meeting.early_until = self._clock() + self._config.join_wait_ms / 1000
        if self._clock() >= meeting.early_until:
            meeting.expected = False
        return self.meets_peers

    def open_epoch(self, ranks: Sequence[RankInfo], fields: Callable[[], Fields | None]) -> None:
        """Begin an epoch as soon as ``fields`` returns the fingerprint's fields; the client's
        thread calls ``fields`` until then.  ``epoch_state`` is then set, and every rank has to open
        the epoch (``RankHalf.open_epoch``) before other engines can read its blocks.  An epoch
        that cannot begin for lack of memory, descriptors or threads is tried again after a pause.
        """
        self.end_epoch()
        with self._lock:
            self._requested = _EpochRequest(ranks, fields, RetryPause(self._clock))
        self._client.rejoin()

    def end_epoch(self, *, leaves: bool = False) -> None:
        """Retract all blocks for good, without waiting: the cache was reset, the weights
        changed, or something went wrong, so keepers drop their copies, too; or the engine
        ``leaves``, and they keep them.  Idempotent."""
        with self._lock:
            self._requested = None
            self.failed = False
            state, self.epoch_state = self.epoch_state, None
        if state is not None:
            state.end(leaves=leaves)
            if not leaves:
                self.planner.store.withdrew = state.table.fingerprint, state.table.epoch
            self._client.rejoin()

    def not_opened(self, epoch: int) -> bool:
        """A rank could not open ``epoch``: end it and begin another epoch after a pause.  Returns
        False if ``epoch`` is not the present one; nothing happens then."""
        with self._lock:
            state = self.epoch_state
            if state is None or state.table.epoch != epoch:
                return False
            self.epoch_state = None
            self.failed = True
        state.end()
        self._client.rejoin()
        return True

    def leave(self, timeout: float = 0.0) -> None:
        """Tell the other engines that this engine ends: they stop using its blocks, and it plans
        no more loads.  Waits at most ``timeout`` seconds until that is sent; ``close`` has to
        follow.  Any thread."""
        self.planner.leaving = True
        self._client.leave(timeout)

    def close(self) -> None:
        """End the epoch and leave the node.  If no coordinator runs, also remove the files of
        dead engines, so that the last engine leaves nothing behind.  Blocks up to two seconds."""
        self.end_epoch(leaves=True)
        forget_declined(self._spec.name)
        self.planner.store.close()
        self._client.close(timeout=1.0)
        self._opened = None  # it refers to the rank, and so to memory
        if self._run_dir is not None:
            try:
                clear(self._run_dir, self._config.namespace, patience=1.0)
            except (KvshmError, OSError, ValueError) as exc:
                log.line(CoreLine.NOT_CLEANED, exc)

    def forget_in_child(self) -> None:
        """The epoch belongs to the parent; the child has none (kvshm/_base/forks.py)."""
        self._lock = threading.Lock()
        self._requested = self.epoch_state = self._run_dir = None

    def _open(self) -> EpochState | None:
        """Return the present epoch, and say so if it has just begun.  Client's thread."""
        before, state = self.epoch_state, self._open_when_ready()
        if state is not None and state is not before and self._opened is not None:
            self._opened(state)
        return state

    def _open_when_ready(self) -> EpochState | None:
        """Return the present epoch; try to begin it if it is due.  Client's thread."""
        with self._lock:
            wanted = self._requested
            run_dir = self._run_dir
            if self.epoch_state is not None or wanted is None or run_dir is None:
                return self.epoch_state
            if not wanted.pause.over:
                return None
            if (fields := wanted.fields()) is None:
                return None
            wanted.pause.tried()  # first, so that every failure is followed by a pause
            try:
                state = begin_epoch(
                    self._config.namespace,
                    self._spec,
                    self.role,
                    fields,
                    wanted.ranks,
                    run_dir,
                )
            # For example, no memory or threads left, or more blocks than a table can have.
            except (KvshmError, OSError, ValueError) as exc:
                level = logging.DEBUG if self.failed else logging.WARNING
                log.line(CoreLine.NOT_SHARING_NOW, exc, level=level)
                state = None
            self.epoch_state = state
            self.failed = state is None
            if state is not None:
                forget_declined(self._spec.name)
            return state

    # -- receipts

    def receipt(self, block: BlockId) -> Receipt | None:
        """Return what lets another engine wait until it has heard of ``block`` and all before it,
        which is published or will be without a change of its contents; None without an epoch, or
        if no events are sent.  Those of what is published next leave without delay."""
        if (state := self.epoch_state) is None or not self._client.is_member:
            return None
        self._client.send_soon()
        generation = state.table.slot(block).generation
        return Receipt(Epoch(state.table.epoch), block, generation)

    def is_to_hear(self, receipt: Receipt) -> bool:
        """Whether what this receipt stands for is still to be heard of: no, if this engine cannot
        use it or nobody would tell."""
        state = self.epoch_state
        return state is not None and self._client.is_member and state.peers.is_to_hear(receipt)

    # -- counters and errors in the own slot table

    def count(self, counter: int, amount: int = 1) -> None:
        """Add to a counter of the own slot table; does nothing without an epoch."""
        if (state := self.epoch_state) is not None:
            state.table.counters.add(counter, amount)

    def hook_took(self, hook: str, begun_ns: int, unfinished: int) -> None:
        """Show tools the time since one of the scheduler's hooks (``histograms.HOOKS``) began, that
        the scheduler's loop goes on, and how many requests have not ended."""
        if (state := self.epoch_state) is not None:
            state.table.loops.hook_took(HOOKS[hook], begun_ns, unfinished)

    def decline(self, reason: str) -> None:
        """Say why this engine shares nothing, in the log and for tools, until an epoch begins."""
        log.line(CoreLine.NOT_SHARING, reason)
        self.record_declined(reason)

    def record_declined(self, reason: str) -> None:
        """Leave for tools why this engine shares nothing, until an epoch begins."""
        purpose = self._config.share is Share.NONE
        declined = declined_now(self._spec.name, self._spec.model, reason, on_purpose=purpose)
        record_declined(self._config.run_dir, self._config.namespace, declined)

    def log_error(self, text: str, code: ErrorCode = ErrorCode.OTHER) -> None:
        """Record an error in the own slot table, where ``kvshm dump`` shows it.
        Any thread."""
        if (state := self.epoch_state) is not None:
            state.table.log_error(text, code=code)
