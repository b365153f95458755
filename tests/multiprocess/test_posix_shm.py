"""posix_shm between real processes, some of which die."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvshm._shm.descriptors import MEMORY_KIND, Reply, Request
from kvshm._shm.fds import fetch
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor, Region
from kvshm.transport import posix_shm
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport

from ..descriptors import left_open, open_files

pytestmark = pytest.mark.multiprocess

PATIENCE = 60.0
BLOCK, COUNT = 16 << 10, 512
REGIONS = [Region(0, BLOCK, BLOCK, COUNT)]
SEED = 20

EXPORTER = """
import random, sys
import msgspec
from kvshm.interfaces import Region
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport

path, block, count, seed = sys.argv[1], *map(int, sys.argv[2:])
memory = KVMemory.create(block * count)
memory.buffer[:] = random.Random(seed).randbytes(block * count)
transport = PosixShmTransport(memory, [Region(0, block, block, count)], 0, path)
for line in sys.stdin:
    print(msgspec.msgpack.encode(transport.export(int(line))).hex(), flush=True)
transport.close()
print("unchanged" if memory.buffer == random.Random(seed).randbytes(block * count) else "CHANGED")
"""

ATTACHES = """
import gc, os, signal, sys, threading, time
import msgspec
from kvshm.interfaces import CopyState, MemoryDescriptor
from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport

descriptor = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=MemoryDescriptor)
region = descriptor.regions[0]
memory = KVMemory.create(region.num_blocks * region.stride)
transport = PosixShmTransport(memory, [region], 0, sys.argv[2])
attachment = transport.attach(descriptor)
"""

IMPORTER = (
    ATTACHES
    + """
blocks = list(range(region.num_blocks))
while True:
    copy = attachment.begin_copy(blocks, blocks[::-1])
    while copy.poll() is CopyState.PENDING:
        time.sleep(0.0005)
    print(copy.poll().name, *transport.checksum([0, 1, 2]), flush=True)
"""
)


FORGETFUL = (
    ATTACHES
    + """
