"""One life of an engine's cache: everything that belongs to one epoch and ends with it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from .config import Config
from .fingerprint import fingerprint
from .handout import HandoutServer
from .peers import Peers
from .protocol import EngineInfo, RankInfo
from .publisher import Exports
from .slots import SlotTable, TableSpec
from .terms import Epoch, Fingerprint
from .version import __version__


@dataclass(frozen=True)
class EngineSpec:
    """What does not change while an engine runs."""

    name: str
    model: str
    num_blocks: int
    block_size: int
    """Tokens per block."""
    asynchronous: bool = False
    """Whether the next step is scheduled while one runs, so that a wait can overlap."""


@dataclass(frozen=True)
class Life:
    """Slot table, exports, peers and roster entry of one epoch.

    Begun on the client's thread and ended on the scheduler's; in between the scheduler uses
    ``exports`` and looks up in ``peers``, the client's thread keeps ``peers`` up to date.
    """

    table: SlotTable
    exports: Exports
    peers: Peers
    server: HandoutServer
    """Hands out the table and the replica."""
    info: EngineInfo

    def end(self) -> None:
        """Withdraw everything for good.  Who has the table mapped keeps it, and finds every slot
        EMPTY and every life word 0."""
        self.exports.end()
        self.server.close()
        self.peers.close()


@dataclass(frozen=True)
class Founding:
    """What an epoch is begun with."""

    config: Config
    spec: EngineSpec
    fields: Mapping[str, str]
    """The fingerprint's ingredients."""
    ranks: Sequence[RankInfo]
    epoch: Epoch = field(default_factory=lambda: Epoch(secrets.randbits(64) | 1))

    def table(self) -> SlotTable:
        """Create the epoch's slot table, with this process's pulse.  Raises SegmentError."""
        spec = TableSpec(
            namespace=self.config.namespace,
            engine=self.spec.name,
            num_blocks=self.spec.num_blocks,
            block_size=self.spec.block_size,
            num_ranks=len(self.ranks),
            fingerprint=fingerprint(self.fields),
            model=self.spec.model,
        )
        table = SlotTable.create(spec, self.epoch)
        try:
            table.begin_pulse(None)
        except BaseException:
            table.close()
            raise
        return table

    def info(self, table: SlotTable) -> EngineInfo:
        """The epoch's entry for the roster."""
        return EngineInfo(
            epoch=self.epoch,
            name=self.spec.name,
            pid=os.getpid(),
            fingerprint=Fingerprint(table.fingerprint),
            fields=dict(self.fields),
            num_blocks=self.spec.num_blocks,
            ranks=[self._of_this_epoch(rank) for rank in self.ranks],
            imports_only=not self.config.exports,
            kvshm_version=__version__,
        )

    def _of_this_epoch(self, rank: RankInfo) -> RankInfo:
        memory = msgspec.structs.replace(rank.memory, epoch=self.epoch)
        return msgspec.structs.replace(rank, memory=memory)
