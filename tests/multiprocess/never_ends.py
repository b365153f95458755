"""A test that never ends: test_run_ends.py runs it by its path, in a pytest of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from . import toys
from .processes import fresh_node

ORPHAN = """
import mmap, os, sys, time
with open(sys.argv[1], "xb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
if not os.fork():
    os.setsid()
    time.sleep(1000000)
"""


def forked() -> list[int]:
    """Fork a child in another session that forks one itself; both run on, without a program of
    their own."""
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        os.fork()
        os.write(write, b"%d " % os.getpid())
        while True:
            signal.pause()
    pids: list[int] = []
    while len(pids) < 2:
        pids += map(int, os.read(read, 100).split())
    return pids


def test_it_never_ends() -> None:
    with fresh_node() as node:
        coordinator = node.coordinator()
        engines = [toys.start(node, seed, "--requests", "1000000000") for seed in (1, 2)]
        for engine in engines:
            engine.wait_out(lambda line: line == "go")
        file = f"/dev/shm/{node.namespace}"
        subprocess.run([sys.executable, "-c", ORPHAN, file], check=True)
        pids = [os.getpid(), coordinator.pid, *(engine.pid for engine in engines), *forked()]
        said = Path(os.environ["SAYS_WHO_RUNS"])
        said.with_suffix(".part").write_text(" ".join(map(str, [node.run_dir, file, *pids])))
        said.with_suffix(".part").rename(said)
        threading.Event().wait()
