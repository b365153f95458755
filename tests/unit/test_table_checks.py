"""What the coordinator looks at before it lets an engine in: its slot table, by real sockets."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from kvshm import _native
from kvshm._base.ids import LeaseBit, Rank
from kvshm._base.rundir import engine_socket
from kvshm._node.protocol import PROTOCOL_VERSION, EngineInfo, Join, RankInfo
from kvshm._node.segment_server import FETCH_SECONDS, SegmentClient
from kvshm._shm.descriptors import Reply
from kvshm._shm.fd_server import FdServer
from kvshm._shm.layout import LAYOUT_VERSION, TABLE_HEADER_BYTES, VERSION_OFFSET, table_bytes
from kvshm._shm.segment import Segment
from kvshm.coordinator.actions import CheckResult, Input, ProcessDeath, Refusal, Sender, TableUnused
from kvshm.coordinator.tables import MAX_CHECKS, Tables
from kvshm.interfaces import MemoryDescriptor
from kvshm.version import __version__

from ..descriptors import left_open, open_files
from .exporters import Clock
from .served import AnyTable, Served, ServedNode

EPOCH = 0x77
ME = Sender(b"route", os.geteuid(), os.getpid())


class Shell:
    def __init__(self, node: ServedNode) -> None:
        self.clock = Clock()
        self.tables = Tables(node.run_dir, node.namespace, self.clock)

    def wait(self) -> list[Input]:
        connections = [connection.fileno() for connection in self.tables.connections()]
        readable, _, _ = select.select(connections, [], [], 60)
        return list(self.tables.read(set(readable)))

    def check(self, info: EngineInfo, sender: Sender = ME) -> Refusal | None:
        join = Join(protocol=PROTOCOL_VERSION, engine=info)
        answer = self.tables.check(sender, join)
        if answer is None:
            [answer] = self.wait()
        assert isinstance(answer, CheckResult)
        assert (answer.sender, answer.join) == (sender, join)
        return answer.refusal

    def refusal(self, info: EngineInfo, sender: Sender = ME) -> Refusal:
        refusal = self.check(info, sender)
        assert refusal is not None
        assert not list(self.tables.connections())
        assert not self.tables._members
        return refusal


def soon(holds: Callable[[], bool]) -> None:
    """Wait for a mark that a thread of the core sets on its own."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def shell(served: ServedNode) -> Iterator[Shell]:
    before = open_files()
    shell = Shell(served)
    yield shell
    shell.tables.close()
    for engine in served.engines:
        engine.close()
    assert not left_open(before)


@pytest.fixture
def engine(served: ServedNode) -> Served:
    return served.serve("e", EPOCH, num_blocks=8, pid=4711)


@pytest.fixture
def info() -> EngineInfo:
    """The truth about that engine, which sees itself in a pid namespace of its own."""
    memory = MemoryDescriptor("none", EPOCH, 0, [])
    return EngineInfo(
        epoch=EPOCH,
        name="e",
        pid=1,
        fingerprint=bytes(32),
        fields={},
        num_blocks=8,
        ranks=[RankInfo(1, memory)],
        kvshm_version="9.8",
    )


def test_an_engine_that_is_what_it_says_is_let_in_and_its_table_handed_on(
    shell: Shell, served: ServedNode, engine: Served, info: EngineInfo
) -> None:
    shell.tables.serve()
    assert shell.check(info) is None
    engine.table.set_lease_bit(3)
    got = SegmentClient(served.run_dir, served.namespace).roster_table(EPOCH, 8, 1)
    assert got.lease_bit == 3, "the same memory"
    got.close()


def test_who_joins_again_is_not_asked_for_its_table_again(
    shell: Shell, engine: Served, info: EngineInfo
) -> None:
    assert shell.check(info) is None
    join = Join(protocol=PROTOCOL_VERSION, engine=info)
    assert shell.tables.check(ME, join) == CheckResult(ME, join, None)
    other = Join(protocol=PROTOCOL_VERSION, engine=msgspec.structs.replace(info, num_blocks=9))
    answer = shell.tables.check(ME, other)
    assert isinstance(answer, CheckResult)
    assert answer.refusal is not None, "but what it says now is compared with it"


