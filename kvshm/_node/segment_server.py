"""Hands out slot tables and replicas (kvshm/_shm/descriptors.py).

::

    <run dir>/<namespace>.engine.<epoch>.sock     an engine, in one epoch: its table, its replica,
                                                  and its entry in the roster
    <run dir>/<namespace>.tables.sock             the coordinator: the tables of the whole roster

The connection stays open; it ends when the server ends or stops handing out.  Engines ask the
coordinator, which answers even for an engine that is stopped; ranks and tools ask the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvshm._base.ids import Epoch
from kvshm._base.rundir import engine_socket, peers_file, tables_socket
from kvshm._replica.index import Replica
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.descriptors import DescriptorServer, Request, ask, only_one, read_reply
from kvshm._shm.layout import table_bytes
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable
from kvshm._shm.segment import (
    INDEX_KIND,
    INFO_KIND,
    TABLE_KIND,
    read_message,
    sealed_message,
)
from kvshm._shm.slot_table import LARGEST_TABLE, PeerSlotTable, SlotTableView
from kvshm.errors import (
    ProtocolError,
    SegmentError,
    SegmentNotFound,
    SegmentNotReady,
    StaleAttachment,
    TransportError,
)

from .protocol import MAX_JOIN_BYTES, EngineInfo, decode_info, encode_info

FETCH_SECONDS = 2.0
"""How long an engine may take to answer, which it does on a thread of its own."""
ROSTER_TABLE_SECONDS = 0.5
"""How long the coordinator may take to answer: the asking thread has heartbeats to send."""


TableType = TypeVar("TableType", bound=SlotTableView)


class SegmentServer(DescriptorServer):
    """Hands out one segment for each request; ``find`` raises as ``descriptors.Find`` does."""

    def __init__(
        self, path: Path, find: Callable[[Request], int], max_kept: int | None = None
    ) -> None:
        super().__init__(path, lambda wanted: (find(wanted),), max_kept)


def serve_epoch(
    path: Path, table: OwnSlotTable, replica: Replica, info: EngineInfo | None = None
) -> SegmentServer:
    """Hand out an engine's own segments and, if it is given, its entry in the roster.  Raises
    TransportError."""

    def find(wanted: Request) -> int:
        if wanted.epoch == table.epoch:
            if wanted.kind == TABLE_KIND:
                return table.descriptor(wanted.writable)
            if wanted.kind == INDEX_KIND:
                return replica.descriptor()
            if wanted.kind == INFO_KIND and info is not None:
                return sealed_message(f"{table.name} {INFO_KIND}", encode_info(info))
        raise SegmentNotFound(f"epoch {table.epoch:016x} is served here")

    return SegmentServer(path, find)


# -- asking


@contextmanager
def _as_segment_errors() -> Iterator[None]:
    """A context: what ``descriptors.ask`` raises becomes SegmentNotFound if the segment does not
    exist (any more), SegmentNotReady if there is no reply in time, or SegmentError."""
    try:
        yield
    except StaleAttachment as exc:
        raise SegmentNotFound(str(exc)) from None
    except TransportError as exc:
        cause = exc.__cause__
        if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
            raise SegmentNotFound(str(exc)) from exc
        raise (SegmentNotReady if isinstance(cause, TimeoutError) else SegmentError)(
            str(exc)
        ) from exc


def segment_of_reply(packed: bytes, fds: list[int], what: str) -> int:
    """Return the descriptor of a reply that has arrived.  Raises SegmentError."""
    with _as_segment_errors():
        return only_one(read_reply(packed, fds, what), what)


def fetch_segment(path: Path, wanted: Request, timeout: float) -> int:
    """Ask the server at ``path`` for a segment; return a descriptor, which the caller closes.
    Blocks for ``timeout`` seconds at most.  Raises SegmentError."""
    with _as_segment_errors():
        fds, connection = ask(path, wanted, timeout)
        connection.close()
        return only_one(fds, os.fspath(path))


class SegmentClient:
    """Fetches the segments of one run directory and namespace.  Any thread; each method blocks
    for ``timeout`` seconds at most, and raises SegmentError; SegmentNotFound if the engine has
    ended."""

    def __init__(self, run_dir: Path, namespace: str, timeout: float = FETCH_SECONDS) -> None:
        self._run_dir = run_dir
        self._namespace = namespace
        self._timeout = timeout

    def view(self, epoch: Epoch | int) -> SlotTableView:
        return self._table(SlotTableView, self._engine_socket(epoch), epoch)

    def peer_table(self, epoch: Epoch | int) -> PeerSlotTable:
        return self._table(PeerSlotTable, self._engine_socket(epoch), epoch)

    def rank_table(self, epoch: Epoch | int) -> RankSlotTable:
        return self._table(RankSlotTable, self._engine_socket(epoch), epoch)

    def roster_table(self, epoch: int, num_blocks: int, num_ranks: int) -> PeerSlotTable:
        """Fetch the table of an engine in the roster, of the stated size, from the coordinator.
        Blocks for ROSTER_TABLE_SECONDS at most, then raises SegmentNotReady."""
        path = tables_socket(self._run_dir, self._namespace)
        largest = table_bytes(num_blocks, num_ranks)
        try:
            seconds = min(self._timeout, ROSTER_TABLE_SECONDS)
            return self._table(PeerSlotTable, path, epoch, largest, seconds)
        except SegmentNotFound as exc:
            if exc.__cause__ is None:
                raise
            raise SegmentError(str(exc)) from exc  # no coordinator: the engine may still exist

    def table_from_coordinator(self, epoch: Epoch | int) -> SlotTableView:
        """Fetch a table of the roster, to read: for an engine that is silent."""
        path = tables_socket(self._run_dir, self._namespace)
        return self._table(SlotTableView, path, epoch)

    def peers_file(self, epoch: Epoch) -> Path:
        """The path of an engine's list of peers for its own ranks (kvshm/_node/peer_list.py)."""
        return peers_file(self._run_dir, self._namespace, epoch)

    def info(self, epoch: Epoch | int) -> EngineInfo:
        """Fetch an engine's entry in the roster, from the engine.  Raises ProtocolError, too."""
        fd = fetch_segment(self._engine_socket(epoch), Request(INFO_KIND, epoch), self._timeout)
        info = decode_info(read_message(self._segment_name(INFO_KIND, epoch), fd, MAX_JOIN_BYTES))
        if info.epoch != epoch:
            raise ProtocolError(f"epoch {epoch:016x} handed out the entry of {info.epoch:016x}")
        return info

    def replica(self, epoch: Epoch | int) -> ReplicaReader:
        wanted = Request(INDEX_KIND, epoch)
        fd = fetch_segment(self._engine_socket(epoch), wanted, self._timeout)
        return ReplicaReader.from_fd(self._segment_name(INDEX_KIND, epoch), fd)

    def _table(
        self,
        role: type[TableType],
        path: Path,
        epoch: int,
        largest: int = LARGEST_TABLE,
        timeout: float | None = None,
    ) -> TableType:
        wanted = Request(TABLE_KIND, epoch, role.WRITABLE)
        fd = fetch_segment(path, wanted, timeout or self._timeout)
        table = role.from_fd(self._segment_name(TABLE_KIND, epoch), fd, largest=largest)
        if table.epoch != epoch:
            table.close()
            raise ProtocolError(f"{path} handed out epoch {table.epoch:016x}, not {epoch:016x}")
        return table

    def _engine_socket(self, epoch: int) -> Path:
        return engine_socket(self._run_dir, self._namespace, epoch)

    def _segment_name(self, kind: str, epoch: int) -> str:
        return f"kvshm.{self._namespace}.{kind}.{epoch:016x}"
