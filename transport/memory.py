"""The memory of a CPU engine's KV cache: shared, without a name, fully reserved.

A memfd leaves nothing behind: its pages are freed with the last process that maps or holds it,
even after SIGKILL.  It does not count against the size of /dev/shm either.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import weakref
from contextlib import suppress
from pathlib import Path

from kvshm import _native
from kvshm._base.forks import close_in_children
from kvshm._shm.available_memory import check_available, fallocate, reserve
from kvshm._shm.fds import size_of_sealed
from kvshm.errors import SegmentError, TransportError

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; Python's fcntl has it from 3.14 on
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def may_be_huge() -> bool:
    """Whether the kernel gives huge pages to shared memory that asks for them."""
    try:
        chosen = re.search(r"\[(.*)\]", _HUGE_PAGES.read_text())
    except (OSError, ValueError):
        return False
    return chosen is not None and chosen[1] not in ("never", "deny")


def _seal(fd: int) -> None:
    """Fix the size for good, so that no mapping gets SIGBUS, and refuse writable mappings."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def map_read_only(fd: int) -> mmap.mmap:
    """Map all of a peer's KV memory; the descriptor stays the caller's.  Raises TransportError
    unless it is sealed."""
    try:
        size = size_of_sealed(fd, "the peer's KV memory")
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except SegmentError as exc:
        raise TransportError(str(exc)) from exc
    except (OSError, ValueError) as exc:
        raise TransportError(f"the peer's KV memory cannot be mapped: {exc}") from exc
    close_in_children(mapping)
    return mapping


class KVMemory:
    """One shared allocation, mapped writable only in this process.  A KV cache over ``buffer``
    (``torch.frombuffer``) keeps the mapping alive; ``close`` only ends the sharing."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._mapping = mmap.mmap(fd, nbytes)
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)  # once
        self.nbytes = nbytes

    @classmethod
    def create(cls, nbytes: int) -> KVMemory:
        """Reserve ``nbytes`` of zeroed memory, in huge pages if the kernel gives some to shared
        memory.  Raises TransportError if there is no room.  Blocks while the kernel clears the
        pages (about a second per 4 GB); call it on the thread, bound to the cores, that will use
        the memory."""
        if nbytes <= 0:
            raise TransportError(f"KV memory must have at least one byte, not {nbytes}")
        try:
            check_available(nbytes)
            fd = os.memfd_create("kvshm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, nbytes)
                memory = cls(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
            try:
                reserve(fd, nbytes, allocate=memory._allocate if may_be_huge() else fallocate)
                _seal(fd)  # after the mapping, which a seal would refuse
            except BaseException:
                memory._mapping.close()  # now: the error's traceback holds it
                memory.close()
                raise
        except OSError as exc:
            raise TransportError(f"KV memory of {nbytes} bytes: {exc.strerror}") from exc
        return memory

    def _allocate(self, fd: int, start: int, nbytes: int) -> None:
        """Through the mapping, which asks for huge pages: fallocate gives none.  Raises OSError."""
        with suppress(OSError):  # a kernel that does not know one of the requests
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self._mapping.madvise(_MADV_POPULATE_WRITE, start, nbytes)
        fallocate(fd, start, nbytes)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._mapping)

    @property
    def address(self) -> int:
        return _native.address(self._mapping)

    def read_only_fd(self) -> int:
        """Return a new descriptor that cannot be mapped writable; the caller closes it."""
        if not self._close_fd.alive:
            raise TransportError("KV memory is closed")
        try:
            # A fresh open, not a dup: the access mode belongs to the open file.
            return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise TransportError(f"KV memory cannot be opened read-only: {exc}") from exc

    def close(self) -> None:
        """Close the descriptor, as happens by itself when this is dropped.  Idempotent; any thread.
        The pages stay while this process or a peer has them mapped."""
        self._close_fd()
