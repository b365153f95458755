"""Named POSIX shared memory: creating, opening, owning and recognising segments.

A segment belongs to one process (its ``Identity``) and one epoch; both stand in its header
and the epoch in its name, so a segment of a dead run can be told from a living one's and
removing one by name never hits its successor.  Only segments of the own uid are opened.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import mmap
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

import posix_ipc  # type: ignore[import-not-found]  # a C module without stubs

from . import _native
from .errors import (
    CorruptSegment,
    SegmentError,
    SegmentExists,
    SegmentNotFound,
    SegmentNotReady,
    SegmentTooSmall,
    VersionMismatch,
)
from .records import (
    LAYOUT_VERSION,
    START_TIME_OFFSET,
    VERSION_OFFSET,
)
from .terms import Epoch

SHM_DIRECTORY = Path("/dev/shm")
TABLE_KIND = "slots"
INDEX_KIND = "index"
LEASES_KIND = "leases"

_PREFIX = struct.Struct("<8sIIQQ16sQQ")
assert _PREFIX.size == START_TIME_OFFSET + 8

# -- who owns a segment


class Identity(NamedTuple):
    """One process, told apart from a later one of the same pid and from those of other boots
    and other pid namespaces, where its pid means another process or none."""

    boot_id: bytes
    """Where pid and start time mean something: a digest of the machine's boot and the pid
    namespace."""
    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat: clock ticks since boot."""


_PF_EXITING = 0x4  # linux/sched.h, field ``flags`` of /proc/<pid>/stat


@functools.cache
def _boot_id() -> bytes:
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    namespace = os.stat("/proc/self/ns/pid")
    place = b"%s %d %d" % (boot, namespace.st_dev, namespace.st_ino)
    return hashlib.blake2b(place, digest_size=16).digest()


class _Stat(NamedTuple):
    state: str
    start_time: int
    exiting: bool


def _parse_stat(stat: str) -> _Stat:
    """The command name may hold blanks and brackets."""
    fields = stat[stat.rindex(")") + 1 :].split()
    return _Stat(fields[0], int(fields[19]), bool(int(fields[6]) & _PF_EXITING))


