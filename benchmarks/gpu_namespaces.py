"""In which namespaces two processes can share GPU memory: found out by trying.

    python benchmarks/gpu_namespaces.py [--seconds 200]

For each case, and each kind of memory, an exporter and an importer are started in namespaces as
containers have them, and the importer attaches, copies and compares every byte.  The kinds of a
case run at the same time, each in two processes of its own: an error that ends one kind's context
says nothing about the next kind.  Prints one line of JSON per case and, as they come, the rows of a
table for docs/gpu.md.  Needs root, or user namespaces; what cannot be tried is named with the
reason.  Ends with 1 if a byte was wrong: errors are results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gpu_peer
from gpu_inside import Place
from gpu_memory import no_gpu
from gpu_node import shared_directory
from gpu_peer import GpuPeer, PeerError
from measurement import report

PROGRAM = str(Path(__file__).with_name("gpu_inside.py"))
KINDS = {
    "caching": "cudaMalloc, IPC handle", "fd": "VMM, descriptor", "fabric": "VMM, fabric handle",
}  # fmt: skip
BLOCKS = 64
LISTS = {"source": [9, 3, 12], "target": [0, 7, 2]}
CALL_TIMEOUT_S, END_TIMEOUT_S = 30.0, 3.0
"""Of a peer: then it is killed."""
RIGHT = "right bytes"
SHOWN = 110
"""Characters of an error in the table; the JSON has all."""


_running: list[GpuPeer] = []


class Case(NamedTuple):
    """``one_pid_namespace``: the importer joins the exporter's, which is not this process's."""

    name: str
    exporter: Place
    importer: Place
    one_pid_namespace: bool = False


POD = ("ipc", "shm")
ALL = ("pid", "ipc", "shm", "net", "uts", "cgroup")
CASES = (
    Case("same PID namespace, all shared", Place(), Place()),
    Case("same PID namespace, own /dev/shm", Place(("shm",)), Place(("shm",))),
    Case("same PID namespace, own IPC namespace", Place(("ipc",)), Place(("ipc",))),
    Case(
        "one pod: one PID namespace, own IPC and /dev/shm",
        Place(("pid", *POD)), Place(POD), one_pid_namespace=True,
    ),
    Case("own PID namespaces, unequal PIDs", Place(("pid",), 200), Place(("pid",), 300)),
    Case("own PID namespaces, equal PIDs", Place(("pid",), 200), Place(("pid",), 200)),
    Case(
        "own PID namespaces and /dev/shm, unequal PIDs",
        Place(("pid", "shm"), 200), Place(("pid", "shm"), 300),
    ),
    Case(
        "own PID namespaces and /dev/shm, equal PIDs",
        Place(("pid", "shm"), 200), Place(("pid", "shm"), 200),
    ),
    Case(f"all own ({', '.join(ALL)}), unequal PIDs", Place(ALL, 200), Place(ALL, 300)),
    Case(f"all own ({', '.join(ALL)}), equal PIDs", Place(ALL, 200), Place(ALL, 200)),
    Case("exporter on the host, importer's all own", Place(), Place(ALL, 300)),
    Case("exporter's all own, importer on the host", Place(ALL, 200), Place()),
)  # fmt: skip


def main() -> int:
    if (reason := no_gpu()) is not None:
        print(reason)
        return 1
    gpu_peer.CALL_TIMEOUT_S, gpu_peer.END_TIMEOUT_S = CALL_TIMEOUT_S, END_TIMEOUT_S
    options = arguments()
    deadline = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, end_at_once)
    print(heading(), flush=True)
    every: list[str] = []
    for case in (case for case in CASES if options.only in case.name):
        if time.monotonic() > deadline:
            found = dict.fromkeys(KINDS, "not tried: no time left")
            report("gpu namespaces", case=case.name, found=found)
        else:
            found = try_case(case)
        print(row(case.name, found), flush=True)
        every += found.values()
    return int(any("wrong bytes" in how for how in every))


def end_at_once(*_: object) -> None:
    """Kill all peers, of which some may hang, and end."""
    for peer in tuple(_running):
        peer.process.kill()  # its namespace's processes go with it
    shutil.rmtree(shared_directory(), ignore_errors=True)
    sys.stdout.flush()
    os._exit(1)  # threads wait for answers


def try_case(case: Case) -> dict[str, str]:
    """What came of each kind of memory in this case."""
    for place in (case.exporter, case.importer):
        if (reason := impossible(place)) is not None:
            found = dict.fromkeys(KINDS, f"not tried: {reason}")
            report("gpu namespaces", case=case.name, found=found)
            return found
    with ThreadPoolExecutor(len(KINDS)) as at_once:
        tried = dict(zip(KINDS, at_once.map(lambda kind: try_pair(case, kind), KINDS), strict=True))
    found = {kind: one.how for kind, one in tried.items()}
    places = next((one.places for one in tried.values() if one.places), [])
    report("gpu namespaces", case=case.name, found=found, processes=places,
           own={"exporter": case.exporter.own, "importer": case.importer.own},
           pids_equal=len({place["number"] for place in places}) == 1)  # fmt: skip
    return found


class Tried(NamedTuple):
    """What came of one kind of memory, and where the two processes ran."""

    how: str
    places: list[dict[str, Any]]


def try_pair(case: Case, kind: str) -> Tried:
    """Try one kind of memory in two processes of its own."""
    try:
        with pair(case) as (exporter, importer):
            places = [peer.call("where") for peer in (exporter, importer)]
            importer.call("make", seed=2)
            return Tried(try_kind(exporter, importer, kind), places)
    except (PeerError, OSError) as exc:
        return Tried(f"not tried: {exc}", [])


def impossible(place: Place) -> str | None:
    """Why such namespaces cannot be made here, or None."""
    command = [sys.executable, PROGRAM, "--try"]
    environment = {**os.environ, **place.variables()}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    return None if ran.returncode == 0 else ran.stderr.strip().rpartition("\n")[2]


@contextmanager
def pair(case: Case) -> Iterator[tuple[GpuPeer, GpuPeer]]:
    """Exporter and importer, in their places."""
    with ExitStack() as ended:

        def start(place: Place) -> GpuPeer:
            peer = GpuPeer(program=PROGRAM, environment=place.variables())
            _running.append(peer)
            ended.callback(_running.remove, peer)
            return ended.enter_context(peer)

        exporter = start(case.exporter)
        place = case.importer
        if case.one_pid_namespace:
            exporter.call("where")  # its namespace is there once it answers
            place = replace(place, join=exporter.process.pid)
        yield exporter, start(place)


def try_kind(exporter: GpuPeer, importer: GpuPeer, kind: str) -> str:
    """Share memory of one kind: what came of it."""
    try:
        exporter.call("make", seed=1, kind=kind)
    except (PeerError, OSError) as exc:
        return f"no such memory: {exc}"
    try:
        importer.call("attach", descriptor=exporter.call("export", epoch=5))
        state = importer.call("copy", **LISTS)
        wrong = importer.call("wrong", own=2, peer=1, peer_blocks=BLOCKS, **LISTS)
        return RIGHT if (state, wrong) == ("done", 0) else f"{state}, {wrong} wrong bytes"
    except (PeerError, OSError) as exc:
        return str(exc)


def heading() -> str:
    """The first lines of the table, in Markdown."""
    return f"| Namespaces | {' | '.join(KINDS.values())} |\n|---|" + "---|" * len(KINDS)


def row(name: str, found: dict[str, str]) -> str:
    cells = [found[kind].replace("|", "/").replace("\n", " ")[:SHOWN] for kind in KINDS]
    return f"| {name} | {' | '.join(cells)} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=170, help="then no case is begun")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
