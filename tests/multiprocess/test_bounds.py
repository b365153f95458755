"""What others may take of the coordinator: descriptors, memory, time."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest

from kvshm._base.rundir import (
    command_endpoint,
    event_endpoint,
    lock_path,
    rank_socket,
    tables_socket,
)
from kvshm._node.protocol import Heartbeat, encode
from kvshm._shm.descriptors import Request
from kvshm._shm.segment import TABLE_KIND
from kvshm.coordinator.__main__ import EXIT_EXHAUSTED

from .engines import FakeEngine, in_turn
from .greedy import MORE, connect, frame
from .processes import Managed, Node, leave_socket, wait_until

pytestmark = pytest.mark.multiprocess

MEGABYTE = 1 << 20
ENDS = command_endpoint, event_endpoint
QUESTION = frame(encode(Heartbeat(epoch=1, sequence=0)))


def limited(descriptors: int) -> tuple[str, ...]:
    return ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", sys.executable)


def resident(process: Managed) -> int:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // MEGABYTE


# -- descriptors


def use_up_descriptors(
    coordinator: Managed | subprocess.Popen[bytes], node: Node, most: int
) -> None:
    commands, events = (end(node.run_dir, node.namespace) for end in ENDS)
    with ExitStack() as held, suppress(OSError):
        asking = held.enter_context(connect(commands))
        for n in range(most):
            held.callback((connect(commands) if n % 2 else connect(events, b"SUB")).close)
            asking.sendall(QUESTION)
            if not asking.recv(1000):  # the coordinator has had a turn since
                break
        coordinator.wait()


def use_up_memory(coordinator: Managed, node: Node, parts: bytes) -> None:
    ended = suppress(BrokenPipeError, ConnectionResetError)
    with connect(command_endpoint(node.run_dir, node.namespace)) as greedy, ended:
        for _ in range(16_000):
            greedy.sendall(parts)


LARGE, EMPTY = frame(bytes(MEGABYTE), MORE), bytes([MORE, 0]) * 65536
ENOUGH = r"\d+ descriptors are open, \d+ are permitted; end the processes that connect so often"
EXHAUSTING = {
    "64 descriptors": (64, partial(use_up_descriptors, most=128), ENOUGH + ", or raise the limit"),
    "1024 descriptors": (1024, partial(use_up_descriptors, most=2048), ENOUGH + ", or raise"),
    "large parts": (4096, partial(use_up_memory, parts=LARGE), r"\d+ MiB of memory .*; end the"),
    "empty parts": (4096, partial(use_up_memory, parts=EMPTY), r"\d+ MiB of memory .*; end the"),
}


@pytest.mark.parametrize("case", EXHAUSTING)
def test_exhausted_coordinator_ends_and_its_successor_knows_everything(
    node: Node, case: str
) -> None:
    """No lease bit, no block and no event is lost, and no engine leaves."""
    descriptors, use_up, reason = EXHAUSTING[case]
    coordinator = node.coordinator(python=limited(descriptors))
    a, b = in_turn(node, "a", "b")
    a.heard("engine_joined", epoch=b.joined()["epoch"])
    a.do("publish", blocks=[1, 2])
    b.knows(1, 2)
    bits, marks = [one.joined()["bit"] for one in (a, b)], [one.mark() for one in (a, b)]

    use_up(coordinator, node)

    assert coordinator.wait() == EXIT_EXHAUSTED
    (last,) = coordinator.err.matching(lambda line: line.startswith("kvshm-coordinator: "))
    assert re.fullmatch(f"kvshm-coordinator: {reason}.*; engines serve on, and join if .*", last)
    a.do("publish", blocks=[3])
    successor = node.coordinator(python=limited(descriptors))
    joined = [one.joined(mark) for one, mark in zip((a, b), marks, strict=True)]
    assert [one["bit"] for one in joined] == bits
    b.knows(1, 2, 3)
    assert not [*a.all_heard("engine_gone"), *b.all_heard("engine_gone")]
    assert successor.terminate() == 0


def test_signal_ends_coordinator_that_is_nearly_exhausted(node: Node) -> None:
    coordinator = node.coordinator()
    with connect(command_endpoint(node.run_dir, node.namespace)) as greedy:
        for _ in range(20):
            greedy.sendall(EMPTY)
        wait_until(lambda: resident(coordinator) > 100, "it keeps what was sent")
        assert coordinator.terminate() == 0


@pytest.mark.parametrize("descriptors", [6, 9, 12, 24])
def test_too_few_descriptors_end_it_with_a_sentence(node: Node, descriptors: int) -> None:
    coordinator = node.start_coordinator(python=limited(descriptors))
    assert coordinator.wait() == 1
    assert re.fullmatch(
        r"kvshm-coordinator: only \d+ more files can be opened, \d+ are needed .*"
        r"raise the limit of open files \(ulimit -n\)",
        str(coordinator.err),
    )


def test_who_asks_for_tables_without_end_takes_no_descriptors(node: Node) -> None:
    coordinator = node.coordinator(python=limited(1024))
    request = Request(TABLE_KIND, 1).encode()
    path = tables_socket(node.run_dir, node.namespace)
    with ExitStack() as held:
        for _ in range(900):
            asking = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            asking.connect(os.fspath(path))
            asking.send(request)
            assert asking.recv(1000)
        assert len(os.listdir(f"/proc/{coordinator.pid}/fd")) < 200
        FakeEngine(node, "a").joined()
    assert coordinator.terminate() == 0


# -- memory


def test_a_long_subscription_is_refused(node: Node) -> None:
    coordinator = node.coordinator()
    with connect(event_endpoint(node.run_dir, node.namespace), b"SUB") as greedy:
        with suppress(BrokenPipeError, ConnectionResetError):
            greedy.sendall(frame(b"\x01" + bytes(10 * MEGABYTE)))
        with suppress(ConnectionResetError):
            while greedy.recv(4096):
                pass
    assert resident(coordinator) < 100


def test_who_connects_and_leaves_all_the_time_takes_no_memory(node: Node) -> None:
    """Without an engine in the roster nothing is sent that would have libzmq work them off."""
    coordinator = node.coordinator()
    before = resident(coordinator)
    for _ in range(10_000):
        with suppress(OSError):
            connect(event_endpoint(node.run_dir, node.namespace), b"SUB").close()
    assert resident(coordinator) < before + 50
    FakeEngine(node, "a").joined()


# -- the log


def end_by_signal(coordinator: subprocess.Popen[bytes], node: Node) -> None:
    coordinator.terminate()


def end_by_connections(coordinator: subprocess.Popen[bytes], node: Node) -> None:
    use_up_descriptors(coordinator, node, most=128)


@pytest.mark.parametrize(("end", "status"), [(end_by_signal, 0), (end_by_connections, 5)])
def test_a_log_that_no_one_reads_delays_neither_engines_nor_the_end(
    node: Node, end: Callable[[subprocess.Popen[bytes], Node], None], status: int
) -> None:
    read, write = os.pipe()
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    command = [*limited(64), "-P", "-m", "kvshm.coordinator", *place]
    with subprocess.Popen(command, stderr=write) as coordinator:
        try:
            assert b"event=few-descriptors" in os.read(read, 4096)
            room = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
            os.set_blocking(write, False)  # the log's thread may write meanwhile
            with suppress(BlockingIOError):
                while os.write(write, bytes(room)):
                    pass
            FakeEngine(node, "a").joined()
            FakeEngine(node, "b").joined()
            end(coordinator, node)
            assert coordinator.wait(30) == status
        finally:
            coordinator.kill()
            os.close(read)
            os.close(write)


HANGING_DISK = """
import sys, threading
from kvshm._base.log_file import LogFile
LogFile.emit = lambda self, record: threading.Event().wait()
from kvshm.coordinator.__main__ import main
sys.exit(main())
"""


def test_log_on_a_disk_that_hangs_delays_neither_engines_nor_the_end(node: Node) -> None:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    log = ("--log-file", str(node.run_dir / "log"))
    coordinator = node.processes.python("coordinator", "-c", HANGING_DISK, *place, *log)
    FakeEngine(node, "a").joined()
    assert coordinator.terminate() == 0
    assert not str(coordinator.err)


# -- folders


def test_what_lies_in_the_place_of_a_lock_or_a_socket_is_named_with_its_remedy(node: Node) -> None:
    lock = lock_path(node.run_dir, node.namespace)
    os.mkfifo(lock)
    coordinator = node.start_coordinator()
    assert coordinator.wait() == 4
    assert f"{lock} cannot be opened: it is not a regular file; remove it" in str(coordinator.err)
    lock.unlink()
    place = Path(command_endpoint(node.run_dir, node.namespace).removeprefix("ipc://"))
    place.mkdir()
    coordinator = node.start_coordinator()
    assert coordinator.wait() == 4
    assert f"{place} cannot be made: Is a directory; remove" in str(coordinator.err)
    assert "Traceback" not in str(coordinator.err)
    place.rmdir()
    assert node.coordinator().terminate() == 0


def test_a_run_directory_that_vanishes_ends_it_with_a_sentence(node: Node) -> None:
    coordinator = node.coordinator()
    shutil.rmtree(node.run_dir)
    assert coordinator.wait() == 1
    assert "start the coordinator again" in str(coordinator.err)
    assert "Traceback" not in str(coordinator.err)
    node.run_dir.mkdir(mode=0o700)


LOOKS_OFTEN = """
import sys
from dataclasses import replace
from kvshm._base import timing
timing.TIMING = replace(timing.TIMING, leftovers_seconds=3.0)
from kvshm.coordinator.__main__ import main
sys.exit(main())
"""


def test_thousands_of_files_neither_silence_it_nor_fill_its_log(node: Node) -> None:
    place = ("--run-dir", str(node.run_dir), "--namespace", node.namespace)
    coordinator = node.processes.python("coordinator", "-c", LOOKS_OFTEN, *place)
    coordinator.wait_err("event=serving")
    a, b = FakeEngine(node, "a"), FakeEngine(node, "b")
    a.joined()
    b.joined()
    for n in range(20_000):
        name = f"{node.namespace}.rank.{n}.0.sock"
        os.close(os.open(node.run_dir / name, os.O_CREAT, 0o600))
    left = rank_socket(node.run_dir, node.namespace, 1, 1)
    leave_socket(left)
    b.process.signal(signal.SIGKILL)
    a.heard("engine_gone", epoch=b.joined()["epoch"])
    # One look in 3 s at some 4,000 of the files: the socket may be among the last.
    wait_until(lambda: not left.exists(), "the dead socket has been removed", patience=250)
    assert "event=suspected" not in str(coordinator.err)
    # A look names some of the files that it removes and counts the others, in its last line: so
    # much for each look.
    coordinator.wait_err("event=removed more=")
    looks = coordinator.err.matching(lambda line: "event=removed more=" in line)
    assert len(coordinator.err) < 25 * (len(looks) + 2)