def test_a_table_is_kept_until_it_is_forgotten_though_no_one_serves_it_any_more(
    shell: Shell, engine: Served, info: EngineInfo
) -> None:
    """Its engine may stand still, or have ended with a worker that still copies."""
    assert shell.check(info) is None
    engine.table.set_life(Rank(0))
    engine.table.publish(bytes(48), bytes(8))
    assert engine.table.lease(LeaseBit(5), engine.table.scan())[0] == 1
    worker = AnyTable.from_fd("w", engine.table.descriptor(True))
    engine.table.begin_pulse(None)
    worker.begin_pulse(0)
    engine.table.retire()
    engine.table.close()
    soon(lambda: worker.owner_died)
    engine.close()
    assert shell.wait() == [ProcessDeath(EPOCH, owner=True, retired=True)]
    assert not list(shell.tables.connections())
    assert list(shell.tables.look()) == [], "told once, and its worker still has it"
    assert worker.slot(0).leases == 1 << 5
    shell.tables.sweep_bits(1 << 5)
    assert worker.slot(0).leases == 0
    worker.close()
    seen: list[Input] = []
    soon(lambda: bool(seen.extend(shell.tables.look()) or seen))
    assert seen == [TableUnused(EPOCH)]
    shell.tables.release(EPOCH)
    assert list(shell.tables.look()) == []


def test_a_server_that_ends_is_no_death(shell: Shell, engine: Served, info: EngineInfo) -> None:
    engine.table.begin_pulse(None)
    assert shell.check(info) is None
    assert engine._server is not None
    engine._server.close()
    assert shell.wait() == []
    assert list(shell.tables.look()) == []


# -- whose table it is


def test_a_table_that_another_process_serves_is_refused(
    shell: Shell, engine: Served, info: EngineInfo
) -> None:
    """So no one joins as what another engine is, and stays when that one dies."""
    refusal = shell.refusal(info, ME._replace(pid=1))
    assert f"its slot table is served by pid {os.getpid()}" in refusal.reason
    assert not refusal.retry


def test_a_table_that_is_nowhere_is_refused_and_the_run_directory_named(
    shell: Shell, info: EngineInfo
) -> None:
    refusal = shell.refusal(info)
    assert "cannot be fetched in the coordinator's run directory" in refusal.reason
    assert "one run directory" in refusal.remedy
    assert not refusal.retry


@pytest.mark.parametrize(
    "change", [{"num_blocks": 9}, {"fingerprint": b"x" * 32}, {"num_blocks": 7}], ids=str
)
def test_a_table_that_is_not_as_described_is_refused(
    shell: Shell, engine: Served, info: EngineInfo, change: dict[str, Any]
) -> None:
    refusal = shell.refusal(msgspec.structs.replace(info, **change))
    assert "it says" in refusal.reason or "at most" in refusal.reason
    assert "restart the engine" in refusal.remedy


def test_another_layout_is_refused_and_who_must_upgrade_is_named(
    shell: Shell, engine: Served, info: EngineInfo
) -> None:
    layout = LAYOUT_VERSION + 1
    _native.mark_ready(engine.table._segment.buffer, layout)
    refusal = shell.refusal(info)
    assert f"the engine has layout {layout} (kvshm 9.8)" in refusal.reason
    assert f"the coordinator layout {LAYOUT_VERSION} (kvshm {__version__})" in refusal.reason
    assert "upgrade kvshm in the coordinator's environment to 9.8" in refusal.remedy


def test_a_table_that_is_not_filled_yet_is_asked_for_again(
    shell: Shell, engine: Served, info: EngineInfo
) -> None:
    buffer = engine.table._segment.buffer
    buffer[VERSION_OFFSET : VERSION_OFFSET + 4] = bytes(4)
    assert shell.refusal(info).retry


# -- what comes instead of a table


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, nbytes)
    return fd


def sparse(nbytes: int) -> int:
    """Sealed, but its pages do not exist: one that reads it may get a SIGBUS."""
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def sealed(nbytes: int) -> int:
    segment = Segment.create("sealed", nbytes)
    fd = segment.descriptor(writable=True)
    segment.close()
    return fd


def plain_file(nbytes: int) -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    return fd


def no_memory(nbytes: int) -> int:
    return os.eventfd(0)


LENGTH = table_bytes(8, 1)
MEMORY = {
    "unsealed": (unsealed, LENGTH, "not sealed"),
    "sparse": (sparse, LENGTH, "but only 0 of them exist"),
    "too long": (sealed, LENGTH + 4096, f"at most {LENGTH} were expected"),
    "cut off": (sealed, 16, "has 16 bytes"),
    "a header only": (sealed, TABLE_HEADER_BYTES, "not filled yet"),
    "empty": (sealed, LENGTH, "not filled yet"),
    "a file": (plain_file, LENGTH, "not sealed"),
    "an eventfd": (no_memory, 0, "is not memory"),
}


@pytest.fixture
def instead(served: ServedNode) -> Iterator[Any]:
    """Serves what it is given in the place of the engine."""
    servers: list[FdServer] = []

    def serve(reply: bytes, fds: list[int]) -> None:
        path = engine_socket(served.run_dir, served.namespace, EPOCH)
        servers.append(FdServer(path, lambda request: (reply, fds)))

    yield serve
    for server in servers:
        server.close()


