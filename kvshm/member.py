"""What the coordinator's messages mean to an engine: the client's callbacks.

All methods run on the client's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from .counters import REJOINS, RESYNCS
from .life import Life
from .log import logger
from .protocol import EngineInfo, Joined, Refused, Stranger
from .terms import Epoch, LeaseBit

log = logger(__name__)


class Membership:
    """Keeps the peers of the present life as the coordinator tells; implements
    ``client.Member``.  ``begin`` gives the present life, begun now if it is due; ``present``
    only looks."""

    def __init__(
        self, begin: Callable[[], Life | None], present: Callable[[], Life | None]
    ) -> None:
        self._begin = begin
        self._present = present
        self._strangers: set[tuple[int, str]] = set()
        self._refusal = ""

    def describe(self) -> EngineInfo | None:
        life = self._begin()
        return life.info if life else None

    def joined(self, reply: Joined) -> None:
        life = self._of(reply.engine_epoch)
        if life is None:
            return
        self._refusal = ""
        life.table.lease_bit = LeaseBit(reply.lease_bit)
        life.table.counters.add(REJOINS, 1)
        for stranger in reply.strangers:
            self._name_stranger(stranger)
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

    def engine_events(self, epoch: int, records: bytes) -> None:
        if (life := self._present()) is not None and epoch != life.table.epoch:
            life.peers.events(Epoch(epoch), records)

    def rescan(self, epoch: int) -> None:
        if (life := self._present()) is not None and epoch != life.table.epoch:
            life.table.counters.add(RESYNCS, 1)
            life.peers.rescan(Epoch(epoch))

    def refused(self, message: Refused) -> None:
        text = f"the coordinator refuses this engine: {message.reason}; {message.remedy}"
        if text != self._refusal:
            self._refusal = text
            log.warning("%s (serving on, unshared)", text)

    def coordinator_lost(self) -> None:
        log.warning("no coordinator: serving on with what is known, joining again when it is back")

    def beat(self) -> None:
        """About once a second: show life in the own table."""
        if (life := self._present()) is not None:
            life.table.beat()

    def _of(self, epoch: int) -> Life | None:
        life = self._present()
        return life if life is not None and life.table.epoch == epoch else None

    def _name_stranger(self, stranger: Stranger) -> None:
        """Say once why an engine on this node cannot be shared with."""
        for field, (ours, theirs) in stranger.differences.items():
            if (stranger.pid, field) in self._strangers:
                return
            self._strangers.add((stranger.pid, field))
            log.warning(
                "engine %s (pid %d) cannot share with this one: %s differs (%s here, %s there)",
                stranger.name, stranger.pid, field, ours, theirs,
            )  # fmt: skip
            return
