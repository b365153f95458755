"""What the coordinator's messages mean to an engine: the client's callbacks.

All methods run on the client's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .counters import INDEX_FULL, REJOINS, RESYNCS
from .epoch_state import EpochState
from .log import logger
from .miss_report import MissReport
from .protocol import EngineInfo, Joined, Refused, Stranger
from .strangers import divide, notes, sentence
from .terms import Epoch, LeaseBit

log = logger(__name__)

NOTES = 8
"""What strangers may take of the slot table's error log, which holds 16 entries: of a join's the
most alike are named; the fewer there are, the more fields of each."""

NAMED = 256
"""Strangers that are remembered as named in the log; of so many restarts the oldest may be named
a second time."""


class Membership:
    """Keeps the peers of the present life as the coordinator tells; implements
    ``client.Member``.  ``begin`` gives the present life, begun now if it is due; ``present``
    only looks; ``start`` is the command that starts the coordinator this engine looks for."""

    def __init__(
        self,
        begin: Callable[[], EpochState | None],
        present: Callable[[], EpochState | None],
        start: str = "kvshm-coordinator",
    ) -> None:
        self._begin = begin
        self._present = present
        self._start = start
        self._named: dict[str, None] = {}  # in the order of naming
        self._refusal = ""
        self._misses = MissReport()

    def describe(self) -> EngineInfo | None:
        life = self._begin()
        return life.info if life else None

    def joined(self, reply: Joined) -> None:
        life = self._of(reply.engine_epoch)
        if life is None:
            return
        self._refusal = ""
        life.table.set_lease_bit(LeaseBit(reply.lease_bit))
        life.table.counters.add(REJOINS, 1)
        life.peers.strangers = len(reply.strangers)
        for stranger, entries in divide(reply.strangers, NOTES):
            self._name(life, stranger, entries)
        peers = sum(info.epoch != life.table.epoch for info in reply.roster)
        log.info("joined with lease bit %d, %d engines to share with", reply.lease_bit, peers)

    def engine_joined(self, info: EngineInfo) -> None:
        if (life := self._present()) is not None and info.epoch != life.table.epoch:
            life.peers.joined(info)
            log.info("engine %s (pid %d) joined", info.name, info.pid)

    def engine_suspected(self, epoch: int) -> None:
        if (life := self._present()) is not None:
            life.peers.suspected(Epoch(epoch))

    def engine_recovered(self, epoch: int) -> None:
        if (life := self._present()) is not None:
            life.peers.recovered(Epoch(epoch))

    def engine_gone(self, epoch: int, reason: str) -> None:
        if (life := self._present()) is not None and epoch != life.table.epoch:
            life.peers.gone(Epoch(epoch))
            log.info("engine of epoch %016x is gone: %s", epoch, reason)

    def engine_events(self, batches: Sequence[tuple[int, bytes]]) -> None:
        if (life := self._present()) is not None:
            own = life.table.epoch
            life.peers.events([batch for batch in batches if batch[0] != own])

    def rescan(self, epoch: int) -> None:
        if (life := self._present()) is not None and epoch != life.table.epoch:
            life.peers.rescans.ask(Epoch(epoch))

    def scan_again(self, enough: Callable[[], bool]) -> None:
        if (life := self._present()) is not None:
            scans = life.peers.rescans.work_off(life.peers.rescan, enough)
            life.table.counters.add(RESYNCS, scans)

    def stranger_joined(self, stranger: Stranger) -> None:
        if (life := self._present()) is not None:
            others = max(0, life.peers.strangers)  # this one is counted with the next tick
            self._name(life, stranger, max(1, NOTES // (others + 1)))

    def strangers_counted(self, count: int) -> None:
        if (life := self._present()) is not None:
            life.peers.strangers = count

    def refused(self, message: Refused) -> None:
        if self._of(message.engine_epoch) is None:
            return  # reset meanwhile, table and all: it joins with its new epoch
        text = f"the coordinator refuses this engine: {message.reason}; {message.remedy}"
        if text != self._refusal:
            self._refusal = text
            log.warning("%s (serving on, unshared)", text)

    def coordinator_missing(self) -> None:
        log.warning("no coordinator: nothing is shared until one is started: %s", self._start)

    def coordinator_lost(self) -> None:
        log.warning("no coordinator: serving on with what is known, joining again when it is back")

    def beat(self) -> None:
        """About once a second: show life in the own table, and tell of misses now and then."""
        if (life := self._present()) is not None:
            life.table.beat()
            life.peers.look_for_deaths()
            life.peers.write_again()
            life.peers.attach_again()
            counters, refused = life.table.counters, life.peers.stats().refused_entries
            counters.add(INDEX_FULL, refused - counters.read(INDEX_FULL))
            if (line := self._misses.line(life.table)) is not None:
                log.info("%s", line)

    def count(self, counter: int, amount: int = 1) -> None:
        if (life := self._present()) is not None:
            life.table.counters.add(counter, amount)

    def _of(self, epoch: int) -> EpochState | None:
        life = self._present()
        return life if life is not None and life.table.epoch == epoch else None

    def _name(self, life: EpochState, stranger: Stranger, entries: int) -> None:
        """Say why an engine of this node cannot be shared with: once in the log, and in the
        own table for ``dump_index``."""
        for note in notes(stranger, entries):
            life.table.log_error(note)
        line = sentence(stranger)
        if line not in self._named:
            self._named[line] = None
            log.warning("%s", line)
        if len(self._named) > NAMED:
            del self._named[next(iter(self._named))]
