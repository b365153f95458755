"""Sealed shared memory: creates, hands out, maps and checks segments.

A segment is a memfd, without a name: only a process that gets its descriptor can map it, its pages
are freed with the last such process, and its seals keep all, the owner included, from shrinking it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

from kvshm import _native
from kvshm._base.ids import Epoch
from kvshm.errors import (
    CorruptSegment,
    SegmentError,
    SegmentNotReady,
    SegmentTooSmall,
    VersionMismatch,
)

from .available_memory import reserve
from .fds import size_of_sealed
from .layout import LAYOUT_VERSION, PID_OFFSET, PREFIX_BYTES, VERSION_OFFSET

TABLE_KIND = "slots"
INDEX_KIND = "index"
INFO_KIND = "info"
"""The engine's entry in the roster: a message, not a segment."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PREFIX = struct.Struct("<8sIIQQQ")
assert _PREFIX.size == PID_OFFSET + 8 <= PREFIX_BYTES
_NAME_BYTES = 200  # of a memfd's name, which /proc/PID/maps shows; the kernel allows 249


class SegmentName(NamedTuple):
    """The name of a segment, for people: no segment can be opened by it."""

    namespace: str
    kind: str
    engine: str
    epoch: Epoch

    def __str__(self) -> str:
        return f"kvshm.{self.namespace}.{self.kind}.{self.engine}.{self.epoch:016x}"


def _reserve(fd: int, name: str, nbytes: int) -> None:
    """Allocate all pages now: too little memory is an error here instead of a SIGBUS later."""
    try:
        reserve(fd, nbytes)
    except OSError as exc:
        raise SegmentTooSmall(
            f"{name} needs {nbytes} bytes of shared memory: {exc.strerror}; free memory, raise "
            "the container's limit, or use fewer blocks"
        ) from exc


@contextmanager
def _closing_on_error(fd: int, failed: str) -> Iterator[None]:
    """A context: an error closes ``fd``; OSError becomes SegmentError."""
    try:
        yield
    except OSError as exc:
        os.close(fd)
        raise SegmentError(f"{failed}: {exc.strerror}") from exc
    except BaseException:
        os.close(fd)
        raise


class Segment:
    """One mapped segment; ``close`` unmaps it."""

    buffer: memoryview
    """The whole mapping.  An attribute, since each step reads it a dozen times; SegmentError once
    the segment is closed."""

    def __init__(self, name: str, fd: int, mapping: mmap.mmap) -> None:
        self.name = name
        self._fd = fd
        self._mapping: mmap.mmap | None = mapping
        self.buffer = memoryview(mapping)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Create a zeroed, sealed segment.  Raises SegmentTooSmall or SegmentError."""
        try:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            fd = os.memfd_create(name[:_NAME_BYTES], flags)
        except OSError as exc:
            raise SegmentError(f"{name} cannot be created: {exc.strerror}") from exc
        with _closing_on_error(fd, f"{name} cannot be created"):
            _reserve(fd, name, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(name, fd, mapping)

    @classmethod
    def from_fd(cls, name: str, fd: int, writable: bool, largest: int) -> Segment:
        """Map a segment of at most ``largest`` bytes from a descriptor, which the object takes
        over; an error closes it.  Raises SegmentNotReady (not filled yet) or SegmentError."""
        with _closing_on_error(fd, f"{name} cannot be mapped"):
            nbytes = size_of_sealed(fd, name, largest)
            if nbytes < PREFIX_BYTES:
                raise SegmentNotReady(f"{name} has {nbytes} bytes: its owner is creating it")
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapping = mmap.mmap(fd, nbytes, prot=prot)
        return cls(name, fd, mapping)

    def descriptor(self, writable: bool) -> int:
        """A new descriptor of the segment; the caller closes it.  Raises SegmentError."""
        if self._fd < 0:
            raise SegmentError(f"{self.name} is closed")
        try:
            # Opened again, not duplicated: a duplicate would have the access mode of the original.
            flags = os.O_RDWR if writable else os.O_RDONLY
            return os.open(f"/proc/self/fd/{self._fd}", flags | os.O_CLOEXEC)
        except OSError as exc:
            raise SegmentError(f"{self.name} cannot be handed on: {exc.strerror}") from exc

    def detach(self) -> int:
        """Prepare for the end of a segment that others may still read: return its descriptor, which
        the caller closes after the last reference to this object is gone.  Freeing a large mapping
        holds the GIL for milliseconds, and if no descriptor is left, for many: so its pages are
        unmapped here, and its memory is freed by that ``os.close``, both without the GIL."""
        fd, self._fd = self._fd, -1
        with suppress(OSError):  # then freeing it takes longer
            _native.unmap_pages(self.buffer)
        return fd

    def close_descriptor(self) -> Segment:
        """Close the descriptor of a mapped segment that will not be handed out.  Returns self."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return self

    def __getattr__(self, name: str) -> NoReturn:
        """For what is not there: the buffer, once the segment is closed."""
        if name == "buffer":
            raise SegmentError(f"{self.name} is closed")
        raise AttributeError(f"Segment has no attribute {name!r}", name=name, obj=self)

    @property
    def closed(self) -> bool:
        return "buffer" not in self.__dict__

    def close(self) -> None:
        """Unmap, once no other thread holds a view.  Idempotent."""
        self.close_descriptor()
        buffer, mapping = self.__dict__.pop("buffer", None), self._mapping
        self._mapping = None
        if buffer is None or mapping is None:
            return
        with suppress(BufferError):
            buffer.release()
            mapping.close()

    def __del__(self) -> None:
        self.close_descriptor()

    def __repr__(self) -> str:
        size = "closed" if self.closed else f"{self.buffer.nbytes} bytes"
        return f"<Segment {self.name} [{size}]>"


