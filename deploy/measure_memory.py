"""What a coordinator takes, and what kvshm adds to an engine, by the number of engines:

    PYTHONPATH=. .venv/bin/python deploy/measure_memory.py --engines 0 8 28 --blocks 1000000

From this follow the requests and limits in deploy/kubernetes.  An engine has no model here: it is a
process that joins with memory for so many blocks, and publishes some of them.  One JSON line for
each number of engines, in MiB: of the coordinator while they share, then after one of them was
killed, when it has read every slot of the others' tables for leases of the dead one; and of an
engine, from before it joined to when it knew all others."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kvshm

BLOCK, TOKENS, PROMPT = 64, 16, 1000


def memory(pid: int | str = "self") -> dict[str, float]:
    """Resident memory of a process by kind, in MiB: Anon, File, Shmem."""
    text = Path(f"/proc/{pid}/status").read_text("ascii")
    return {kind: int(kib) / 1024 for kind, kib in re.findall(r"^Rss(\w+):\s+(\d+)", text, re.M)}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


# -- an engine


def engine(options: argparse.Namespace) -> None:
    """Join, publish and say so; told to, say what that has added to this process."""
    number, blocks = options.engine, options.blocks
    config = kvshm.Config(run_dir=options.run_dir, namespace="memory")
    kv_cache = kvshm.allocate(BLOCK * blocks, config)
    before = memory()
    identity = kvshm.Identity(engine="toy 1", model="m", weights="w")
    regions = [kvshm.Region(0, BLOCK, BLOCK, blocks)]
    node = kvshm.join(
        identity,
        memory=kv_cache,
        name=f"engine-{number}",
        regions=regions,
        block_size=TOKENS,
        config=config,
        wait=100.0,
    )
    for first in range(0, options.publish, PROMPT):
        salt = f"{number} {first}".encode()
        keys = list(node.keys(range(PROMPT * TOKENS), salt))
        node.publish(keys, range(first, first + PROMPT), 0)
    print("shares", flush=True)
    input()
    print(json.dumps({kind: memory()[kind] - before[kind] for kind in before}), flush=True)
    input()


# -- all of them


def start(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], text=True, **streams)


def measure(engines: int, run_dir: str, options: argparse.Namespace) -> dict[str, Any]:
    blocks, publish = options.blocks, options.publish
    place = ("--run-dir", run_dir)
    with ExitStack() as ends:
        module = ("-m", "kvshm.coordinator", *place, "--namespace", "memory")
        coordinator = start(*module, stderr=subprocess.PIPE)
        ends.callback(end, coordinator)
        assert coordinator.stderr is not None
        assert any("event=serving" in line for line in coordinator.stderr)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        sizes = ("--blocks", str(blocks), "--publish", str(publish))
        started = []
        for number in range(engines):  # one after the other: many at once are slow to join
            each = start(__file__, *place, *sizes, "--engine", str(number), **pipes)
            ends.callback(end, each)
            started.append(each)
            assert each.stdout is not None
            assert each.stdout.readline() == "shares\n"
        return report(coordinator, started, options.pause) | {
            "blocks": blocks,
            "published": publish,
        }


def report(
    coordinator: subprocess.Popen[str], engines: list[subprocess.Popen[str]], pause: float
) -> dict[str, Any]:
    time.sleep(pause)  # joins are over
    began = cpu_seconds(coordinator.pid)
    time.sleep(pause)  # over which its CPU is counted
    found: dict[str, Any] = {
        "engines": len(engines),
        "coordinator": rounded(memory(coordinator.pid)),
        "idle_cores": round((cpu_seconds(coordinator.pid) - began) / pause, 3),
    }
    if engines:
        last = engines[-1]
        assert last.stdin is not None
        assert last.stdout is not None
        last.stdin.write("\n")
        last.stdin.flush()
        found["added_to_an_engine"] = rounded(json.loads(last.stdout.readline()))
        last.kill()
        time.sleep(pause)  # the coordinator sees the death, and reads its table
        found["coordinator_after_a_death"] = rounded(memory(coordinator.pid))
    return found


def rounded(kinds: dict[str, float]) -> dict[str, int]:
    return {kind: round(mib) for kind, mib in kinds.items()}


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", type=int, nargs="+", default=[0, 8, 28])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--publish", type=int, default=10_000)
    parser.add_argument("--pause", type=float, default=10.0, help="seconds before each look")
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        engine(options)
        return
    for engines in options.engines:
        with tempfile.TemporaryDirectory(prefix="kv-") as run_dir:
            print(json.dumps(measure(engines, run_dir, options)))


if __name__ == "__main__":
    main()