GOOD = msgspec.msgpack.encode(Reply(True))


@pytest.mark.parametrize(("make", "nbytes", "reason"), MEMORY.values(), ids=MEMORY.keys())
def test_memory_that_is_no_table_is_refused(
    shell: Shell, info: EngineInfo, instead: Any, make: Any, nbytes: int, reason: str
) -> None:
    fd = make(nbytes)
    instead(GOOD, [fd])
    assert reason in shell.refusal(info).reason
    os.close(fd)


def test_the_table_of_another_epoch_is_refused(
    shell: Shell, served: ServedNode, info: EngineInfo, instead: Any
) -> None:
    fd = served.serve("other", EPOCH + 1, num_blocks=8).table.descriptor(True)
    instead(GOOD, [fd])
    assert f"({EPOCH + 1:016x}, 8, 1," in shell.refusal(info).reason
    os.close(fd)


def test_a_table_that_may_only_be_read_is_refused(
    shell: Shell, served: ServedNode, info: EngineInfo, engine: Served, instead: Any
) -> None:
    """No one could take leases in it."""
    fd = engine.table.descriptor(False)
    assert engine._server is not None
    engine._server.close()
    instead(GOOD, [fd])
    assert "cannot be mapped" in shell.refusal(info).reason
    os.close(fd)


@pytest.mark.parametrize("descriptors", [0, 2])
def test_an_answer_has_one_descriptor(
    shell: Shell, info: EngineInfo, instead: Any, descriptors: int
) -> None:
    fds = [sealed(LENGTH) for _ in range(descriptors)]
    instead(GOOD, fds)
    assert f"came with {descriptors} descriptors" in shell.refusal(info).reason
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("reply", [b"\xc1", b"x" * 60_000, b"\x80"], ids=["garbage", "long", "map"])
def test_an_answer_that_is_none_is_refused(
    shell: Shell, info: EngineInfo, instead: Any, reply: bytes
) -> None:
    instead(reply, [])
    assert shell.refusal(info).reason


# -- engines that do not answer


@pytest.fixture
def silent(served: ServedNode) -> Iterator[socket.socket]:
    path = engine_socket(served.run_dir, served.namespace, EPOCH)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen(2 * MAX_CHECKS)
        yield listener


def joins(info: EngineInfo) -> Iterator[Join]:
    return (Join(protocol=PROTOCOL_VERSION, engine=info, sequence=n) for n in count())


@pytest.mark.usefixtures("silent")
def test_a_silent_engine_is_waited_for_without_keeping_anybody(
    shell: Shell, served: ServedNode, info: EngineInfo
) -> None:
    assert shell.tables.check(ME, next(joins(info))) is None
    served.serve("other", EPOCH + 1, num_blocks=8)
    other = msgspec.structs.replace(info, epoch=EPOCH + 1)
    assert shell.check(other) is None
    assert list(shell.tables.look()) == []
    shell.clock.now += FETCH_SECONDS
    [answer] = shell.tables.look()
    assert isinstance(answer, CheckResult)
    assert answer.refusal is not None
    assert answer.refusal.retry
    assert "within 2 s" in answer.refusal.reason
    assert len(list(shell.tables.connections())) == 1, "that of the other"


def test_whose_connection_is_reset_is_to_try_again(
    shell: Shell, silent: socket.socket, info: EngineInfo
) -> None:
    assert shell.tables.check(ME, next(joins(info))) is None
    silent.accept()[0].close()  # with the question unread
    [answer] = shell.wait()
    assert isinstance(answer, CheckResult)
    assert answer.refusal is not None
    assert (answer.refusal.retry, "reset" in answer.refusal.reason) == (True, True)


@pytest.mark.usefixtures("silent")
def test_of_many_that_join_at_once_and_are_silent_some_are_to_try_again(
    shell: Shell, info: EngineInfo
) -> None:
    several = joins(info)
    assert all(shell.tables.check(ME, next(several)) is None for _ in range(MAX_CHECKS))
    answer = shell.tables.check(ME, next(several))
    assert isinstance(answer, CheckResult)
    assert answer.refusal is not None
    assert answer.refusal.retry
    shell.clock.now += FETCH_SECONDS
    assert len(list(shell.tables.look())) == MAX_CHECKS
    assert shell.tables.check(ME, next(several)) is None


def test_a_dead_engines_socket_is_no_table(shell: Shell, engine: Served, info: EngineInfo) -> None:
    engine.crash()
    assert "cannot be fetched" in shell.refusal(info).reason
