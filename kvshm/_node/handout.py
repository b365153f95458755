"""Hands out slot tables and replicas: a segment has no name, so its owner sends descriptors.

::

    <run dir>/<namespace>.engine.<epoch>.sock     an engine, in one epoch: its table and its replica
    <run dir>/<namespace>.tables.sock             the coordinator: the tables of the whole roster

The connection stays open; it ends when the server ends or stops handing out.  Engines ask the
coordinator, which answers even for an engine that is stopped; ranks and tools ask the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvshm._base.ids import Epoch
from kvshm._base.rundir import engine_socket, peers_file, tables_socket
from kvshm._replica.index import Replica
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.fd_server import FdServer
from kvshm._shm.fds import close_all, fetch
from kvshm._shm.layout import table_bytes
from kvshm._shm.own_slot_table import OwnSlotTable, RankSlotTable
from kvshm._shm.segment import INDEX_KIND, TABLE_KIND
from kvshm._shm.slot_table import LARGEST_TABLE, PeerSlotTable, SlotTableView
from kvshm.errors import (
    ProtocolError,
    SegmentError,
    SegmentNotFound,
    SegmentNotReady,
    TransportError,
)

FETCH_SECONDS = 2.0
"""How long an engine may take to answer, which it does on a thread of its own."""
ROSTER_TABLE_SECONDS = 0.5
"""How long the coordinator may take to answer: the asking thread has heartbeats to send."""


TableType = TypeVar("TableType", bound=SlotTableView)


class Request(msgspec.Struct, frozen=True):
    """The wanted segment, and whether the client will write to it."""

    kind: str
    epoch: int
    writable: bool = False


class Reply(msgspec.Struct, frozen=True):
    """Whether a descriptor comes with the reply; if not, why."""

    found: bool
    reason: str = ""


Find = Callable[[Request], int]
"""Returns a descriptor, which the server closes once it is sent.  Runs on the server's thread;
raises SegmentError if there is none."""


def _nothing(wanted: Request) -> int:
    raise SegmentNotFound(f"epoch {wanted.epoch:016x} is over")


class HandoutServer:
    """Answers requests at ``path`` until ``close``; raises TransportError if it cannot."""

    def __init__(self, path: Path, find: Find, max_kept: int | None = None) -> None:
        self._find = find
        self._sent: list[int] = []
        self._server = FdServer(path, self._answer, max_kept=max_kept)

    def _answer(self, packed: bytes) -> tuple[bytes, list[int]]:
        # The descriptor of the previous reply was sent, or never will be.
        self._forget_sent()
        try:
            self._sent = [self._find(msgspec.msgpack.decode(packed, type=Request))]
        except (msgspec.DecodeError, SegmentNotFound) as exc:
            return msgspec.msgpack.encode(Reply(False, str(exc))), []
        except SegmentError as exc:  # the segment exists, but no descriptors are left: no reply
            raise OSError(str(exc)) from exc
        return msgspec.msgpack.encode(Reply(True)), self._sent

    def _forget_sent(self) -> None:
        sent, self._sent = self._sent, []
        close_all(sent)

    def close(self) -> None:
        """Stop handing out.  Idempotent; waits for the reply under way."""
        self._server.close()
        self._find = _nothing  # the old one may refer to this object, and to whole segments
        self._forget_sent()


def serve_epoch(path: Path, table: OwnSlotTable, replica: Replica) -> HandoutServer:
    """Hand out an engine's own segments.  Raises TransportError."""

    def find(wanted: Request) -> int:
        if wanted.epoch != table.epoch or wanted.kind not in (TABLE_KIND, INDEX_KIND):
            raise SegmentNotFound(f"epoch {table.epoch:016x} is served here")
        if wanted.kind == TABLE_KIND:
            return table.descriptor(wanted.writable)
        return replica.descriptor()

    return HandoutServer(path, find)


# -- asking


