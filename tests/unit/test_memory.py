"""KV memory: reserved in full, sealed, without a name, gone with its last user."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from kvshm.errors import TransportError
from kvshm.transport import memory as memory_module
from kvshm.transport.memory import KVMemory, may_be_huge

from ..descriptors import left_open, open_files


@pytest.fixture
def memory():
    made = KVMemory.create(100_000)
    yield made
    made.close()


def test_memory_is_zeroed_writable_and_reserved(memory):
    assert memory.buffer.tobytes() == bytes(100_000)
    memory.buffer[99_999] = 7
    stat = os.stat(f"/proc/self/fd/{memory._fd}")
    assert stat.st_blocks * 512 >= 100_000
    assert memory.address % mmap.PAGESIZE == 0


@pytest.mark.parametrize("known", [True, False], ids=["kernel knows it", "older kernel"])
def test_memory_that_may_be_huge_is_allocated_through_its_mapping(monkeypatch, tmp_path, known):
    """There pages are as large as the mapping asks for."""
    offered = tmp_path / "shmem_enabled"
    offered.write_text("always within_size [advise] never deny force\n")
    monkeypatch.setattr(memory_module, "_HUGE_PAGES", offered)
    if not known:
        monkeypatch.setattr(memory_module, "_MADV_POPULATE_WRITE", 9999)
    made = KVMemory.create(5_000_001)
    assert resident(made) == known  # before anybody has touched it
    assert made.buffer.tobytes() == bytes(5_000_001)
    assert os.fstat(made._fd).st_blocks * 512 >= 5_000_001
    with pytest.raises(PermissionError):
        os.ftruncate(made._fd, 0)
    made.close()


def resident(memory: KVMemory) -> bool:
    """Whether all its pages are mapped."""
    wanted, found = f"{memory.address:x}-", 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(wanted):
                found = next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    return found * 1024 >= memory.nbytes


@pytest.mark.skipif(not may_be_huge(), reason="this kernel gives shared memory no huge pages")
def test_memory_is_huge_where_the_kernel_gives_huge_pages():
    made = KVMemory.create(8 << 20)
    with open("/proc/self/smaps") as smaps:
        text = smaps.read().partition(f"{made.address:x}-")[2]
    assert int(text.partition("ShmemPmdMapped:")[2].split()[0]) >= 4 << 10
    made.close()


def test_the_read_only_descriptor_shows_the_same_bytes_and_refuses_writing(memory):
    fd = memory.read_only_fd()
    memory.buffer[:5] = b"block"
    assert os.pread(fd, 5, 0) == b"block"
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_not_even_a_peer_that_reopens_the_descriptor_can_write(memory):
    """The seals belong to the memory, so that the owner's uid does not help."""
    fd = memory.read_only_fd()
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 0)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(again, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(again, 1 << 20)
    os.close(again)
    os.close(fd)


def test_more_memory_than_there_is_names_needed_and_available():
    before = open_files()
    with pytest.raises(TransportError, match=rf"^KV memory of {1 << 60} bytes: \d+ are available$"):
        KVMemory.create(1 << 60)
    with pytest.raises(TransportError):
        KVMemory.create(0)
    assert not left_open(before)


@pytest.mark.parametrize(
    "refused", [(os, "memfd_create"), (os, "posix_fallocate"), (mmap, "mmap"), (fcntl, "fcntl")]
)
def test_a_kernel_that_refuses_is_a_transport_error(monkeypatch, refused):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    before = open_files()
    monkeypatch.setattr(*refused, refuse)
    with pytest.raises(TransportError, match=r"4096 bytes: .*not permitted"):
        KVMemory.create(4096)
    assert not left_open(before)


def test_closing_keeps_the_pages_for_whoever_holds_them(memory):
    view = memory.buffer
    memory.close()
    memory.close()
    view[:5] = b"still"
    assert bytes(view[:5]) == b"still"
    with pytest.raises(TransportError):
        memory.read_only_fd()


def test_the_mapping_goes_with_its_last_holder():
    before = open_files()
    memory = KVMemory.create(4096)
    gone = weakref.ref(memory._mapping)
    view = memory.buffer
    memory.close()
    del memory
    assert gone() is not None
    del view
    assert gone() is None
    assert not left_open(before)


def test_memory_that_is_dropped_leaves_nothing_once_its_bytes_are_not_used():
    before = open_files()
    memory = KVMemory.create(5_000)
    view = memory.buffer
    del memory
    view[4_999] = 7
    assert view[4_999] == 7
    assert (open_files() - before).total() == 1, "the mapping has one of its own"
    del view
    assert not left_open(before)


def test_a_descriptor_is_closed_once_though_many_threads_close_at_once():
    """A second close would end another thread's file of the same number."""
    for _ in range(50):
        memory, ready = KVMemory.create(4_096), Barrier(4)

        def close(memory=memory, ready=ready):
            ready.wait()
            memory.close()

        with ThreadPoolExecutor(4) as threads:
            for ended in [threads.submit(close) for _ in range(4)]:
                ended.result()
