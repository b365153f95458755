"""Engines whose slot tables and replicas are handed out, from this process."""

from __future__ import annotations

from pathlib import Path

from kvshm._base.ids import Epoch, Fingerprint
from kvshm._base.rundir import engine_socket, tables_socket
from kvshm._node.segment_server import SegmentClient, SegmentServer, TableType, serve_epoch
from kvshm._replica.index import Replica
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.descriptors import Request
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable, TableSpec
from kvshm._shm.slot_table import PeerSlotTable, RosterSlotTable, SlotTableView
from kvshm.errors import SegmentNotFound


class AnyTable(OwnSlotTable, RankSlotTable, PeerSlotTable, RosterSlotTable):
    from_fd = SlotTableView.__dict__["from_fd"]


class Served:
    def __init__(
        self, run_dir: Path, table: AnyTable, namespace: str, replica: Replica | None = None
    ) -> None:
        self.table = table
        self.replica = replica or Replica.create(namespace, table.engine, table.epoch, 64)
        self.path = engine_socket(run_dir, namespace, table.epoch)
        self._server: SegmentServer | None = serve_epoch(self.path, table, self.replica)

    def crash(self) -> None:
        """Leave what a process leaves that is killed: a socket that no one serves."""
        kept = self.path.with_name("kept")
        kept.hardlink_to(self.path)
        self.close()
        kept.rename(self.path)

    def close_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def close(self) -> None:
        self.close_server()
        self.table.close()
        self.replica.close()


class ServedNode:
    def __init__(self, run_dir: Path, namespace: str) -> None:
        self.run_dir, self.namespace = run_dir, namespace
        self.segments = SegmentClient(run_dir, namespace)
        self.engines: list[Served] = []
        self.roster: dict[int, AnyTable] = {}
        self._coordinator: SegmentServer | None = None

    def serve(
        self,
        engine: str,
        epoch: int,
        num_blocks: int = 26,
        num_ranks: int = 1,
        fingerprint: bytes = bytes(32),
        model: str = "",
        pid: int | None = None,
    ) -> Served:
        spec = TableSpec(
            self.namespace, engine, num_blocks, 16, num_ranks, Fingerprint(fingerprint), model
        )
        table = AnyTable.create(spec, Epoch(epoch), pid)
        self.engines.append(Served(self.run_dir, table, self.namespace))
        return self.engines[-1]

    def enlist(self, table: AnyTable) -> None:
        """Put an engine into the roster, of which the coordinator hands out the tables."""
        self.roster[table.epoch] = table
        if self._coordinator is None:
            path = tables_socket(self.run_dir, self.namespace)
            self._coordinator = SegmentServer(path, self._of_the_roster)

    def _of_the_roster(self, wanted: Request) -> int:
        if wanted.epoch not in self.roster:
            raise SegmentNotFound("no such engine is in the roster")
        return self.roster[wanted.epoch].descriptor(wanted.writable)

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        for engine in self.engines:
            engine.close()


def fetched(segments: SegmentClient, epoch: int) -> AnyTable:
    return segments._table(AnyTable, segments._engine_socket(epoch), epoch)


def again(table: OwnSlotTable, role: type[TableType] = AnyTable) -> TableType:
    return role.from_fd(table.name, table.descriptor(role.WRITABLE))


def set_life(table: OwnSlotTable, rank: int = 0) -> None:
    """State that a rank's memory is exported, as that rank does with its own mapping."""
    mapped = again(table, RankSlotTable)
    mapped.set_life(rank)
    mapped.close()


def read_again(replica: Replica) -> ReplicaReader:
    return ReplicaReader.from_fd(replica.name, replica.descriptor())
