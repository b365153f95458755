"""A forked child of an engine that imports over posix_shm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from kvshm.transport.memory import KVMemory
from kvshm.transport.posix_shm import PosixShmTransport

from ..waiting import until
from .test_posix_shm import ATTACHES, BLOCK, COUNT, REGIONS

pytestmark = pytest.mark.multiprocess

FORKING = (
    ATTACHES
    + """
read_only = lambda: sum("r--s" in line for line in open("/proc/self/maps") if "kvshm-kv" in line)
before = read_only()
if os.fork() == 0:
    print(before, read_only(), flush=True)
    signal.pause()
sys.stdin.readline()
transport.close()
os.wait()
"""
)


def test_a_forked_child_of_an_importer_keeps_no_memory_of_a_peers(run_dir):
    """Else it would keep an exporter that sleeps from giving its memory back."""
    memory = KVMemory.create(BLOCK * COUNT)
    exporter = PosixShmTransport(memory, REGIONS, 0, f"{run_dir}/exporter")
    packed = msgspec.msgpack.encode(exporter.export(1)).hex()
    command = [sys.executable, "-c", FORKING, packed, f"{run_dir}/importer"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, process_group=0, **pipes) as importer:
        try:
            assert importer.stdout.readline() == "1 0\n"
            mapped = exporter.withdraw()
            assert mapped() == 1
            importer.stdin.write("\n")
            importer.stdin.flush()
            until(lambda: mapped() == 0)
            assert importer.poll() is None, "it waits for its child, which is alive"
        finally:
            os.killpg(importer.pid, signal.SIGKILL)
    exporter.close()
    memory.close()
