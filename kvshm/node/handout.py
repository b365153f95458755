"""Handing out slot tables and replicas: a segment has no name, so its owner gives descriptors.

::

    <run dir>/<namespace>.engine.<epoch>.sock     the engine itself, in one epoch: both of its own
    <run dir>/<namespace>.tables.sock             the coordinator: the tables of the whole roster

The connection stays open; its end says that the server has ended, or hands out no more.  Engines
ask the coordinator, which answers even for one that stands still; ranks and tools ask the engine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvshm.errors import (
    ProtocolError,
    SegmentError,
    SegmentNotFound,
    SegmentNotReady,
    TransportError,
)
from kvshm.ids import Epoch
from kvshm.replica.index import Replica
from kvshm.replica.index_reader import ReplicaReader
from kvshm.rundir import engine_socket, peers_file, tables_socket
from kvshm.shm.fd_server import FdServer
from kvshm.shm.fds import close_all, fetch_keep_open
from kvshm.shm.layout import table_bytes
from kvshm.shm.own_slot_table import OwnSlotTable
from kvshm.shm.segment import INDEX_KIND, TABLE_KIND
from kvshm.shm.slot_table import LARGEST_TABLE, PeerSlotTable, SlotTableView

FETCH_SECONDS = 2.0
"""How long a server may take to answer; it is answered by a thread of its own."""
MEMBER_SECONDS = 0.5
"""How long the coordinator may: who asks it has heartbeats to send."""


Role = TypeVar("Role", bound=SlotTableView)


class Request(msgspec.Struct, frozen=True):
    """Which segment is wanted, and whether to write to it."""

    kind: str
    epoch: int
    writable: bool = False


class Answer(msgspec.Struct, frozen=True):
    """Whether a descriptor rides along; if not, why."""

    found: bool
    reason: str = ""


_request_decoder = msgspec.msgpack.Decoder(Request)
_answer_decoder = msgspec.msgpack.Decoder(Answer)

Find = Callable[[Request], int]
"""Gives a descriptor that is closed once it was sent.  On the server's thread; SegmentError if
there is none."""


def _nothing(wanted: Request) -> int:
    raise SegmentNotFound(f"epoch {wanted.epoch:016x} is over")


class HandoutServer:
    """Answers requests at ``path`` until ``close``; raises TransportError if it cannot."""

    def __init__(self, path: Path, find: Find, max_kept: int | None = None) -> None:
        self._find = find
        self._sent: list[int] = []
        self._server = FdServer(path, self._answer, max_kept=max_kept)

    def _answer(self, packed: bytes) -> tuple[bytes, list[int]]:
        """The descriptor of the answer before was sent, or never will be."""
        self._forget_sent()
        try:
            self._sent = [self._find(_request_decoder.decode(packed))]
        except (msgspec.DecodeError, SegmentNotFound) as exc:
            return msgspec.msgpack.encode(Answer(False, str(exc))), []
        except SegmentError as exc:  # no descriptors: there is one, so this is no answer
            raise OSError(str(exc)) from exc
        return msgspec.msgpack.encode(Answer(True)), self._sent

    def _forget_sent(self) -> None:
        sent, self._sent = self._sent, []
        close_all(sent)

    def close(self) -> None:
        """Hand out no more.  Idempotent; waits for the answer under way."""
        self._server.close()
        self._find = _nothing  # what it was may refer to this object, and to whole segments
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


Asked = tuple[int, socket.socket]
"""A descriptor and the connection it came by, both the caller's to close."""


def read_answer(reply: bytes, fds: list[int], what: str) -> int:
    """Return the one descriptor of an answer; others are closed.  Raises SegmentError."""
    try:
        answer = _answer_decoder.decode(reply)
    except msgspec.DecodeError as exc:
        close_all(fds)
        raise SegmentError(f"{what}: undecodable answer: {exc}") from exc
    if answer.found and len(fds) == 1:
        return fds[0]
    close_all(fds)
    if answer.found:
        raise SegmentError(f"{what}: the answer came with {len(fds)} descriptors")
    raise SegmentNotFound(f"{what}: {answer.reason}")


