"""kvshm._node.segment_server: who gets which segment, to do what, and what odd servers bring."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from kvshm import _native
from kvshm._base.ids import Epoch, LeaseBit
from kvshm._base.rundir import engine_socket
from kvshm._node.segment_server import (
    SegmentClient,
    SegmentServer,
    fetch_segment,
)
from kvshm._shm.descriptors import Reply, Request
from kvshm._shm.layout import RETIRED_OFFSET, table_bytes
from kvshm._shm.segment import INDEX_KIND, TABLE_KIND
from kvshm.errors import (
    CorruptSegment,
    ProtocolError,
    SegmentError,
    SegmentNotFound,
    SegmentTooSmall,
)

from ..descriptors import left_open, open_files
from ..waiting import until
from .few_descriptors import descriptors
from .pages import ROOT
from .served import AnyTable, Served, ServedNode, fetched

EPOCH = Epoch(7)
WANTED = Request(TABLE_KIND, EPOCH).encode()


@pytest.fixture
def engine(served: ServedNode) -> Served:
    engine = served.serve("e", EPOCH)
    served.enlist(engine.table)
    return engine


# -- what is handed out


def test_an_engines_table_is_to_be_had_to_write_and_its_replica_to_read(
    served: ServedNode, engine: Served
) -> None:
    table = fetched(served.segments, EPOCH)
    table.set_lease_bit(LeaseBit(3))
    assert engine.table.lease_bit == 3
    replica = served.segments.replica(EPOCH)
    row = engine.replica.add_row(Epoch(9), "other", 4, LeaseBit(1))
    assert [found.row for found in replica.rows()] == [row]
    table.close()
    replica.close()


@pytest.mark.parametrize("kind", [TABLE_KIND, INDEX_KIND])
def test_what_was_asked_for_to_read_cannot_be_written(engine: Served, kind: str) -> None:
    fd = fetch_segment(engine.path, Request(kind, EPOCH), 2.0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, os.fstat(fd).st_size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_a_replica_is_never_handed_out_to_be_written(engine: Served) -> None:
    fd = fetch_segment(engine.path, Request(INDEX_KIND, EPOCH, True), 2.0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, os.fstat(fd).st_size)
    os.close(fd)


def test_the_coordinator_hands_out_the_tables_of_the_roster(
    served: ServedNode, engine: Served
) -> None:
    """Also while the engine does not answer."""
    engine.close_server()
    table = served.segments.roster_table(EPOCH, 26, 1)
    assert (table.epoch, table.engine) == (EPOCH, "e")
    table.close()
    read = served.segments.table_from_coordinator(EPOCH)
    with pytest.raises((ValueError, TypeError, BufferError)):
        _native.store(read._segment.buffer, RETIRED_OFFSET, 1)
    read.close()
    with pytest.raises(SegmentNotFound, match="no such engine is in the roster"):
        served.segments.roster_table(8, 26, 1)


def test_a_table_larger_than_the_roster_says_is_not_mapped(
    served: ServedNode, engine: Served
) -> None:
    with pytest.raises(SegmentError, match=rf"at most {table_bytes(25, 1)} were expected"):
        served.segments.roster_table(EPOCH, 25, 1)
    assert engine.table.nbytes == table_bytes(26, 1)


@pytest.mark.parametrize(
    ("kind", "epoch"), [(TABLE_KIND, 8), (INDEX_KIND, 8), ("leases", EPOCH), ("", EPOCH)]
)
def test_what_is_not_there_is_its_own_error(engine: Served, kind: str, epoch: int) -> None:
    with pytest.raises(SegmentNotFound, match=f"epoch {EPOCH:016x} is served here"):
        fetch_segment(engine.path, Request(kind, epoch), 2.0)


@pytest.mark.parametrize("request_", [b"\xc1", b"\x93\1\2\3", msgspec.msgpack.encode({"kind": 7})])
def test_a_request_that_makes_no_sense_is_answered_and_ends_nothing(
    engine: Served, request_: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(engine.path))
        client.send(request_)
        answer = msgspec.msgpack.decode(client.recv(4096), type=Reply)
    assert not answer.found
    os.close(fetch_segment(engine.path, Request(TABLE_KIND, EPOCH), 2.0))


# -- ends


def test_the_memory_outlives_its_maker(served: ServedNode) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.unit.served import *\n"
        "node = ServedNode(Path(sys.argv[1]), sys.argv[2])\n"
        "node.serve('killed', 9).table.set_life(0)\nprint(flush=True)\ninput()\n"
    )
    argv = [sys.executable, "-c", script, str(served.run_dir), served.namespace]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, env=environ, **pipes) as child:
        assert child.stdout is not None
        child.stdout.readline()
        table = served.segments.peer_table(9)
        child.kill()
    assert table.life(0) == 9
    with pytest.raises(SegmentNotFound, match="has died"):
        served.segments.peer_table(9)
    table.close()


# -- servers that are odd

Respond = Callable[[socket.socket], object]


@contextmanager
def answering(served: ServedNode, respond: Respond) -> Iterator[None]:
    path = engine_socket(served.run_dir, served.namespace, EPOCH)

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(4096)
            respond(client)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(30)
        assert not thread.is_alive()


NO_UTF8 = b"\x82\xa5found\xc2\xa6reason\xa1\xff"


def found(count: int) -> Respond:
    def respond(client: socket.socket) -> None:
        fds = [os.open("/dev/zero", os.O_RDWR) for _ in range(count)]
        socket.send_fds(client, [msgspec.msgpack.encode(Reply(True))], fds)
        for fd in fds:
            os.close(fd)

    return respond


@pytest.mark.parametrize(
    ("respond", "why"),
    [
        (found(0), "came with 0 descriptors"),
        (found(2), "came with 2 descriptors"),
        (found(1), "is not memory of uid"),
        (lambda client: client.send(b"\xc1"), "undecodable reply"),
        (lambda client: socket.send_fds(client, [b"\xc1"], [0, 1]), "undecodable reply"),
        (lambda client: socket.send_fds(client, [NO_UTF8], [0, 1]), "undecodable reply"),
        (lambda client: socket.send_fds(client, [b"\x81\xa1x" + b"\x91" * 9000], [0]), "undecod"),
        (lambda client: client.send(msgspec.msgpack.encode(Reply(False, "why"))), "why"),
        (lambda client: None, "without an answer"),
    ],
)
def test_an_odd_answer_is_an_error_and_leaves_no_descriptor(
    served: ServedNode, respond: Respond, why: str
) -> None:
    before = open_files()
    with answering(served, respond), pytest.raises(SegmentError, match=why):
        served.segments.peer_table(EPOCH)
    assert not left_open(before)


def test_a_table_of_another_epoch_is_refused(served: ServedNode, engine: Served) -> None:
    path = engine_socket(served.run_dir, served.namespace, 8)
    server = SegmentServer(path, lambda _: engine.table.descriptor(True))
    before = open_files()
    with pytest.raises(ProtocolError, match=f"epoch {EPOCH:016x}, not {8:016x}"):
        served.segments.peer_table(8)
    until(lambda: (open_files() - before).total() <= 1)
    server.close()


def test_a_replica_is_no_table_and_a_table_no_replica(served: ServedNode, engine: Served) -> None:
    path = engine_socket(served.run_dir, served.namespace, 8)
    server = SegmentServer(
        path,
        lambda wanted: (
            engine.replica.descriptor()
            if wanted.kind == TABLE_KIND
            else engine.table.descriptor(False)
        ),
    )
    quiet = SegmentClient(served.run_dir, served.namespace)
    with pytest.raises((CorruptSegment, SegmentError)):
        quiet.peer_table(8)
    with pytest.raises(CorruptSegment):
        quiet.replica(8)
    server.close()


STAYS = """
import sys
from pathlib import Path
from kvshm._shm.fds import fetch_keep_open, peer_has_closed
from kvshm._shm.descriptors import Request
request = Request("slots", int(sys.argv[2])).encode()
held = []
for _ in range(int(sys.argv[3])):
    held.append(fetch_keep_open(Path(sys.argv[1]), request, 60))
