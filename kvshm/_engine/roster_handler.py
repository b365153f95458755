"""Applies the coordinator's updates to an engine's peers, on the client's thread."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from kvshm._base.core_lines import CoreLine
from kvshm._base.ids import NO_LEASE_BIT, Epoch, LeaseBit
from kvshm._base.log import LogLimit, engine_name, logger
from kvshm._base.syncpoints import SyncPoint, sync_point
from kvshm._node import incompatible
from kvshm._node.peers import Peers
from kvshm._node.protocol import (
    OTHER_VERSION,
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    IncompatibleEngine,
    IncompatibleJoined,
    Joined,
    Refused,
    Tick,
)
from kvshm._node.updates import Coordinator, EventBatches, EventsLost, Update
from kvshm._shm.error_log import ErrorCode
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.statistics import INDEX_FULL, REJOINS, RESYNCS

from .epoch_state import EpochState
from .minute_report import MinuteReport

log = logger(__name__)

MAX_RECORDED = 8
"""Incompatible engines that a join records in the slot table's error log, of 16 entries."""
MAX_REMEMBERED = 256
"""Lines remembered as logged; with more of them the oldest may be logged again."""


class RosterHandler:
    """Keeps the peers of the present epoch up to date; a ``UpdateHandler``.  ``begin`` returns the
    present epoch and begins it if it is due; ``start``: the coordinator's command, for the log."""

    def __init__(
        self,
        begin: Callable[[], EpochState | None],
        present: Callable[[], EpochState | None],
        start: str = "kvshm-coordinator",
    ) -> None:
        self._begin = begin
        self._present = present
        self._start = start
        self._log_limit = LogLimit(math.inf, most=MAX_REMEMBERED)
        self._joined_at: tuple[int, int] = (0, 0)
        self.refusal = ""
        """Why the coordinator refuses the engine, as last heard; empty if it does not."""
        self.refused: Epoch | None = None
        """The epoch that it refuses for a reason that does not pass by itself."""
        self._unknown: set[int] = set()
        """Engines of the roster at this epoch's first join that are not known yet."""
        self._minute_report = MinuteReport()

    def knows_roster(self, epoch: Epoch) -> bool:
        """Whether the own ``epoch`` has joined, and each engine that the roster named then is in
        the replica, or silent, or gone.  Any thread."""
        return self._joined_at[0] == epoch and not self._unknown

    def describe(self) -> EngineInfo | None:
        state = self._begin()
        return state.info if state else None

    def apply(self, update: Update) -> None:
        state = self._present()
        match update:
            case EventBatches(batches) if state is not None:  # first: the most frequent update
                state.peers.apply_events(batches)
            case Coordinator.MISSING:
                log.line(CoreLine.NO_COORDINATOR, self._start)
            case Coordinator.LOST:
                log.line(CoreLine.COORDINATOR_LOST)
            case _ if state is None:
                return
            case Joined() | Refused():
                if update.engine_epoch == state.table.epoch:  # else the epoch has ended meanwhile
                    self._handle_reply(state, update)
            case IncompatibleJoined(engine=other):
                _record(state.table, other)
                self._log_once(other)
            case Tick(num_incompatible=count):
                state.peers.num_incompatible = count
            case _:
                self._note_known(state, _apply_to_peers(state.peers, update))

    def _handle_reply(self, state: EpochState, reply: Joined | Refused) -> None:
        self.refused = None
        if isinstance(reply, Refused):
            text = f"the coordinator refuses this engine: {reply.reason}; {reply.remedy}"
            if text != self.refusal:
                log.line(CoreLine.REFUSED, reply.reason, reply.remedy)
            self.refusal = text
            self.refused = None if reply.retry else state.table.epoch
            code = ErrorCode.OTHER_VERSION if reply.code == OTHER_VERSION else ErrorCode.REFUSED
            state.table.log_error(reply.remedy, reply.reason, code=code)
            return
        self.refusal = ""
        state.table.set_lease_bit(LeaseBit(reply.lease_bit))
        if reply.lease_bit == NO_LEASE_BIT:
            state.table.log_error(code=ErrorCode.NO_LEASE_BIT)
        if self._joined_at[0] == state.table.epoch:
            state.table.counters.add(REJOINS, 1)
        else:
            self._unknown = {info.epoch for info in reply.roster} - {state.table.epoch}
        state.peers.num_incompatible = len(reply.incompatible)
        for other in reply.incompatible[:MAX_RECORDED]:
            _record(state.table, other)
            self._log_once(other)
        peers = sum(info.epoch != state.table.epoch for info in reply.roster)
        who = engine_name(state.table.epoch, state.table.engine, state.table.pid)
        here = state.table.epoch, reply.coordinator_epoch
        level = logging.DEBUG if self._joined_at == here else logging.INFO  # so that peers scan
        self._joined_at = here
        log.line(CoreLine.JOINED, who, reply.lease_bit, peers, level=level)

    def _note_known(self, state: EpochState, epochs: set[int]) -> None:
        """What was to be done about these engines has been done, or failed."""
        self._unknown -= {epoch for epoch in epochs if not state.peers.will_try_again(epoch)}

    def scan_again(self, enough: Callable[[], bool]) -> None:
        if (state := self._present()) is not None:
            scans = state.peers.scan_queue.scan_due(state.peers.rescan, enough)
            state.table.counters.add(RESYNCS, scans)

    def beat(self) -> None:
        """About once a second: write the heartbeat and look after the peers; once a minute, log how
        many lookups found a prefix."""
        if (state := self._present()) is not None:
            sync_point(SyncPoint.BEAT)
            state.table.beat()
            state.peers.look_for_deaths()
            state.peers.try_again()
            self._note_known(state, self._unknown)
            counters, refused = state.table.counters, state.peers.replica.refused
            counters.add(INDEX_FULL, refused - counters.read(INDEX_FULL))
            if (line := self._minute_report.line(state.table)) is not None:
                log.filled(line)

    def count(self, counter: int, amount: int = 1) -> None:
        if (state := self._present()) is not None:
            state.table.counters.add(counter, amount)

    def _log_once(self, other: IncompatibleEngine) -> None:
        """Log once why this engine cannot share with ``other``.  If the other engine serves
        another model, log it once for all engines with the same differences."""
        line, level = incompatible.log_line(other), logging.WARNING
        about: object = line
        if incompatible.has_another_model(other):
            about, level = tuple(other.differences.items()), logging.INFO
        if self._log_limit.allows(CoreLine.INCOMPATIBLE, hash(about)):
            log.filled(line, level)


def _record(table: OwnSlotTable, other: IncompatibleEngine) -> None:
    """Record why the engine cannot share with ``other``."""
    table.log_error(*incompatible.record(other), code=ErrorCode.CANNOT_SHARE)


def _apply_to_peers(peers: Peers, update: Update) -> set[int]:
    """Returns the engines that have joined, are suspected or have gone."""
    match update:
        case EventsLost(epoch):
            peers.scan_queue.add(Epoch(epoch))
        case EngineJoined(engine=info):
            peers.joined(info)
            log.line(CoreLine.PEER_JOINED, info.log_name)
            return {info.epoch}
        case EngineSuspected(epoch=epoch):
            peers.suspected(Epoch(epoch))
            return {epoch}
        case EngineRecovered(epoch=epoch):
            peers.recovered(Epoch(epoch))
        case EngineGone(epoch=epoch, reason=reason):
            log.line(CoreLine.PEER_GONE, peers.gone(Epoch(epoch)), reason)
            return {epoch}
    return set()