def _read_stat(pid: int) -> _Stat:
    try:
        return _parse_stat(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace"))
    except FileNotFoundError as exc:
        raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from exc


def identity_of(pid: int | None = None) -> Identity:
    """Return the identity of process ``pid`` (default: this one).

    Raises ProcessLookupError if there is no such process.
    """
    pid = os.getpid() if pid is None else pid
    return Identity(_boot_id(), pid, _read_stat(pid).start_time)


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process is known to run still (a zombie does not).

    Nothing is known of a process in another pid namespace: ask ``is_dead`` before taking
    anything away from it.
    """
    return identity.boot_id == _boot_id() and _runs(identity)


def is_dead(identity: Identity) -> bool:
    """Whether this process is known to have ended.

    Not so in another pid namespace (a container with the same /dev/shm): it may well run.
    Nor after another boot, of which shared memory holds nothing.
    """
    return identity.boot_id == _boot_id() and not _runs(identity)


def is_exiting(identity: Identity) -> bool:
    """As ``is_dead``, but also if it is ending: its files and memory may have gone already."""
    if identity.boot_id != _boot_id():
        return False
    try:
        stat = _read_stat(identity.pid)
    except ProcessLookupError:
        return True
    return stat.exiting or stat.start_time != identity.start_time


def _runs(identity: Identity) -> bool:
    try:
        stat = _read_stat(identity.pid)
    except ProcessLookupError:
        return False
    return stat.start_time == identity.start_time and stat.state not in "ZXx"


# -- names

_WORD = re.compile(r"[A-Za-z0-9_-]+")
_ENGINE = re.compile(r"[A-Za-z0-9_.-]+")
_NAME = re.compile(
    r"kvshm\.(?P<namespace>[A-Za-z0-9_-]+)\.(?P<kind>[a-z]+)(?P<revision>[1-9][0-9]*)?"
    r"\.(?P<engine>[A-Za-z0-9_.-]+)\.(?P<epoch>[0-9a-f]{16})"
)


class SegmentName(NamedTuple):
    """The parts of a segment's name; ``str()`` puts them together."""

    namespace: str
    kind: str
    engine: str
    epoch: Epoch
    revision: int = 0

    def __str__(self) -> str:
        return segment_name(self.namespace, self.kind, self.engine, self.epoch, self.revision)


def segment_name(
    namespace: str, kind: str, engine: str | int, epoch: int, revision: int = 0
) -> str:
    """Return ``kvshm.<namespace>.<kind>[revision].<engine>.<epoch>``.

    ValueError if a part holds a character that has no place in a file name or would make
    the name ambiguous.
    """
    if not _WORD.fullmatch(namespace):
        raise ValueError(f"namespace {namespace!r} may hold letters, digits, '_' and '-' only")
    if not _ENGINE.fullmatch(str(engine)):
        raise ValueError(f"engine name {engine!r} may hold letters, digits, '_', '-', '.' only")
    name = f"kvshm.{namespace}.{kind}{revision or ''}.{engine}.{epoch:016x}"
    if len(name) > 254 or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no usable segment name")
    return name


def _path(name: str) -> str:
    """The name as the system wants it.  ValueError if it names no file of the directory: it
    may come from a message, and posix_ipc crashes on a zero in it."""
    if "\0" in name or "/" in name:
        raise ValueError(f"{name!r} holds a character that has no place in a name")
    return "/" + name


def parse_segment_name(name: str) -> SegmentName | None:
    """Return the parts of a segment's name, None if it is not one of kvshm's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return SegmentName(
        match["namespace"],
        match["kind"],
        match["engine"],
        Epoch(int(match["epoch"], 16)),
        int(match["revision"] or 0),
    )


def list_segments(namespace: str | None = None) -> list[SegmentName]:
    """Return kvshm's segments in shared memory, sorted; of one namespace or of all.

    Another process may create or remove some at any time.
    """
    parsed = map(parse_segment_name, os.listdir(SHM_DIRECTORY))
    return sorted(s for s in parsed if s and namespace in (None, s.namespace))


# -- segments


def unlink(name: str) -> None:
    """Remove the name; mappings stay valid.  Nothing happens if it is gone already.

    ValueError for what cannot be a name."""
    try:
        posix_ipc.unlink_shared_memory(_path(name))
    except posix_ipc.ExistentialError:
        return
    except posix_ipc.PermissionsError as exc:
        raise SegmentError(f"{name} may not be removed: it belongs to another user") from exc


def _reserve(fd: int, name: str, nbytes: int) -> None:
    """Give the segment its pages now: a full /dev/shm is an error here, not a SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise SegmentError(f"{name}: cannot reserve {nbytes} bytes: {exc}") from exc
        stat = os.fstatvfs(fd)
        raise SegmentTooSmall(
            f"{name} needs {nbytes} bytes, {SHM_DIRECTORY} has {stat.f_bavail * stat.f_frsize} "
            f"available; enlarge {SHM_DIRECTORY} (docker: --shm-size) or use fewer blocks"
        ) from exc


def _check_owner(fd: int, name: str) -> int:
    """Return the size of an opened segment if it is the own user's."""
    stat = os.fstat(fd)
    if stat.st_uid != os.geteuid():
        raise SegmentError(
            f"{name} belongs to uid {stat.st_uid}, this process runs as uid {os.geteuid()}; "
            "engines share only within one user"
        )
    return stat.st_size


class Segment:
    """One mapped segment.  ``buffer`` is the whole of it; ``close`` unmaps."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self.name = name
        self._mapping: mmap.mmap | None = mapping
        self._buffer: memoryview | None = memoryview(mapping)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Create a zeroed segment of mode 0600.

        Raises SegmentExists, or SegmentTooSmall with needed and available bytes; nothing is
        left behind then.
        """
        try:
            memory = posix_ipc.SharedMemory(_path(name), posix_ipc.O_CREX, mode=0o600)
        except posix_ipc.ExistentialError as exc:
            raise SegmentExists(f"{name} exists already") from exc
        except (OSError, ValueError, posix_ipc.Error) as exc:
            raise SegmentError(f"{name} cannot be created: {exc}") from exc
        try:
            _reserve(memory.fd, name, nbytes)
            return cls(name, mmap.mmap(memory.fd, nbytes))
        except BaseException:
            unlink(name)
            raise
        finally:
            memory.close_fd()

    @classmethod
    def open(cls, name: str, writable: bool) -> Segment:
        """Map an existing segment of the own user.

        Raises SegmentNotFound, SegmentNotReady (not sized yet) or SegmentError.
        """
        try:
            memory = posix_ipc.SharedMemory(_path(name), read_only=not writable)
        except posix_ipc.ExistentialError as exc:
            raise SegmentNotFound(f"{name} does not exist: its owner has gone") from exc
        except posix_ipc.PermissionsError as exc:
            raise SegmentError(f"{name} belongs to another user; run both as one user") from exc
        except (OSError, ValueError, posix_ipc.Error) as exc:
            raise SegmentError(f"{name} cannot be opened: {exc}") from exc
        try:
            nbytes = _check_owner(memory.fd, name)
            if nbytes < _PREFIX.size:
                raise SegmentNotReady(f"{name} has {nbytes} bytes: its owner is still creating it")
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return cls(name, mmap.mmap(memory.fd, nbytes, prot=prot))
        finally:
            memory.close_fd()

    @property
    def buffer(self) -> memoryview:
        """The whole mapping.  Raises SegmentError after ``close``."""
        if self._buffer is None:
            raise SegmentError(f"{self.name} is closed")
        return self._buffer

    @property
    def closed(self) -> bool:
        return self._buffer is None

    def close(self) -> None:
        """Unmap; idempotent.  While somebody still holds a view (a native call under way in
        another thread), the mapping stays until the last such view is gone."""
        buffer, mapping = self._buffer, self._mapping
        self._buffer = self._mapping = None
        if buffer is None or mapping is None:
            return
        try:
            buffer.release()
            mapping.close()
        except BufferError:
            return

    def unlink(self) -> None:
        """Remove the name; idempotent, and the mapping stays valid."""
        unlink(self.name)

    def __repr__(self) -> str:
        size = "closed" if self._buffer is None else f"{self._buffer.nbytes} bytes"
        return f"<Segment {self.name} [{size}]>"


# -- the header that all segments begin with


class Header(NamedTuple):
    """What every segment says of itself."""

    magic: bytes
    header_bytes: int
    epoch: Epoch
    identity: Identity


def write_header(
    segment: Segment, magic: bytes, header_bytes: int, epoch: int, identity: Identity
) -> None:
    """Fill the common prefix and make the segment valid for openers.

    Call it last, when everything else is written: the layout version goes in at the end,
    with release order.
    """
    buffer = segment.buffer
    _PREFIX.pack_into(buffer, 0, magic, 0, header_bytes, buffer.nbytes, epoch, *identity)
    # SYNC POINT: from here on openers take the segment for complete
    _native.mark_ready(buffer, LAYOUT_VERSION)


def check_header(
    segment: Segment, magic: bytes | None = None, *, any_layout: bool = False
) -> Header:
    """Return the header of an opened segment (``magic`` None: of any kind).

    With ``any_layout`` the rest of the segment may be another version's: what the header
    holds lies at the same place in all of them.

    Raises SegmentNotReady, VersionMismatch or CorruptSegment.
    """
    name, buffer = segment.name, segment.buffer
    # acquire: the rest of the header is read after the version that vouches for it
    version = _native.load(buffer, VERSION_OFFSET) & 0xFFFFFFFF
    found, _, header_bytes, nbytes, epoch, *identity = _PREFIX.unpack_from(buffer, 0)
    if version == 0:
        raise SegmentNotReady(f"{name} is not filled yet by its owner")
    if not found.startswith(b"KVSHM") or (magic is not None and found != magic):
        raise CorruptSegment(f"{name} begins with {found!r}, wanted {magic or b'KVSHM...'!r}")
    if version != LAYOUT_VERSION and not any_layout:
        message = f"{name} has layout {version}, this kvshm reads {LAYOUT_VERSION}"
        raise VersionMismatch(message, version, LAYOUT_VERSION)
    if nbytes != buffer.nbytes or not _PREFIX.size <= header_bytes <= nbytes:
        raise CorruptSegment(
            f"{name} states {nbytes} bytes with a header of {header_bytes}, has {buffer.nbytes}"
        )
    return Header(found, header_bytes, Epoch(epoch), Identity(*identity))


def owner_of(name: str) -> Identity:
    """Return who created the segment, of whatever kind and layout; mapped read-only for the
    moment.

    Raises what ``Segment.open`` and ``check_header`` raise.
    """
    segment = Segment.open(name, writable=False)
    try:
        return check_header(segment, any_layout=True).identity
    finally:
        segment.close()
