"""One epoch of an engine's cache: everything that begins and ends with the epoch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from kvshm._base.fingerprint import fingerprint
from kvshm._base.ids import NO_LEASE_BIT, BlockId, Epoch
from kvshm._base.log_format import forget_own_epoch, note_own_epoch
from kvshm._base.roles import Decision
from kvshm._base.rundir import engine_socket, peers_file
from kvshm._node.peer import Peer
from kvshm._node.peer_list import PeerList
from kvshm._node.peers import Peers
from kvshm._node.protocol import EngineInfo, RankInfo
from kvshm._node.segment_server import SegmentClient, SegmentServer, serve_epoch
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
from kvshm.errors import CorruptSegment
from kvshm.version import __version__


@dataclass(frozen=True)
class EngineSpec:
    """What does not change while an engine runs."""

    name: str
    model: str
    num_blocks: int
    block_size: int
    """Tokens per hash."""
    asynchronous: bool = False
    """Whether the next step is scheduled while one runs, so that a wait can overlap."""
    keeps: bool = False
    """Whether it computes nothing, and keeps what others have computed."""


@dataclass
class EpochState:
    """Slot table, peers and roster entry of one epoch, and its publisher's pending work.  The
    client's thread begins an epoch, the scheduler's thread ends it.  In between the scheduler's
    thread publishes in ``table`` and looks up in ``peers``, and the client's thread keeps ``peers``
    up to date."""

    table: OwnSlotTable
    peers: Peers
    server: SegmentServer
    """Hands out the table and the replica."""
    info: EngineInfo
    draining: list[BlockId] = field(default_factory=list)
    """Retracted blocks whose leases the next dispatch waits for.  Scheduler's thread only."""
    outbox: list[bytes] = field(default_factory=list)
    """Events not yet handed to the client.  Scheduler's thread only."""
    seen_alive: bool = False
    """Whether all ranks have been seen alive.  Scheduler's thread only."""

    def has_ended(self) -> bool:
        """Whether all ranks were alive and now some are not.  Ranks become alive with the first
        step of an epoch; loads are allowed before that.  Scheduler's thread."""
        alive = self.table.alive
        self.seen_alive = self.seen_alive or alive
        return self.seen_alive and not alive

    @cached_property
    def own_peer(self) -> Peer:
        """The engine itself as an exporter of blocks that it copies within its own cache.  It takes
        no leases: the re-check alone decides."""
        return Peer(replace(self.info, lease_bit=NO_LEASE_BIT), self.table.as_peer(), row=-1)

    def end(self, *, leaves: bool = False) -> None:
        """Retract everything for good: every slot EMPTY, every life word 0.  Never waits: an
        importer in the middle of a copy finds out at its re-check.  Processes that have mapped the
        table keep their mapping.  ``leaves``: because the engine ends; else something may be wrong
        with the blocks, and keepers drop their copies."""
        forget_own_epoch(self.table.epoch)
        if not leaves:
            self.table.withdraw()
        self.table.retire()
        with suppress(CorruptSegment):  # somebody spoilt it: no one can lease from it either
            self.table.reset()
        self.table.end_life(None)
        self.server.close()
        self.peers.close()


class HasEpoch(Protocol):
    """The owner of the present epoch: a SchedulerHalf."""

    epoch_state: EpochState | None
    """None without an epoch.  Any thread may read it; each read may find another epoch."""
    role: Decision
    """Whether the engine exports and imports."""


def begin_epoch(
    namespace: str,
    spec: EngineSpec,
    role: Decision,
    fields: Mapping[str, str],
    ranks: Sequence[RankInfo],
    run_dir: Path,
) -> EpochState:
    """Begin an epoch with a random number: create its slot table, with this process's pulse, and
    its replica, and serve their descriptors.  ``fields``: the fingerprint's fields.  Raises
    KvshmError or OSError; nothing is left behind then."""
    epoch = Epoch(secrets.randbits(64) | 1)
    table_spec = TableSpec(
        namespace=namespace,
        engine=spec.name,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        num_ranks=len(ranks),
        fingerprint=fingerprint(fields),
        model=spec.model,
        keeps=spec.keeps,
    )
    info = EngineInfo(
        epoch=epoch,
        name=spec.name,
        pid=os.getpid(),
        fingerprint=table_spec.fingerprint,
        fields=dict(fields),
        num_blocks=spec.num_blocks,
        ranks=[replace(rank, memory=replace(rank.memory, epoch=epoch)) for rank in ranks],
        imports_only=bool(role.no_exports),
        kvshm_version=__version__,
    )
    with ExitStack() as undo:
        table = OwnSlotTable.create(table_spec, epoch)
        undo.callback(table.close)
        table.begin_pulse(None)
        # An engine that does not import attaches no peers.
        listed = None if role.no_imports else PeerList(peers_file(run_dir, namespace, epoch))
        peers = Peers(namespace, spec.name, epoch, SegmentClient(run_dir, namespace), listed=listed)
        undo.callback(peers.close)
        path = engine_socket(run_dir, namespace, epoch)
        server = serve_epoch(path, table, peers.replica, info)
        undo.pop_all()
    note_own_epoch(epoch, spec.name)
    return EpochState(table, peers, server, info)
