"""The slot tables of the roster: fetched from engines, handed on, watched and swept.

An engine's table comes from the socket that the engine serves for its epoch, and the connection
stays open: when it ends, or a second has passed, the table's pulses tell who has died.  Nothing
here waits for an engine, nor raises for what one did.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvshm.errors import (
    KvshmError,
    SegmentError,
    SegmentNotFound,
    SegmentNotReady,
    TransportError,
    VersionMismatch,
)
from kvshm.node.handout import FETCH_SECONDS, HandoutServer, Request, encode_request, read_answer
from kvshm.node.protocol import EngineInfo, Join
from kvshm.rundir import engine_socket, tables_socket
from kvshm.shm.counters import SWEPT
from kvshm.shm.fds import peer_credentials, peer_has_closed, receive
from kvshm.shm.layout import table_bytes
from kvshm.shm.segment import TABLE_KIND
from kvshm.shm.slot_table import RosterSlotTable

from . import logfmt
from .actions import Deserted, Died, Event, Examined, Log, Refusal, Sender
from .versions import who_upgrades

MAX_EXAMINED = 64
"""Engines whose tables are fetched at the same time; who comes on top is to try again."""
_SAME_DIRECTORY = "let both see one run directory, and run both as one user"
_AGAIN = "nothing: it is tried again"


@dataclass
class _Examination:
    """A table that was asked for."""

    sender: Sender
    join: Join
    connection: socket.socket
    until: float


@dataclass
class _Member:
    """A table that is kept."""

    table: RosterSlotTable
    pid: int
    """As the socket tells."""
    connection: socket.socket | None
    """None once it has ended."""
    worker_told: bool = False
    owner_told: bool = False

    def close(self) -> None:
        self.table.close()
        if self.connection is not None:
            self.connection.close()


class Tables:
    """One namespace's slot tables.  Used by one thread, except by the server of its own."""

    def __init__(self, run_dir: Path, namespace: str, clock: Callable[[], float]) -> None:
        self._run_dir = run_dir
        self._namespace = namespace
        self._clock = clock
        self._members: dict[int, _Member] = {}
        self._examined: dict[int, _Examination] = {}
        self._server: HandoutServer | None = None

    def serve(self) -> None:
        """Hand out the tables to whoever asks.  Raises TransportError."""
        path = tables_socket(self._run_dir, self._namespace)
        self._server = HandoutServer(path, self._find, max_kept=0)  # who asks here does not stay

    def close(self) -> None:
        """Let go of everything.  Idempotent."""
        if self._server is not None:
            self._server.close()
        for epoch in [*self._members]:
            self.forget(epoch)
        for number in [*self._examined]:
            self._examined.pop(number).connection.close()

    def _find(self, wanted: Request) -> int:
        """On the server's thread."""
        member = self._members.get(wanted.epoch)
        if member is None or wanted.kind != TABLE_KIND:
            raise SegmentNotFound(f"epoch {wanted.epoch:016x} is not in the roster")
        return member.table.descriptor(wanted.writable)

    # -- what to wait for

    def connections(self) -> Iterator[socket.socket]:
        """What has news when it is readable: ``news`` tells them."""
        yield from (examined.connection for examined in self._examined.values())
        for member in self._members.values():
            if member.connection is not None:
                yield member.connection

    def news(self, readable: set[int]) -> Iterator[Event]:
        """What has come of these descriptors."""
        for number in readable & self._examined.keys():
            yield self._finish(self._examined.pop(number))
        for epoch, member in list(self._members.items()):
            connection = member.connection
            if connection is None or connection.fileno() not in readable:
                continue
            if peer_has_closed(connection):
                connection.close()
                member.connection = None
                yield from self._ends(epoch, member)
            else:
                with suppress(OSError):
                    connection.recv(1)  # an engine has nothing to say here

    def look(self) -> Iterator[Event]:
        """Look at everything, about once a second: a worker's death closes no connection."""
        now = self._clock()
        for number, examined in list(self._examined.items()):
            if now >= examined.until:
                del self._examined[number]
                examined.connection.close()
                reason = f"it does not hand out its slot table within {FETCH_SECONDS:g} s"
                yield self._refused(examined, Refusal(reason, _AGAIN, retry=True))
        for epoch, member in list(self._members.items()):
            yield from self._ends(epoch, member)

    @staticmethod
    def _ends(epoch: int, member: _Member) -> Iterator[Event]:
        table = member.table
        # Who never showed a pulse is judged by its connection.
        mute = member.connection is None and not table.owner_begun
        if (table.owner_died or mute) and not member.owner_told:
            member.owner_told = member.worker_told = True
            yield Died(epoch, owner=True, retired=table.retired)
        elif table.died and not member.worker_told:
            member.worker_told = True
            yield Died(epoch, owner=False, retired=table.retired)
        if member.owner_told and not table.in_use:
            yield Deserted(epoch)

    # -- before a join

    def examine(self, sender: Sender, join: Join) -> Event | None:
        """Ask the engine for its table; the answer, if it is known at once."""
        epoch = join.engine.epoch
        known = self._members.get(epoch)
        if known is not None and known.pid == sender.pid and known.connection is not None:
            return Examined(sender, join, _compare(known.table, join.engine))
        if len(self._examined) >= MAX_EXAMINED:
            reason = f"{MAX_EXAMINED} engines join at the same time"
            return Examined(sender, join, Refusal(reason, _AGAIN, retry=True))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        examined = _Examination(sender, join, connection, self._clock() + FETCH_SECONDS)
        try:
            self._ask(examined)
        except (OSError, KvshmError) as exc:
            connection.close()
            return self._refused(examined, _refusal(exc, join.engine))
        self._examined[connection.fileno()] = examined
        return None

    def _ask(self, examined: _Examination) -> None:
        epoch = examined.join.engine.epoch
        examined.connection.connect(os.fspath(engine_socket(self._run_dir, self._namespace, epoch)))
        server = peer_credentials(examined.connection)
        if (server.uid, server.pid) != (os.geteuid(), examined.sender.pid):
            raise SegmentError(f"its slot table is served by pid {server.pid}, uid {server.uid}")
        examined.connection.send(encode_request(TABLE_KIND, epoch, True))

    def _finish(self, examined: _Examination) -> Event:
        """Take the table that has come."""
        engine, connection = examined.join.engine, examined.connection
        try:
            table = _receive(connection, engine)
        except (OSError, KvshmError) as exc:
            connection.close()
            return self._refused(examined, _refusal(exc, engine))
        refusal = _compare(table, engine)
        if refusal is not None:
            table.close()
            connection.close()
            return self._refused(examined, refusal)
        old = self._members.get(engine.epoch)
        self._members[engine.epoch] = _Member(table, examined.sender.pid, connection)
        if old is not None:  # not before: the server's thread hands out what is there
            old.close()
        return Examined(examined.sender, examined.join, None)

    @staticmethod
    def _refused(examined: _Examination, refusal: Refusal) -> Event:
        return Examined(examined.sender, examined.join, refusal)

    # -- after an end

    def forget(self, epoch: int) -> None:
        """Let go of an epoch's table."""
        member = self._members.pop(epoch, None)
        if member is not None:
            member.close()

    def sweep_bits(self, bits: int) -> None:
        """Clear lease bits in every table."""
        for epoch, member in self._members.items():
            try:
                swept = member.table.sweep(bits)
                member.table.counters.add(SWEPT, swept)
            except KvshmError as exc:  # its owner has scribbled over it
                about: dict[str, object] = {"epoch": f"{epoch:016x}", "reason": exc}
                logfmt.write(Log(logging.WARNING, "not-swept", about))
                continue
            about = {"epoch": f"{epoch:016x}", "bits": f"{bits:#x}", "slots": swept}
            logfmt.write(Log(logging.DEBUG, "swept", about))