def sealed_message(name: str, message: bytes) -> int:
    """Return a descriptor of sealed memory that holds a message; the caller closes it.  Raises
    SegmentError."""
    segment = Segment.create(name, len(message))
    try:
        segment.buffer[:] = message
        return segment.descriptor(writable=False)
    finally:
        segment.close()


def read_message(name: str, fd: int, largest: int) -> bytes:
    """Return what ``sealed_message`` holds, of ``largest`` bytes at most.  Closes ``fd``.  Raises
    SegmentError."""
    segment = Segment.from_fd(name, fd, False, largest)
    try:
        return bytes(segment.buffer)
    finally:
        segment.close()


# -- the header that all segments begin with


class Header(NamedTuple):
    """The fields that all segments begin with."""

    magic: bytes
    header_bytes: int
    epoch: Epoch
    pid: int
    """The owner's pid as the owner sees it: for people, since pid namespaces may differ."""


def write_header(segment: Segment, header: Header) -> None:
    """Fill the common prefix and make the segment valid: the last write, with release order."""
    buffer, (magic, header_bytes, epoch, pid) = segment.buffer, header
    _PREFIX.pack_into(buffer, 0, magic, 0, header_bytes, buffer.nbytes, epoch, pid)
    # SYNC POINT: from here on other processes treat the segment as complete
    _native.mark_ready(buffer, LAYOUT_VERSION)


def check_header(segment: Segment, magic: bytes) -> Header:
    """Return a segment's header.  Raises SegmentNotReady, VersionMismatch or CorruptSegment."""
    name, buffer = segment.name, segment.buffer
    # acquire: the rest of the header is read after the version, which was written last
    version = _native.load(buffer, VERSION_OFFSET) & 0xFFFFFFFF
    found, _, header_bytes, nbytes, epoch, pid = _PREFIX.unpack_from(buffer, 0)
    if version == 0:
        raise SegmentNotReady(f"{name} is not filled yet by its owner")
    if found != magic:
        raise CorruptSegment(f"{name} begins with {found!r}, wanted {magic!r}")
    if version != LAYOUT_VERSION:
        message = f"{name} has layout {version}, this kvshm reads {LAYOUT_VERSION}"
        raise VersionMismatch(message, version, LAYOUT_VERSION)
    if nbytes != buffer.nbytes or not PREFIX_BYTES <= header_bytes <= nbytes:
        raise CorruptSegment(
            f"{name} states {nbytes} bytes with a header of {header_bytes}, has {buffer.nbytes}"
        )
    return Header(found, header_bytes, Epoch(epoch), pid)
