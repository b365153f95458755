"""The slot tables of the roster: fetched from engines, handed out, watched and swept.

An engine's table comes from the socket that the engine serves for its epoch, and the connection
stays open: when it ends, and once a second, the table's pulses tell which processes have died.
Nothing here waits for an engine or raises because of an engine.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvshm._base.rundir import engine_socket, tables_socket
from kvshm._base.time_namespace import clock_offset_ns
from kvshm._node.peer import differs
from kvshm._node.protocol import EngineInfo, Join
from kvshm._node.segment_server import FETCH_SECONDS, SegmentServer, segment_of_reply
from kvshm._shm.descriptors import Request
from kvshm._shm.fds import peer_credentials, peer_has_closed, receive
from kvshm._shm.layout import table_bytes
from kvshm._shm.segment import TABLE_KIND
from kvshm._shm.slot_table import RosterSlotTable
from kvshm.errors import (
    KvshmError,
    SegmentError,
    SegmentNotFound,
    SegmentNotReady,
    TransportError,
    VersionMismatch,
)

from . import logfmt
from .actions import CheckResult, Input, ProcessDeath, Refusal, Sender, TableUnused
from .joining import refuse_version
from .log_lines import RETRIED, Event

MAX_CHECKS = 64
"""Engines whose tables are fetched at the same time; further engines have to try again."""
_SAME_DIRECTORY = "let both see one run directory, and run both as one user"


@dataclass
class _TableCheck:
    sender: Sender
    join: Join
    connection: socket.socket
    until: float

    def result(self, refusal: Refusal | None) -> CheckResult:
        return CheckResult(self.sender, self.join, refusal)


@dataclass
class _Member:
    """An epoch whose table is kept."""

    table: RosterSlotTable
    pid: int
    connection: socket.socket | None
    worker_death_reported: bool = False
    owner_death_reported: bool = False

    def close(self) -> None:
        self.table.close()
        if self.connection is not None:
            self.connection.close()


class Tables:
    """The slot tables, used by one thread except by their server's."""

    def __init__(self, run_dir: Path, namespace: str, clock: Callable[[], float]) -> None:
        self._run_dir = run_dir
        self._namespace = namespace
        self._clock = clock
        self._members: dict[int, _Member] = {}
        self._checks: dict[int, _TableCheck] = {}
        self._server: SegmentServer | None = None

    def serve(self) -> None:
        """Hand out the tables on request.  Raises TransportError."""
        path = tables_socket(self._run_dir, self._namespace)
        self._server = SegmentServer(path, self._find, max_kept=0)  # clients do not stay connected

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for epoch in [*self._members]:
            self.release(epoch)
        for number in [*self._checks]:
            self._checks.pop(number).connection.close()

    def forget_in_child(self) -> None:
        """Close the inherited tables and connections in a forked child."""
        for member in self._members.values():
            member.close()
        for check in self._checks.values():
            check.connection.close()

    def _find(self, wanted: Request) -> int:
        """On the server's thread."""
        member = self._members.get(wanted.epoch)
        if member is None or wanted.kind != TABLE_KIND:
            raise SegmentNotFound(f"epoch {wanted.epoch:016x} is not in the roster")
        return member.table.descriptor(wanted.writable)

    # -- what to wait for

    def connections(self) -> Iterator[socket.socket]:
        """The connections to poll; ``read`` handles those that are readable."""
        yield from (check.connection for check in self._checks.values())
        for member in self._members.values():
            if member.connection is not None:
                yield member.connection

    def read(self, readable: set[int]) -> Iterator[Input]:
        """Handle these readable descriptors; yield what happened."""
        for number in readable & self._checks.keys():
            yield self._finish(self._checks.pop(number))
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
                    connection.recv(1)  # engines send nothing here: drop it

    def look(self) -> Iterator[Input]:
        """Check all tables, about once a second, and show in each that the coordinator works."""
        now, offset = self._clock(), clock_offset_ns()
        for number, check in list(self._checks.items()):
            if now >= check.until:
                del self._checks[number]
                check.connection.close()
                reason = f"it does not hand out its slot table within {FETCH_SECONDS:g} s"
                yield check.result(Refusal(reason, RETRIED, retry=True))
        for epoch, member in list(self._members.items()):
            with suppress(KvshmError):  # its owner has overwritten it
                member.table.coordinator_went_round(offset)
            yield from self._ends(epoch, member)

    @staticmethod
    def _ends(epoch: int, member: _Member) -> Iterator[Input]:
        table = member.table
        # Without a pulse the end of the connection is the engine's death.
        is_closed = member.connection is None and not table.owner_begun
        if (table.owner_died or is_closed) and not member.owner_death_reported:
            member.owner_death_reported = member.worker_death_reported = True
            yield ProcessDeath(epoch, owner=True, retired=table.retired)
        elif table.died and not member.worker_death_reported:
            member.worker_death_reported = True
            yield ProcessDeath(epoch, owner=False, retired=table.retired)
        if member.owner_death_reported and not table.in_use:
            yield TableUnused(epoch)

    # -- before a join

    def check(self, sender: Sender, join: Join) -> Input | None:
        """Ask the engine for its table.  Returns None if ``read`` or ``look`` yields the result."""
        epoch = join.engine.epoch
        known = self._members.get(epoch)
        if known is not None and known.pid == sender.pid and known.connection is not None:
            return CheckResult(sender, join, _compare(known.table, join.engine))
        if len(self._checks) >= MAX_CHECKS:
            reason = f"{MAX_CHECKS} engines join at the same time"
            return CheckResult(sender, join, Refusal(reason, RETRIED, retry=True))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        check = _TableCheck(sender, join, connection, self._clock() + FETCH_SECONDS)
        try:
            self._ask(check)
        except (OSError, KvshmError) as exc:
            connection.close()
            return check.result(_refusal(exc, join.engine))
        self._checks[connection.fileno()] = check
        return None

    def _ask(self, check: _TableCheck) -> None:
        epoch = check.join.engine.epoch
        check.connection.connect(os.fspath(engine_socket(self._run_dir, self._namespace, epoch)))
        server = peer_credentials(check.connection)
        if (server.uid, server.pid) != (os.geteuid(), check.sender.pid):
            raise SegmentError(f"its slot table is served by pid {server.pid}, uid {server.uid}")
        check.connection.send(Request(TABLE_KIND, epoch, writable=True).encode())

    def _finish(self, check: _TableCheck) -> Input:
        engine, connection = check.join.engine, check.connection
        try:
            table = _receive(connection, engine)
        except (OSError, KvshmError) as exc:
            connection.close()
            return check.result(_refusal(exc, engine))
        refusal = _compare(table, engine)
        if refusal is not None:
            table.close()
            connection.close()
            return check.result(refusal)
        old = self._members.get(engine.epoch)
        self._members[engine.epoch] = _Member(table, check.sender.pid, connection)
        if old is not None:  # closed last: the server's thread may hand it out until then
            old.close()
        return check.result(None)

    # -- after an end

    def release(self, epoch: int) -> None:
        member = self._members.pop(epoch, None)
        if member is not None:
            member.close()

    def sweep_bits(self, bits: int) -> None:
        for epoch, member in self._members.items():
            try:
                swept = member.table.sweep(bits)
            except KvshmError as exc:  # its owner has overwritten it
                logfmt.write(Event.NOT_SWEPT, epoch=f"{epoch:016x}", reason=exc)
                continue
            about = {"epoch": f"{epoch:016x}", "bits": f"{bits:#x}", "slots": swept}
            logfmt.write(Event.SWEPT, **about)


