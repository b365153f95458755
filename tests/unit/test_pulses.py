"""A process's pulse in a slot table: marked by the kernel however the process ends, before any of
its memory has gone."""

from __future__ import annotations

import ctypes
import errno
import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.synchronize import Event

import pytest

from kvshm import _native
from kvshm._base.ids import Epoch, Fingerprint, LeaseBit, Rank
from kvshm._shm.layout import PULSES_OFFSET
from kvshm._shm.own_slot_table import TableSpec
from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import SegmentError

from ..waiting import until
from .pulsing import WAIT, pulsing
from .served import AnyTable, again

pytestmark = pytest.mark.multiprocess

RANKS = 2


def new_table() -> AnyTable:
    spec = TableSpec("pulses", "e", 4, 16, RANKS, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(1))
    for rank in range(RANKS):
        table.set_life(rank)
    return table


@pytest.fixture
def table() -> Iterator[AnyTable]:
    table = new_table()
    yield table
    table.close()


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


# -- however a process ends

ENDS = {
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGTERM": "import os; os.kill(os.getpid(), 15)",
    "SIGSEGV": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "_exit": "import os; os._exit(0)",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "the interpreter's end": "pass",
    "an exception": "1 / 0",
    "the interpreter's end beside a thread": "import threading\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a thread's _exit": "import os, threading, time\n"
    "threading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(1000)",
    "the main thread's exit before others'": "import ctypes, os, threading, time\n"
    "def end(): time.sleep(0.1); os.kill(os.getpid(), 9)\n"
    "threading.Thread(target=end).start()\nctypes.CDLL(None).pthread_exit(None)",
    "closing it": "table.close()\ninput()",
    "letting go of it": "del table\ninput()",
}


@pytest.mark.parametrize("rank", [None, 1], ids=["owner", "rank"])
@pytest.mark.parametrize("how", ENDS)
def test_however_a_process_ends_it_is_marked(table: AnyTable, how: str, rank: int | None) -> None:
    go_on = "print(flush=True)\ninput()\n"
    with pulsing(table, rank, go_on + ENDS[how]) as child:
        assert (table.died, table.in_use) == (False, True)
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        until(lambda: table.died)
    assert (table.owner_died, table.in_use) == (rank is None, False)
    assert table.check_integrity() == []


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_nothing_is_leased_from_an_engine_of_which_a_process_has_died(
    table: AnyTable, held: bytes, rank: int | None
) -> None:
    """The life words are as they were, and no one had to look for a death."""
    with pulsing(table, rank):
        assert table.lease(LeaseBit(0), held)[0] == 1
        assert table.release(LeaseBit(0), held) == 1
        assert table.is_alive(0)
    assert table.alive
    assert table.lease(LeaseBit(0), held)[0] == 0
    assert table.slot(0).leases == 0
    assert not table.is_alive(0)
    good = [table.recheck(Rank(r), held) for r in range(RANKS)]
    assert good == [[rank != r] for r in range(RANKS)], "its own memory has gone, no other"


def test_a_process_that_has_died_is_marked_before_its_parent_knows() -> None:
    for _ in range(20):
        table = new_table()
        with pulsing(table) as child:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert table.owner_died
        table.close()


PROCESS_MRELEASE = 448  # on every architecture


