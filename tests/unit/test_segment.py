"""kvshm._shm.segment: sealed memory, who may do what with it, and what is not mapped."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshm._shm import segment as segments
from kvshm._shm.fds import size_of_sealed
from kvshm._shm.layout import (
    LAYOUT_VERSION,
    PREFIX_BYTES,
    SEGMENT_BYTES_OFFSET,
    TABLE_MAGIC,
    VERSION_OFFSET,
)
from kvshm._shm.segment import Header, Segment, SegmentName
from kvshm.errors import (
    CorruptSegment,
    SegmentError,
    SegmentNotReady,
    SegmentTooSmall,
    VersionMismatch,
)

from ..descriptors import left_open, open_files

NBYTES = 16384
EPOCH = 0xABCDEF0123456789
NAME = str(SegmentName("ns", "slots", "e", EPOCH))
HEADER = Header(TABLE_MAGIC, 8192, EPOCH, 77)


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(NAME, NBYTES)
    yield segment
    segment.close()


def mapped(segment: Segment, writable: bool = True, largest: int = NBYTES) -> Segment:
    return Segment.from_fd("theirs", segment.descriptor(writable), writable, largest)


# -- made


def test_a_new_segment_is_zeroed_and_has_its_pages(segment: Segment) -> None:
    fd = segment.descriptor(False)
    status = os.fstat(fd)
    os.close(fd)
    assert status.st_size == NBYTES
    assert status.st_blocks * 512 >= NBYTES, "pages are reserved, not promised"
    assert bytes(segment.buffer) == bytes(NBYTES)


def test_people_see_whose_memory_it_is_and_no_directory_has_it(segment: Segment) -> None:
    assert NAME == "kvshm.ns.slots.e.abcdef0123456789"
    maps = Path("/proc/self/maps").read_text()
    assert f"/memfd:{NAME} (deleted)" in maps
    assert not list(Path("/dev/shm").glob(f"*{NAME}*"))


def test_a_name_may_be_of_any_length() -> None:
    long = Segment.create("kvshm." + "n" * 400, NBYTES)
    assert f"/memfd:kvshm.{'n' * 194} (deleted)" in Path("/proc/self/maps").read_text()
    long.close()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may be large: who asks the kernel for the memory after all is
    refused, instead of having it end some process of this machine for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize(
    ("nbytes", "why"), [(1 << 45, r"\d+ are available"), (1 << 21, "File too large")]
)
def test_no_room_is_an_error_that_says_what_to_do_and_keeps_nothing(nbytes: int, why: str) -> None:
    before = open_files()
    with pytest.raises(SegmentTooSmall, match=f"{NAME} needs {nbytes} .*: {why}; .*fewer blocks"):
        Segment.create(NAME, nbytes)
    assert not left_open(before)


def test_without_descriptors_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(SegmentError, match=f"{NAME} cannot be created: Too many open files"):
        Segment.create(NAME, NBYTES)


# -- sealed: for its owner, too


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1])
def test_no_one_can_cut_or_stretch_it(segment: Segment, nbytes: int) -> None:
    for fd in (segment._fd, segment.descriptor(True)):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


@pytest.mark.multiprocess
def test_whoever_was_handed_it_cannot_cut_it_either(segment: Segment) -> None:
    """As an engine that is confused, or worse."""
    script = (
        "import os, sys\nfd = int(sys.argv[1])\n"
        "for cut in (lambda: os.ftruncate(fd, 0),\n"
        "            lambda: os.truncate(f'/proc/self/fd/{fd}', 0),\n"
        "            lambda: os.open(f'/proc/self/fd/{fd}', os.O_RDWR | os.O_TRUNC)):\n"
        "    try:\n        cut()\n    except PermissionError:\n        continue\n"
        "    sys.exit(3)\n"
    )
    segment.buffer[NBYTES - 1] = 7
    fd = segment.descriptor(True)
    argv = [sys.executable, "-c", script, str(fd)]
    done = subprocess.run(argv, pass_fds=[fd], timeout=200, check=False)
    os.close(fd)
    assert done.returncode == 0
    assert segment.buffer[NBYTES - 1] == 7


def test_what_one_mapping_writes_the_other_reads(segment: Segment) -> None:
    reader, writer = mapped(segment, writable=False), mapped(segment)
    writer.buffer[5000] = 7
    assert (segment.buffer[5000], reader.buffer[5000]) == (7, 7)
    reader.close()
    writer.close()


def test_who_was_given_it_to_read_cannot_write_to_it(segment: Segment) -> None:
    fd = segment.descriptor(False)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, NBYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    reader = Segment.from_fd("theirs", fd, False, NBYTES)
    with pytest.raises(TypeError, match="read-only"):
        reader.buffer[0] = 1
    reader.close()


# -- what is not mapped


def memfd(nbytes: int, *, seals: int = fcntl.F_SEAL_SHRINK, sparse: bool = False) -> int:
    fd = os.memfd_create("odd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if not sparse and nbytes:
        os.posix_fallocate(fd, 0, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def file(directory: Path) -> int:
    path = directory / "file"
    path.write_bytes(bytes(NBYTES))
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda _: memfd(NBYTES, seals=0), "cut short"),
        (lambda _: memfd(NBYTES, seals=fcntl.F_SEAL_GROW), "cut short"),
        (file, "cut short"),
        (lambda _: memfd(NBYTES, sparse=True), "only 0 of them exist"),
        (lambda _: memfd(NBYTES + 1), f"{NBYTES + 1} bytes, at most {NBYTES} were expected"),
        (lambda _: memfd(0), "its owner is creating it"),
        (lambda _: memfd(PREFIX_BYTES - 1), "its owner is creating it"),
        (lambda _: pipe(), "is not memory of uid"),
        (lambda path: os.open(path, os.O_RDONLY), "is not memory of uid"),
        (lambda _: os.open("/dev/zero", os.O_RDWR), "is not memory of uid"),
    ],
)
def test_what_may_fault_or_is_no_memory_is_not_mapped(odd, why: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # gives a descriptor
    before = open_files()
    with pytest.raises(SegmentError, match=f"theirs.*{why}"):
        Segment.from_fd("theirs", odd(tmp_path), True, NBYTES)
    assert not left_open(before), "the descriptor is closed"


def test_memory_that_grows_once_it_was_checked_is_mapped_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fd = os.memfd_create("grows", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(mmap.PAGESIZE))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def checked(*args: Any) -> int:
        size = size_of_sealed(*args)
        os.ftruncate(fd, 1 << 20)
        return size

    monkeypatch.setattr(segments, "size_of_sealed", checked)
    with closing(Segment.from_fd("grows", fd, False, mmap.PAGESIZE)) as mapped:
        assert len(mapped.buffer) == mmap.PAGESIZE


def test_another_users_memory_is_not_mapped(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_001)
    with pytest.raises(SegmentError, match="is not memory of uid 4000000001"):
        mapped(segment)


# -- handed on and closed


def test_close_may_be_called_twice_and_leaves_no_descriptor() -> None:
    before = open_files()
    segment = Segment.create(NAME, NBYTES)
    segment.close()
    segment.close()
    assert segment.closed
    assert not left_open(before)
    with pytest.raises(SegmentError, match="closed"):
        _ = segment.buffer
    with pytest.raises(SegmentError, match="closed"):
        segment.descriptor(False)


def test_what_was_mapped_and_is_not_kept_is_handed_on_no_more(segment: Segment) -> None:
    before = open_files()
    theirs = mapped(segment).close_descriptor()
    assert (open_files() - before).total() == 1, "Python's, of the mapping"
    theirs.buffer[1] = 5
    assert segment.buffer[1] == 5
    with pytest.raises(SegmentError, match="closed"):
        theirs.descriptor(False)
    theirs.close()


def test_who_forgets_to_close_it_leaves_no_descriptor() -> None:
    before = open_files()
    Segment.create(NAME, NBYTES)
    assert not left_open(before)


def test_a_view_in_use_survives_close(segment: Segment) -> None:
    in_use = segment.buffer[64:128]
    in_use[0] = 9
    segment.close()
    assert in_use[0] == 9, "the mapping stays as long as somebody holds a part of it"
    in_use.release()


def test_an_exported_buffer_survives_close(segment: Segment) -> None:
    exported = memoryview(segment.buffer)
    segment.close()
    assert exported[0] == 0
    exported.release()


def test_the_memory_stays_until_the_last_has_let_go(segment: Segment) -> None:
    theirs = mapped(segment)
    segment.buffer[10] = 3
    segment.close()
    third = mapped(theirs)
    theirs.close()
    assert third.buffer[10] == 3
    third.close()


# -- header


def test_openers_see_not_ready_until_the_version_is_written(segment: Segment) -> None:
    with pytest.raises(SegmentNotReady):
        segments.check_header(segment, TABLE_MAGIC)
    segments.write_header(segment, HEADER)
    assert segments.check_header(segment, TABLE_MAGIC) == HEADER


@pytest.mark.parametrize("other", [LAYOUT_VERSION - 1, LAYOUT_VERSION + 1])
def test_a_header_of_another_version_names_both(segment: Segment, other: int) -> None:
    segments.write_header(segment, HEADER)
    struct.pack_into("<I", segment.buffer, VERSION_OFFSET, other)
    with pytest.raises(VersionMismatch, match=f"layout {other}, this kvshm reads {LAYOUT_VERSION}"):
        segments.check_header(segment, TABLE_MAGIC)


def test_a_header_of_another_kind_is_corrupt(segment: Segment) -> None:
    segments.write_header(segment, HEADER)
    with pytest.raises(CorruptSegment, match="KVSHMIDX"):
        segments.check_header(segment, b"KVSHMIDX")


@pytest.mark.parametrize("stated", [0, NBYTES - 1, NBYTES + 1, 2**64 - 1])
def test_a_header_that_misstates_the_size_is_corrupt(segment: Segment, stated: int) -> None:
    segments.write_header(segment, HEADER)
    struct.pack_into("<Q", segment.buffer, SEGMENT_BYTES_OFFSET, stated)
    with pytest.raises(CorruptSegment, match="states"):
        segments.check_header(segment, TABLE_MAGIC)


def test_what_is_detached_is_read_on_and_freed_by_the_last_close(segment: Segment) -> None:
    """The index that a larger one replaces: lookups under way still read it."""
    segment.buffer[:8] = segment.buffer[-8:] = b"contents"
    reader, buffer = mapped(segment, writable=False), segment.buffer
    fd = segment.detach()
    assert (buffer[:8], buffer[-8:]) == (b"contents", b"contents")
    assert buffer[:8] == reader.buffer[:8]
    buffer[:8] = b"modified"
    assert reader.buffer[:8] == b"modified", "the same memory as before"
    reader.close()
    with pytest.raises(SegmentError, match="closed"):
        segment.descriptor(False)
    assert os.fstat(fd).st_size == NBYTES, "nobody else has closed it"
    os.close(fd)
    assert buffer[-8:] == b"contents"


def test_the_pages_of_what_is_detached_are_unmapped_before_its_mapping_is(segment: Segment) -> None:
    segment.buffer[:] = bytes(NBYTES)
    assert resident(segment.name) == NBYTES >> 10
    os.close(segment.detach())
    assert resident(segment.name) == 0


def resident(name: str) -> int:
    """KiB of a segment that this process has in its page tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if name in line:
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    raise AssertionError(f"{name} is not mapped")