copier, gate = transport.copier, threading.Event()
copier.submit(lambda: gate.wait(60) and None)
blocks = list(range(region.num_blocks))
copy = attachment.begin_copy(blocks, blocks)
del memory, transport, attachment
gc.collect()
gate.set()
copier.submit(lambda: print(copy.poll().name, flush=True))
done = threading.Event()
copier.submit(done.set)
assert done.wait(60)
"""
)


class Exporter:
    def __init__(self, path: str, seed: int = SEED) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, path, str(BLOCK), str(COUNT), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def export(self, epoch: int) -> MemoryDescriptor:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(epoch, file=self.process.stdin, flush=True)
        packed = bytes.fromhex(self.process.stdout.readline())
        return msgspec.msgpack.decode(packed, type=MemoryDescriptor)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> str:
        return self.process.communicate(timeout=PATIENCE)[0].strip()


@pytest.fixture
def exporter(run_dir: Path) -> Iterator[Exporter]:
    started = Exporter(f"{run_dir}/exporter")
    yield started
    with started.process as process:
        process.kill()


@pytest.fixture
def importer(run_dir: Path) -> Iterator[PosixShmTransport]:
    memory = KVMemory.create(BLOCK * COUNT)
    transport = PosixShmTransport(memory, REGIONS, 0, f"{run_dir}/importer")
    yield transport
    transport.close()
    memory.close()


def exported_bytes(seed: int = SEED) -> bytes:
    return random.Random(seed).randbytes(BLOCK * COUNT)


def finish(copy) -> CopyState:
    deadline = time.monotonic() + PATIENCE
    while copy.poll() is CopyState.PENDING:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return copy.poll()


OF_OTHERS: set[str] = set()
"""Inodes of KV memories that earlier tests of this process have left mapped."""


@pytest.fixture(autouse=True)
def others() -> None:
    gc.collect()
    OF_OTHERS.clear()
    OF_OTHERS.update(inode for inode, _ in _mapped())


def _mapped() -> list[tuple[str, str]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    fields = [line.split() for line in lines if "memfd:kvshm-kv" in line]
    return [(field[4], field[1]) for field in fields]


def kv_mappings() -> list[str]:
    return sorted(permissions for inode, permissions in _mapped() if inode not in OF_OTHERS)


def test_a_peers_memory_is_mapped_read_only(exporter, importer):
    attachment = importer.attach(exporter.export(1))
    assert kv_mappings() == ["r--s", "rw-s"]
    attachment.close()


def test_memory_goes_with_a_closed_transport_and_not_with_some_later_collection(exporter, run_dir):
    memory = KVMemory.create(BLOCK * COUNT)
    transport = PosixShmTransport(memory, REGIONS, 0, f"{run_dir}/importer")
    transport.export(7)
    attachment = transport.attach(exporter.export(1))
    assert finish(attachment.begin_copy([0], [0])) is CopyState.DONE
    transport.close()
    memory.close()
    gc.disable()
    try:
        del memory, transport, attachment
        assert kv_mappings() == []
    finally:
        gc.enable()


def test_the_owner_killed_under_a_copy_takes_nothing_with_it(exporter, importer, run_dir):
    descriptor = exporter.export(1)
    attachment = importer.attach(descriptor)
    mapped = Path(f"/proc/{exporter.process.pid}/maps").read_text()
    assert "/memfd:" in mapped
    assert "/dev/shm/" not in mapped  # nothing of it has a name that could be left behind
    gate = threading.Event()
    importer.copier.submit(lambda: gate.wait(PATIENCE) and None)
    blocks = list(range(COUNT))
    copy = attachment.begin_copy(blocks, blocks)
    exporter.kill()
    gate.set()
    assert finish(copy) is CopyState.DONE
    assert importer.memory[0].buffer == exported_bytes()
    with pytest.raises(TransportError, match="has died"):
        importer.attach(descriptor)
    attachment.close()


def test_the_end_of_the_owner_is_noticed_and_its_memory_stays(exporter, importer):
    """No one tells: the open connection does."""
    attachment = importer.attach(exporter.export(1))
    assert not attachment.ended
    exporter.export(2)
    assert not attachment.ended, "another epoch is no end of the process: the life word tells"
    exporter.kill()
    assert attachment.ended
    assert finish(attachment.begin_copy([1], [2])) is CopyState.DONE
    wanted = exported_bytes()[BLOCK : 2 * BLOCK]
    assert bytes(importer.memory[0].buffer[2 * BLOCK : 3 * BLOCK]) == wanted
    attachment.close()


def test_a_stopped_owner_costs_an_attach_its_timeout_and_copies_nothing(
    exporter, importer, monkeypatch
):
    descriptor = exporter.export(1)
    attachment = importer.attach(descriptor)
    monkeypatch.setattr(posix_shm, "MEMORY_SECONDS", 0.1)
    os.kill(exporter.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, exporter.process.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(TransportError, match="no answer within"):
        importer.attach(descriptor)
    assert finish(attachment.begin_copy([0], [1])) is CopyState.DONE
    assert importer.memory[0].buffer[BLOCK : 2 * BLOCK] == exported_bytes()[:BLOCK]


def test_a_closed_attachment_is_unmapped_after_its_copies_and_leaks_nothing(exporter, importer):
    descriptor = exporter.export(1)
    before = open_files()
    for _ in range(10):
        attachment = importer.attach(descriptor)
        copy = attachment.begin_copy([0, 1], [2, 3])
        attachment.close()
        assert finish(copy) is CopyState.DONE
    drained = threading.Event()
    importer.copier.submit(drained.set)
    assert drained.wait(PATIENCE)
    assert "r--s" not in kv_mappings()
    assert not left_open(before)


def test_a_copy_needs_no_one_to_hold_its_memory(exporter, run_dir):
    packed = msgspec.msgpack.encode(exporter.export(1)).hex()
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, packed, f"{run_dir}/importer"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "DONE\n", "")


def socket_of(descriptor, run_dir):
    return f"{run_dir}/{msgspec.msgpack.decode(descriptor.details)['socket']}"


def test_another_epochs_request_is_answered_without_descriptors(exporter, run_dir):
    descriptor = exporter.export(1)
    request = msgspec.msgpack.encode({"kind": "memory", "epoch": 2})
    reply, fds = fetch(socket_of(descriptor, run_dir), request, PATIENCE)
    assert fds == []
    assert "serves epoch" in msgspec.msgpack.decode(reply, type=Reply).reason


def test_a_withdrawn_memory_is_not_handed_out_for_epoch_0(run_dir: str) -> None:
    """Which is what the exporter serves then."""
    memory = KVMemory.create(BLOCK * COUNT)
    own = PosixShmTransport(memory, REGIONS, 0, f"{run_dir}/withdrawn")
    descriptor = own.export(1)
    own.withdraw()
    reply, fds = fetch(socket_of(descriptor, run_dir), Request(MEMORY_KIND, 0).encode(), PATIENCE)
    assert (msgspec.msgpack.decode(reply, type=Reply).found, fds) == (False, [])
    own.close()
    memory.close()


@pytest.mark.parametrize("details", [{}, {"socket": 7}, {"socket": "/nonexistent"}])
def test_a_descriptor_that_leads_nowhere_is_refused(importer, details):
    details = msgspec.msgpack.encode(details)
    with pytest.raises(TransportError):
        importer.attach(MemoryDescriptor("posix_shm", 1, 0, REGIONS, details))
    with pytest.raises(TransportError):
        importer.attach(MemoryDescriptor("cuda_ipc", 1, 0, REGIONS, details))