def read_reply(packed: bytes, fds: list[int], what: str) -> int:
    """Return the one descriptor of a reply; close further descriptors.  Raises SegmentError."""
    try:
        reply = msgspec.msgpack.decode(packed, type=Reply)
    except msgspec.DecodeError as exc:
        close_all(fds)
        raise SegmentError(f"{what}: undecodable reply: {exc}") from exc
    if reply.found and len(fds) == 1:
        return fds[0]
    close_all(fds)
    if reply.found:
        raise SegmentError(f"{what}: the reply came with {len(fds)} descriptors")
    raise SegmentNotFound(f"{what}: {reply.reason}")


def encode_request(kind: str, epoch: int, writable: bool) -> bytes:
    """Return the request as sent."""
    return msgspec.msgpack.encode(Request(kind, epoch, writable))


def _error_class(cause: BaseException | None) -> type[SegmentError]:
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        return SegmentNotFound
    return SegmentNotReady if isinstance(cause, TimeoutError) else SegmentError


def ask(path: Path, kind: str, epoch: int, writable: bool, timeout: float) -> int:
    """Ask the server at ``path`` for a segment; return a descriptor, which the caller closes.
    Blocks for ``timeout`` seconds at most.  Raises SegmentNotFound if the segment does not exist
    (any more), SegmentNotReady if there is no reply in time, or SegmentError."""
    try:
        packed, fds = fetch(path, encode_request(kind, epoch, writable), timeout)
    except TransportError as exc:
        raise _error_class(exc.__cause__)(str(exc)) from exc
    return read_reply(packed, fds, os.fspath(path))


class Handouts:
    """Fetches the segments of one run directory and namespace.  Any thread; each method blocks for
    ``timeout`` seconds at most, and raises SegmentError."""

    def __init__(self, run_dir: Path, namespace: str, timeout: float = FETCH_SECONDS) -> None:
        self._run_dir = run_dir
        self._namespace = namespace
        self._timeout = timeout

    def view(self, epoch: Epoch | int) -> SlotTableView:
        """Fetch an engine's table from the engine, to read.  Raises SegmentNotFound if the engine
        has ended, as do ``peer_table`` and ``rank_table``."""
        return self._table(SlotTableView, self._engine_socket(epoch), epoch)

    def peer_table(self, epoch: Epoch | int) -> PeerSlotTable:
        """Fetch another engine's table from that engine, as an importer."""
        return self._table(PeerSlotTable, self._engine_socket(epoch), epoch)

    def rank_table(self, epoch: Epoch | int) -> RankSlotTable:
        """Fetch the own engine's table from its scheduler, as a worker rank."""
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
        """Fetch a table of the roster from the coordinator, to read: for an engine that is
        silent."""
        path = tables_socket(self._run_dir, self._namespace)
        return self._table(SlotTableView, path, epoch)

    def peers_file(self, epoch: Epoch) -> Path:
        """The path of an engine's list of peers for its own ranks (kvshm/_node/peer_list.py)."""
        return peers_file(self._run_dir, self._namespace, epoch)

    def replica(self, epoch: Epoch | int) -> ReplicaReader:
        """Fetch an engine's present replica from the engine, to read."""
        fd = ask(self._engine_socket(epoch), INDEX_KIND, epoch, False, self._timeout)
        return ReplicaReader.from_fd(self._segment_name(INDEX_KIND, epoch), fd)

    def _table(
        self,
        role: type[TableType],
        path: Path,
        epoch: int,
        largest: int = LARGEST_TABLE,
        timeout: float | None = None,
    ) -> TableType:
        fd = ask(path, TABLE_KIND, epoch, role.WRITABLE, timeout or self._timeout)
        table = role.from_fd(self._segment_name(TABLE_KIND, epoch), fd, largest=largest)
        if table.epoch != epoch:
            table.close()
            raise ProtocolError(f"{path} handed out epoch {table.epoch:016x}, not {epoch:016x}")
        return table

    def _engine_socket(self, epoch: int) -> Path:
        return engine_socket(self._run_dir, self._namespace, epoch)

    def _segment_name(self, kind: str, epoch: int) -> str:
        return f"kvshm.{self._namespace}.{kind}.{epoch:016x}"
