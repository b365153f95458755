"""What one process's death does to others under MPS, whose clients share one server.

    python benchmarks/gpu_mps.py

NVIDIA documents that a client's fault, or its end with work under way, may take all clients of the
GPU down; then one engine's crash is everybody's.  Starts an MPS control daemon of its own, with a
pipe in a folder of its own, and ends it.  Prints one line of JSON per experiment; skipped by name
where nvidia-cuda-mps-control is not installed.  Ends with 1 if a byte was wrong, or if MPS did not
begin: what a death does is a result.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import gpu_peer
from gpu_memory import no_gpu
from gpu_peer import GpuPeer, PeerError
from gpu_sizes import sized
from measurement import report

CONTROL = "nvidia-cuda-mps-control"
SHAPE = {"layers": 16, "blocks": sized(256, 16), "block_bytes": 65536}
BLOCKS = list(range(SHAPE["blocks"]))
LISTS = {"source": BLOCKS, "target": BLOCKS}
CALL_TIMEOUT_S = 15.0
KILLED = ("nobody", "exporter", "importer")
COPIES = sized(50, 2)
"""Begun before a kill, so that one is under way."""
_hurried = False


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    if shutil.which(CONTROL) is None:
        report("gpu mps", skipped=f"{CONTROL} is not installed")
        return 0
    gpu_peer.CALL_TIMEOUT_S = CALL_TIMEOUT_S
    signal.signal(signal.SIGTERM, hurry)
    with tempfile.TemporaryDirectory(prefix="mps-") as directory:
        try:
            with daemon(directory) as variables:
                wrong = [experiment(variables, killed) for killed in KILLED]
        except subprocess.SubprocessError as exc:
            report("gpu mps", failed=str(exc))
            return 1
    return int(any(wrong))


def hurry(*_: object) -> None:
    """End within the seconds that a step has after its limit, but not without ending the daemon."""
    global _hurried
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _hurried, gpu_peer.END_TIMEOUT_S = True, 0.0
    sys.exit(1)


@contextmanager
def daemon(directory: str) -> Iterator[dict[str, str]]:
    """An MPS daemon; the variables by which clients find it."""
    variables = {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
    environment = {**os.environ, **variables}
    try:
        subprocess.run([CONTROL, "-d"], env=environment, timeout=20, check=True)
        yield variables
    finally:
        end_daemon(environment, Path(directory, f"{CONTROL}.pid"))


def end_daemon(environment: dict[str, str], pid_file: Path) -> None:
    """Ask the daemon to end, and kill it and its servers if it does not: within 3 s if hurried."""
    servers = said(environment, "get_server_list", 1 if _hurried else 5)
    said(environment, "quit -t 1" if _hurried else "quit -t 5", 1.5 if _hurried else 10)
    time.sleep(0 if _hurried else 1)  # to end by themselves
    with suppress(OSError, ValueError):  # a daemon that has ended took its file along
        numbers = [int(pid_file.read_text()), *(int(n) for n in servers.split() if n.isdigit())]
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def said(environment: dict[str, str], command: str, seconds: float = 15) -> str:
    """What the daemon answers to a command, if it does so within some seconds."""
    try:
        ran = subprocess.run(
            [CONTROL], input=f"{command}\n", env=environment, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no answer"
    return (ran.stdout + ran.stderr).strip()


def experiment(variables: dict[str, str], killed: str) -> int:
    """Copy between two clients and kill one of them, or nobody; the wrong bytes of the copy before
    the kill."""
    with GpuPeer(environment=variables) as exporter, GpuPeer(environment=variables) as importer:
        peers = {"exporter": exporter, "importer": importer}
        wrong = 0
        try:
            wrong = share(exporter, importer)
            servers = said({**os.environ, **variables}, "get_server_list")
            for _ in range(COPIES):
                importer.call("begin", **LISTS)
            if killed in peers:
                peers.pop(killed).kill()
            found = {name: state(peer) for name, peer in peers.items()}
            report("gpu mps", killed=killed, wrong_bytes=wrong, servers=servers, others=found)
        except PeerError as exc:
            report("gpu mps", killed=killed, wrong_bytes=wrong, failed=str(exc))
        for peer in peers.values():
            peer.kill()  # it may hang in a broken context
    return wrong


def share(exporter: GpuPeer, importer: GpuPeer) -> int:
    """Copy and compare, then have the exporter at work; how many bytes were wrong."""
    exporter.call("make", seed=1, **SHAPE)
    importer.call("make", seed=2, **SHAPE)
    importer.call("attach", descriptor=exporter.call("export", epoch=1))
    importer.call("copy", **LISTS)
    wrong = int(importer.call("wrong", own=2, peer=1, peer_blocks=len(BLOCKS), **LISTS))
    exporter.call("burn", on=True)
    return wrong


def state(peer: GpuPeer) -> object:
    """Whether a process's GPU still works, at once and after 3 s; or the error that it met."""
    try:
        at_once = peer.call("healthy")
        time.sleep(3)  # an error may come late
        return [at_once, peer.call("healthy")]
    except (PeerError, OSError) as exc:
        return str(exc)


if __name__ == "__main__":
    sys.exit(main())
