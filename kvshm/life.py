"""One life of an engine's cache: everything that belongs to one epoch and ends with it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from .config import Config
from .exports import Exports
from .fingerprint import fingerprint
from .peers import Peers
from .protocol import EngineInfo, RankInfo
from .segment import identity_of
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
    info: EngineInfo

    def end(self) -> None:
        """Withdraw everything for good.  Segments are unlinked; who has them mapped keeps
        them, and finds every slot EMPTY and every life word 0."""
        self.exports.end()
        self.peers.close()
        self.table.unlink()


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
        """Create the epoch's slot table.  Raises SegmentError."""
        spec = TableSpec(
            namespace=self.config.namespace,
            engine=self.spec.name,
            num_blocks=self.spec.num_blocks,
            block_size=self.spec.block_size,
            num_ranks=len(self.ranks),
            fingerprint=fingerprint(self.fields),
            model=self.spec.model,
        )
        return SlotTable.create(spec, self.epoch, identity_of())

    def info(self, table: SlotTable) -> EngineInfo:
        """The epoch's entry for the roster."""
        identity = identity_of()
        return EngineInfo(
            epoch=self.epoch,
            name=self.spec.name,
            pid=identity.pid,
            start_time=identity.start_time,
            fingerprint=Fingerprint(table.fingerprint),
            fields=dict(self.fields),
            table=table.name,
            num_blocks=self.spec.num_blocks,
            ranks=[self._of_this_epoch(rank) for rank in self.ranks],
            imports_only=not self.config.exports,
            kvshm_version=__version__,
        )

    def _of_this_epoch(self, rank: RankInfo) -> RankInfo:
        memory = msgspec.structs.replace(rank.memory, epoch=self.epoch)
        return msgspec.structs.replace(rank, memory=memory)