def _receive(connection: socket.socket, engine: EngineInfo) -> RosterSlotTable:
    what = f"the slot table of epoch {engine.epoch:016x}"
    fd = segment_of_reply(*receive(connection, what), what)
    largest = table_bytes(engine.num_blocks, len(engine.ranks))
    return RosterSlotTable.from_fd(what, fd, largest=largest, keep=True)


def _refusal(exc: Exception, engine: EngineInfo) -> Refusal:
    if isinstance(exc, VersionMismatch):
        return refuse_version("layout", exc, engine.kvshm_version)
    if isinstance(exc, FileNotFoundError | ConnectionRefusedError | SegmentNotFound):
        reason = "its slot table cannot be fetched in the coordinator's run directory"
        return Refusal(reason, _SAME_DIRECTORY)
    if isinstance(exc, SegmentNotReady | BlockingIOError | TransportError):
        return Refusal(str(exc), RETRIED, retry=True)
    if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "raise the coordinator's limit of open files (ulimit -n)"
        return Refusal("no descriptors are left for its slot table", remedy, retry=True)
    if isinstance(exc, OSError) or isinstance(exc.__cause__, OSError):
        # The connection was reset, or descriptors or memory are short here: a later try may work.
        return Refusal(str(exc), RETRIED, retry=True)
    return Refusal(str(exc), "restart the engine")


def _compare(table: RosterSlotTable, info: EngineInfo) -> Refusal | None:
    if difference := differs(table, info):
        return Refusal(difference, "restart the engine; if it says so again, report a bug")
    return None
