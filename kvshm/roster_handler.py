"""What an engine does with the news of its client: it keeps the peers of its present epoch.

All methods run on the client's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from . import incompatible
from .counters import INDEX_FULL, REJOINS, RESYNCS
from .life import Life
from .log import engine_name, logger
from .miss_report import MissReport
from .news import Coordinator, EventBatches, EventsLost, News
from .peers import Peers
from .protocol import (
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    Joined,
    Refused,
    Stranger,
    StrangerJoined,
    Tick,
)
from .terms import Epoch, LeaseBit

log = logger(__name__)

MAX_NOTED = 8
"""Incompatible engines that a join notes in the slot table's error log, which holds 16 entries:
the most alike."""
MAX_NAMED = 256
"""Lines that are remembered as logged; of so many restarts the oldest may be named again."""


class RosterHandler:
    """Keeps the peers of the present life as the coordinator tells; a ``NewsHandler``.  ``begin``
    gives the present life, begun now if it is due; ``present`` only looks; ``start`` is the
    command that starts the coordinator this engine looks for."""

    def __init__(
        self,
        begin: Callable[[], Life | None],
        present: Callable[[], Life | None],
        start: str = "kvshm-coordinator",
    ) -> None:
        self._begin = begin
        self._present = present
        self._start = start
        self._named: dict[int, None] = {}  # in the order of naming
        self._joined: Epoch | None = None
        self._refusal = ""
        self._misses = MissReport()

    def describe(self) -> EngineInfo | None:
        life = self._begin()
        return life.info if life else None

    def apply(self, news: News) -> None:
        life = self._present()
        match news:
            case EventBatches(batches) if life is not None:  # first: what comes most
                life.peers.apply_events(batches)
            case Coordinator.MISSING:
                log.warning(
                    "no coordinator: nothing is shared until one is started: %s", self._start
                )
            case Coordinator.LOST:
                log.warning(
                    "no coordinator: serving on with what is known, joining again when it is back"
                )
            case _ if life is None:
                return
            case Joined() | Refused():
                if news.engine_epoch == life.table.epoch:  # else it has been reset meanwhile
                    self._answered(life, news)
            case StrangerJoined(stranger=stranger):
                life.table.log_error(incompatible.note(stranger))
                self._name(stranger)
            case Tick(strangers=count):
                life.peers.num_incompatible = count
            case _:
                _apply_to_peers(life.peers, news)

    def _answered(self, life: Life, reply: Joined | Refused) -> None:
        if isinstance(reply, Refused):
            text = f"the coordinator refuses this engine: {reply.reason}; {reply.remedy}"
            if text != self._refusal:
                self._refusal = text
                log.warning("%s (serving on, unshared)", text)
            return
        self._refusal = ""
        life.table.lease_bit = LeaseBit(reply.lease_bit)
        if self._joined == life.table.epoch:
            life.table.counters.add(REJOINS, 1)
        self._joined = life.table.epoch
        life.peers.num_incompatible = len(reply.strangers)
        for stranger in reply.strangers[:MAX_NOTED]:
            life.table.log_error(incompatible.note(stranger))
            self._name(stranger)
        peers = sum(info.epoch != life.table.epoch for info in reply.roster)
        who = engine_name(life.table.epoch, life.table.engine, life.table.pid)
        log.info("joined as %s, lease bit %d, peers to share with: %d", who, reply.lease_bit, peers)

    def scan_again(self, enough: Callable[[], bool]) -> None:
        if (life := self._present()) is not None:
            scans = life.peers.rescans.work_off(life.peers.rescan, enough)
            life.table.counters.add(RESYNCS, scans)

    def beat(self) -> None:
        """About once a second: show life in the own table, and tell of misses now and then."""
        if (life := self._present()) is not None:
            life.table.beat()
            life.peers.look_for_deaths()
            life.peers.write_again()
            life.peers.attach_again()
            counters, refused = life.table.counters, life.peers.replica.refused
            counters.add(INDEX_FULL, refused - counters.read(INDEX_FULL))
            if (line := self._misses.line(life.table)) is not None:
                log.info("%s", line)

    def count(self, counter: int, amount: int = 1) -> None:
        if (life := self._present()) is not None:
            life.table.counters.add(counter, amount)

    def _name(self, stranger: Stranger) -> None:
        """Say once in the log why an engine of this node cannot be shared with.  That another
        model is served here, too, is said once of all engines that differ in the same."""
        line, level = incompatible.line(stranger), logging.WARNING
        named = hash(line)
        if incompatible.has_another_model(stranger):
            named, level = hash(tuple(stranger.differences.items())), logging.INFO
        if named not in self._named:
            self._named[named] = None
            log.log(level, "%s", line)
        if len(self._named) > MAX_NAMED:
            del self._named[next(iter(self._named))]


def _apply_to_peers(peers: Peers, news: News) -> None:
    match news:
        case EventsLost(epoch):
            peers.rescans.ask(Epoch(epoch))
        case EngineJoined(engine=info):
            peers.joined(info)
            log.info("engine %s joined", info.who)
        case EngineSuspected(epoch=epoch):
            peers.suspected(Epoch(epoch))
        case EngineRecovered(epoch=epoch):
            peers.recovered(Epoch(epoch))
        case EngineGone(epoch=epoch, reason=reason):
            log.info("engine %s is gone: %s", peers.gone(Epoch(epoch)), reason)
