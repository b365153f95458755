"""A peer of the same user whose descriptors are not what they should be: nothing of it is mapped,
for to read what has been cut off ends the process that reads (SIGBUS)."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvshm._shm.descriptors import Reply
from kvshm._shm.fd_server import FdServer
from kvshm._shm.fds import close_all
from kvshm.errors import TransportError
from kvshm.interfaces import MemoryDescriptor, Region
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport

SIZE = 64 << 10
REGIONS = [Region(0, 4096, 4096, SIZE // 4096)]
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memfd(*, sealed: bool, allocated: int) -> int:
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    if allocated:
        os.posix_fallocate(fd, 0, allocated)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def honest() -> list[int]:
    return [memfd(sealed=True, allocated=SIZE)]


def unsealed() -> list[int]:
    return [memfd(sealed=False, allocated=SIZE)]


def sparse() -> list[int]:
    return [memfd(sealed=True, allocated=4096)]


def of_a_disk() -> list[int]:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(SIZE))
        file.flush()
        return [os.dup(file.fileno())]


def too_many() -> list[int]:
    return [memfd(sealed=True, allocated=SIZE) for _ in range(100)]


@pytest.mark.parametrize(
    ("gift", "reason"),
    [
        (honest, None),
        (unsealed, "not sealed"),
        (sparse, "only 4096 of them exist"),
        (of_a_disk, "not sealed"),
        (too_many, "100 descriptors, its regions lie in 1"),
        (list, "0 descriptors"),
    ],
)
def test_only_memory_that_stays_and_is_stated_is_mapped(
    run_dir: Path, gift: Callable[[], list[int]], reason: str | None
) -> None:
    memory = KVMemory.create(SIZE)
    own = PosixShmTransport(memory, REGIONS, 0, run_dir / "own")
    given = gift()
    answer = msgspec.msgpack.encode(Reply(True))
    server = FdServer(run_dir / "liar", lambda request: (answer, given))
    before = len(os.listdir("/proc/self/fd"))
    described = MemoryDescriptor(
        "posix_shm", 1, 0, REGIONS, msgspec.msgpack.encode({"socket": "liar"})
    )
    if reason is None:
        own.attach(described).close()
    else:
        with pytest.raises(TransportError, match=reason):
            own.attach(described)
    server.close()
    assert len(os.listdir("/proc/self/fd")) <= before, "none of them is kept"
    close_all(given)
    own.close()
    memory.close()