def _receive(connection: socket.socket, engine: EngineInfo) -> RosterSlotTable:
    what = f"the slot table of epoch {engine.epoch:016x}"
    fd = read_answer(*receive(connection, what), what)
    largest = table_bytes(engine.num_blocks, len(engine.ranks))
    return RosterSlotTable.from_fd(what, fd, largest=largest, keep=True)


def _refusal(exc: Exception, engine: EngineInfo) -> Refusal:
    """Say why a table cannot be had."""
    if isinstance(exc, VersionMismatch):
        return who_upgrades("layout", exc, engine.kvshm_version)
    if isinstance(exc, FileNotFoundError | ConnectionRefusedError | SegmentNotFound):
        reason = "its slot table is not to be had in the coordinator's run directory"
        return Refusal(reason, _SAME_DIRECTORY)
    if isinstance(exc, SegmentNotReady | BlockingIOError | TransportError):
        return Refusal(str(exc), _AGAIN, retry=True)
    if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the coordinator's limit of open files (ulimit -n)"
        return Refusal("no descriptors are left for its slot table", remedy, retry=True)
    if isinstance(exc, OSError) or isinstance(exc.__cause__, OSError):
        # The connection was reset, or descriptors or memory are short here: that passes.
        return Refusal(str(exc), _AGAIN, retry=True)
    return Refusal(str(exc), "restart the engine")


def _compare(table: RosterSlotTable, info: EngineInfo) -> Refusal | None:
    """Check that the table is the one the engine describes."""
    said = (info.epoch, info.num_blocks, len(info.ranks), info.fingerprint)
    found = (table.epoch, table.num_blocks, table.num_ranks, table.fingerprint)
    if said == found:
        return None
    reason = f"its slot table (epoch, blocks, ranks, fingerprint) is {found}, it says {said}"
    return Refusal(reason, "restart the engine; if it says so again, report a bug")