def encode_request(kind: str, epoch: int, writable: bool) -> bytes:
    """A request as it is sent."""
    return msgspec.msgpack.encode(Request(kind, epoch, writable))


def _kind_of(cause: BaseException | None) -> type[SegmentError]:
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        return SegmentNotFound
    return SegmentNotReady if isinstance(cause, TimeoutError) else SegmentError


def ask(path: Path, kind: str, epoch: int, writable: bool, timeout: float) -> Asked:
    """Ask the server at ``path`` for a segment.  Blocks for ``timeout`` seconds at most.  Raises
    SegmentNotFound if nobody has it (any more), SegmentNotReady if there is no answer in time, or
    SegmentError."""
    try:
        request = encode_request(kind, epoch, writable)
        reply, fds, connection = fetch_keep_open(path, request, timeout)
    except TransportError as exc:
        raise _kind_of(exc.__cause__)(str(exc)) from exc
    try:
        return read_answer(reply, fds, os.fspath(path)), connection
    except BaseException:
        connection.close()
        raise


class Handouts:
    """Where the segments of one run directory and namespace are to be had.  Any thread; each
    method blocks for ``timeout`` seconds at most, and raises SegmentError."""

    def __init__(self, run_dir: Path, namespace: str, timeout: float = FETCH_SECONDS) -> None:
        self._run_dir = run_dir
        self._namespace = namespace
        self._timeout = timeout

    def table(self, role: type[Role], epoch: Epoch | int) -> Role:
        """An engine's table, from the engine, for who has this role to it.  Raises
        SegmentNotFound if the engine has ended."""
        return self._table(role, self._engine(epoch), epoch)

    def table_of_member(self, epoch: int, num_blocks: int, num_ranks: int) -> PeerSlotTable:
        """The table of an engine in the roster, from the coordinator: of the stated size.  Blocks
        for MEMBER_SECONDS at most; then SegmentNotReady."""
        path = tables_socket(self._run_dir, self._namespace)
        largest = table_bytes(num_blocks, num_ranks)
        try:
            seconds = min(self._timeout, MEMBER_SECONDS)
            return self._table(PeerSlotTable, path, epoch, largest, seconds)
        except SegmentNotFound as exc:
            if exc.__cause__ is None:
                raise
            raise SegmentError(str(exc)) from exc  # nobody to ask: the engine may well be there

    def table_from_coordinator(self, epoch: Epoch | int) -> SlotTableView:
        """A table of the roster to read, from the coordinator: where its engine is silent."""
        path = tables_socket(self._run_dir, self._namespace)
        return self._table(SlotTableView, path, epoch)

    def peers_file(self, epoch: Epoch) -> Path:
        """Where the engine of an epoch names its peers to its ranks (kvshm/node/peer_list.py)."""
        return peers_file(self._run_dir, self._namespace, epoch)

    def replica(self, epoch: Epoch | int) -> ReplicaReader:
        """An engine's replica as it is now, from the engine, to read."""
        fd, connection = ask(self._engine(epoch), INDEX_KIND, epoch, False, self._timeout)
        connection.close()
        return ReplicaReader.from_fd(self._called(INDEX_KIND, epoch), fd)

    def _table(
        self,
        role: type[Role],
        path: Path,
        epoch: int,
        largest: int = LARGEST_TABLE,
        timeout: float | None = None,
    ) -> Role:
        fd, connection = ask(path, TABLE_KIND, epoch, role.WRITABLE, timeout or self._timeout)
        connection.close()
        table = role.from_fd(self._called(TABLE_KIND, epoch), fd, largest=largest)
        if table.epoch != epoch:
            table.close()
            raise ProtocolError(f"{path} handed out epoch {table.epoch:016x}, not {epoch:016x}")
        return table

    def _engine(self, epoch: int) -> Path:
        return engine_socket(self._run_dir, self._namespace, epoch)

    def _called(self, kind: str, epoch: int) -> str:
        return f"kvshm.{self._namespace}.{kind}.{epoch:016x}"