print(flush=True)
for _ in sys.stdin:
    closed = [peer_has_closed(connection) for _, _, connection in held]
    print(closed.count(False), closed[-1], flush=True)
"""
"""Asks for a table so many times, stays connected, and says for each line how many connections are
open, and whether the last one is closed."""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("permitted", "kept"), [(1024, 128), (240, 32)])
def test_who_asks_and_stays_without_end_has_a_part_of_the_descriptors_and_crowds_out_no_one(
    served: ServedNode, engine: Served, permitted: int, kept: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as held:

        def stays(times: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", STAYS, str(engine.path), str(EPOCH), str(times)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            asking = held.enter_context(subprocess.Popen(command, **pipes))
            assert asking.stdout.readline() == "\n"
            return asking

        def said(asking: subprocess.Popen[str]) -> str:
            print(file=asking.stdin, flush=True)
            return asking.stdout.readline()

        resource.setrlimit(resource.RLIMIT_NOFILE, (permitted, hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        other = stays(1)
        greedy = stays(kept + 40)
        until(lambda: said(greedy) == f"{kept - 1} False\n")
        assert said(other) == "1 False\n"


@pytest.mark.parametrize("left", [0, 1])
def test_without_descriptors_asking_is_a_sentence(
    served: ServedNode, engine: Served, left: int
) -> None:
    with descriptors(left=left), pytest.raises(SegmentError, match=r"."):
        served.segments.peer_table(EPOCH)
    table = served.segments.peer_table(EPOCH)
    assert table.epoch == EPOCH
    table.close()


def test_an_engine_without_descriptors_is_not_taken_for_one_that_has_ended(
    served: ServedNode, engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as short:
        short.setattr(AnyTable, "descriptor", none_left)
        with pytest.raises(SegmentError, match="without an answer") as caught:
            served.segments.peer_table(EPOCH)
        assert not isinstance(caught.value, SegmentNotFound)
    served.segments.peer_table(EPOCH).close()


def none_left(table: AnyTable, writable: bool) -> int:
    raise SegmentTooSmall(f"{table.name} cannot be handed on: Too many open files")


def test_a_coordinator_whose_socket_is_gone_does_not_say_that_engines_have_ended(
    served: ServedNode,
) -> None:
    with pytest.raises(SegmentError) as caught:
        served.segments.roster_table(EPOCH, 8, 1)
    assert not isinstance(caught.value, SegmentNotFound)


def test_what_was_served_goes_with_its_last_user_without_a_collector(served: ServedNode) -> None:
    """vLLM freezes its heap: what waits for the collector stays, memory, thread and all."""
    gc.disable()
    try:
        engine = served.serve("short", 11)
        engine.table.begin_pulse(None)
        gone = weakref.ref(engine.table)
        served.engines.remove(engine)
        engine.close()
        del engine
        assert gone() is None
    finally:
        gc.enable()