def test_who_is_killed_is_marked_also_where_its_memory_is_taken_at_once() -> None:
    """What killers in user space do besides, where memory is short; many times, since both must
    meet within a millisecond."""
    fork, libc = multiprocessing.get_context("fork"), ctypes.CDLL(None, use_errno=True)
    marked = taken = 0
    for _ in range(100):
        table, ready = new_table(), fork.Event()

        def live(table: AnyTable = table, ready: Event = ready) -> None:
            table.begin_pulse(None)
            ready.set()
            signal.pause()

        child = fork.Process(target=live)
        child.start()
        assert child.pid is not None
        assert ready.wait(100)
        pidfd = os.pidfd_open(child.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        taken += libc.syscall(PROCESS_MRELEASE, pidfd, 0) == 0
        if ctypes.get_errno() == errno.ENOSYS:
            child.join()
            pytest.skip("Linux before 5.15 has no process_mrelease")
        os.close(pidfd)
        child.join()
        marked += table.owner_died
        table.close()
    assert taken, "it always came too late"
    assert marked == 100


# -- before its memory goes

HOLD = """
import ctypes, mmap, threading
held = mmap.mmap(-1, {nbytes})
held[::4096] = b"x" * len(held[::4096])
for _ in range({threads}):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print(flush=True)
print(ctypes.addressof(ctypes.c_char.from_buffer(held)), flush=True)
input()
"""
GIB = 1 << 30


@pytest.mark.parametrize("threads", [0, 16])
@pytest.mark.parametrize(
    ("nbytes", "rounds"), [(4096, 20), pytest.param(2 * GIB, 1, marks=pytest.mark.long)]
)
def test_who_finds_no_mark_after_reading_has_read_what_was_there(
    nbytes: int, rounds: int, threads: int
) -> None:
    """As an importer does: it reads the process's memory, and then looks for the mark.  What else
    a process has, of a GPU, say, goes with its files, of which one is a pipe here."""
    for _ in range(rounds):
        table = new_table()
        with pulsing(table, 0, HOLD.format(nbytes=nbytes, threads=threads)) as child:
            assert child.stdout is not None
            address = int(child.stdout.readline())
            memory = os.open(f"/proc/{child.pid}/mem", os.O_RDONLY)
            polled = select.poll()
            polled.register(child.stdout, 0)  # its end is told unasked
            child.send_signal(signal.SIGKILL)
            intact, ended = True, False
            while intact or not ended:
                intact = os.pread(memory, 1, address + nbytes - 4096) == b"x"
                ended = bool(polled.poll(0))
                marked = table.died
                assert marked or (intact and not ended), (intact, ended)
            os.close(memory)
        table.close()


def test_the_mark_comes_while_gibibytes_have_yet_to_go() -> None:
    before = 0
    for _ in range(3):  # or this process got no core all that time
        table = new_table()
        with pulsing(table, 0, HOLD.format(nbytes=2 * GIB, threads=0)) as child:
            child.send_signal(signal.SIGKILL)
            while not table.died:
                pass
            gone = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            before += gone is None
        table.close()
        if before:
            return
    raise AssertionError("the process had gone whenever there was a mark")


# -- who is not dead


def test_who_stands_still_is_not_dead(table: AnyTable, held: bytes) -> None:
    with pulsing(table) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert (table.died, table.in_use) == (False, True)
        assert table.lease(LeaseBit(0), held)[0] == 1


def test_the_end_of_another_thread_is_no_death(table: AnyTable) -> None:
    def begin() -> None:
        table.begin_pulse(None)

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert (table.died, table.in_use) == (False, True)


@pytest.mark.parametrize("how", ["_exit", "SIGKILL", "sys.exit"])
def test_the_end_of_a_forked_child_is_not_its_parents(table: AnyTable, how: str) -> None:
    table.begin_pulse(None)

    def end() -> None:
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "_exit":
            os._exit(0)
        table.close()
        gc.collect()

    child = multiprocessing.get_context("fork").Process(target=end)
    child.start()
    child.join(100)
    assert child.exitcode is not None
    assert (table.died, table.in_use) == (False, True)


@pytest.mark.parametrize("child", ["input()", "table.close(); input()"])
def test_a_child_that_lives_on_does_not_keep_its_parent_alive(table: AnyTable, child: str) -> None:
    """A worker of an engine, forked, that no one has killed yet."""
    then = f"import os\nif not os.fork(): {child}\n" + WAIT
    with pulsing(table, None, then) as parent:
        os.kill(parent.pid, signal.SIGKILL)
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        assert table.owner_died


def test_a_forked_child_has_nothing_to_spoil_its_parents_pulse_with(table: AnyTable) -> None:
    """Where the kernel reads what it shall mark: a page of memory that is shared, but by no one."""
    count = "print(open('/proc/self/maps').read().count('/dev/zero (deleted)'), flush=True)\n"
    then = f"import os\nprint(flush=True)\n{count}if os.fork(): os.wait()\n{count}input()"
    with pulsing(table, None, then) as child:
        assert child.stdout is not None
        counts = [int(child.stdout.readline()) for _ in range(2)]
    assert counts == [1, 0]


def test_an_engine_is_in_use_until_its_last_process_has_gone(table: AnyTable) -> None:
    assert (table.died, table.in_use) == (False, False), "nobody has begun"
    with pulsing(table, 1):
        with pulsing(table):
            assert not table.died
        assert (table.owner_died, table.died, table.in_use) == (True, True, True)
    assert not table.in_use


# -- beginning and ending


def test_a_pulse_ends_with_the_table_and_leaves_no_thread(table: AnyTable) -> None:
    before = threads()
    own = again(table)
    own.begin_pulse(0)
    own.begin_pulse(1)  # the one before ends
    until(lambda: table._pulses()[1] == 0x40000000)
    assert table._pulses()[0] == 0
    own.close()
    until(lambda: table._pulses() == [0, 0x40000000, 0x40000000])
    until(lambda: not threads() - before)


def test_where_no_thread_can_be_started_there_is_a_sentence(table: AnyTable) -> None:
    """In a process of its own: the limit is all its user's."""
    script = (
        "import os, resource, sys, threading\n"
        "from kvshm._shm.own_slot_table import RankSlotTable\n"
        "from kvshm.errors import SegmentError\n"
        "table = RankSlotTable.from_fd('its table', int(sys.argv[1]))\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + 1024, -1))\n"
        "try:\n    table.begin_pulse(None)\n"
        "except SegmentError as exc:\n    sys.exit(str(exc))\n"
    )
    fd = table.descriptor(True)
    argv = [sys.executable, "-c", script, str(fd)]
    done = subprocess.run(
        argv, pass_fds=[fd], capture_output=True, text=True, timeout=100, check=False
    )
    os.close(fd)
    assert done.stderr.startswith("its table: the kernel cannot mark the death of this process: ")
    assert table._pulses() == [0] * (1 + RANKS)


@pytest.mark.parametrize("rank", [-1, RANKS])
def test_there_is_no_such_rank(table: AnyTable, rank: int) -> None:
    with pytest.raises(IndexError):
        table.begin_pulse(rank)


def test_a_table_that_is_only_read_has_no_pulse(table: AnyTable) -> None:
    reader = again(table, SlotTableView)
    with pytest.raises((ValueError, TypeError, BufferError)):
        _native.pulse(reader._segment.buffer, PULSES_OFFSET)
    reader.close()


@pytest.mark.parametrize(
    "offset", [-8, 1, PULSES_OFFSET + 4, 1 << 40, (1 << 64) - 8, (1 << 64) - 1]
)
def test_a_word_that_is_none_is_refused(table: AnyTable, offset: int) -> None:
    with pytest.raises((ValueError, IndexError, OverflowError)):
        _native.pulse(table._segment.buffer, offset & ((1 << 64) - 1))


def test_memory_that_others_do_not_share_is_refused_or_harmless() -> None:
    """Only shared memory can be mapped a second time."""
    with pytest.raises((OSError, SegmentError)):
        _native.pulse(bytearray(8192), 0)
