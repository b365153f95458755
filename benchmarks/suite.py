"""Runs benchmarks in turn, and keeps what each prints.

    .venv/bin/python benchmarks/suite.py quick|peers|full [--only NAME] [--out benchmarks/results]

``BENCHES`` is the table; docs/performance_page.py makes the page of the results.  The lines of JSON
that a benchmark prints are written to OUT/NAME.jsonl, in place of those of its last run.  A run
that fails is kept, too: behind the lines that it has printed stands one with ``failed_run``, the
status and the last lines of stderr.  The suite goes on with the next one, and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any, NamedTuple

from measurement import ROOT, described, end_what_is_started

RESULTS = ROOT / "benchmarks" / "results"
SETS = {
    "quick": "kvshm alone, all within ten minutes",
    "peers": "kvshm beside LMCache and Mooncake, in one run each",
    "full": "what takes long",
}
LAST_LINES = 15
"""Of the stderr of a run that failed."""
PATIENCE, LEAST_PATIENCE_SECONDS = 8, 300.0
"""A run ends after so many times the seconds that the table names, at least after the second."""
END_SECONDS = 20.0
"""How long a run that is ended may take for it."""


class Peer(NamedTuple):
    """Another cache, installed in a folder of its own in the environment."""

    folder: str
    package: str
    also: str = ""
    """What it needs of the system."""


PEERS = {
    "lmcache": Peer("lmcache", "lmcache"),
    "mooncake": Peer(
        "mooncake",
        "mooncake-transfer-engine-non-cuda",
        "libibverbs1, librdmacm1, libnuma1 and liburing2 of the system; unshare, for a network of "
        "its own in which nothing but loopback can be reached",
    ),
}


class Bench(NamedTuple):
    """A row of the table."""

    name: str
    """Of its file of results."""
    set: str
    seconds: int
    """About what it takes."""
    answers: str
    command: str
    """Behind Python; ``{lmcache}`` and ``{mooncake}`` are the folders of these peers."""

    @property
    def needs(self) -> list[str]:
        """The peers that it needs."""
        return [name for name in PEERS if f"{{{name}}}" in self.command]

    def arguments(self) -> list[str]:
        """The command as it is run, from the root of the tree."""
        folders = {f"{{{name}}}": os.path.relpath(folder(name), ROOT) for name in PEERS}
        return [folders.get(word, word) for word in shlex.split(self.command)]


BENCHES = (
    Bench(
        "lookup", "quick", 20, "what does it take to look a prefix up among other engines?",
        "benchmarks/bench_lookup.py",
    ),
    Bench(
        "groups", "quick", 5, "what does a lookup over several KV cache groups take?",
        "benchmarks/bench_groups.py",
    ),
    Bench(
        "events", "quick", 35, "how soon do engines hear of each other's blocks?",
        "benchmarks/bench_events.py visible coordinator --seconds 6",
    ),
    Bench(
        "client", "quick", 30, "what does a busy scheduler lose to the thread that hears of peers?",
        "benchmarks/bench_client.py --rounds 8",
    ),
    Bench(
        "client-crowd", "quick", 25, "how many records a second does an engine apply?",
        "benchmarks/bench_client.py --crowd --hz 1000 --records 192 --blocks 125000 --rounds 6",
    ),
    Bench(
        "growth", "quick", 20, "does an index that grows stop anybody?",
        "benchmarks/bench_growth.py",
    ),
    Bench(
        "copy", "quick", 40, "how fast are blocks copied out of another engine's cache?",
        "benchmarks/bench_copy.py --rounds 8",
    ),
    Bench(
        "scheduler", "quick", 25, "what is added to vLLM's scheduler?",
        "benchmarks/bench_scheduler.py --rounds 20",
    ),
    Bench(
        "hooks", "quick", 60, "which part of a step do the hooks take?",
        "benchmarks/bench_hooks.py",
    ),
    Bench(
        "weights", "quick", 35, "what does it take to digest the weights, and to watch them?",
        "benchmarks/bench_weights.py",
    ),
    Bench(
        "traces", "quick", 60, "what does sharing find among requests as they really come?",
        "benchmarks/bench_traces.py --engines 1 2 4 16",
    ),
    Bench(
        "import", "quick", 180, "when does the first token of an imported prefix come?",
        "benchmarks/bench_import.py --rounds 10 --lengths 128,256,1024",
    ),
    Bench(
        "peer-lookups", "peers", 120, "how long do lookups take in kvshm and in other caches?",
        "benchmarks/bench_peer_lookups.py --lmcache {lmcache} --mooncake {mooncake}",
    ),
    Bench(
        "copy-peers", "peers", 45, "how fast do other caches bring blocks from a neighbour?",
        "benchmarks/bench_copy.py --mooncake {mooncake} --lmcache {lmcache} "
        "--rows '64 KiB' '1024 KiB' --threads 1",
    ),
    Bench(
        "import-peers", "peers", 900, "when does the first token come, in kvshm and other caches?",
        "benchmarks/bench_import.py --rounds 15 --arms kvshm,lmcache,offload+copies,offload "
        "--lmcache {lmcache}",
    ),
    Bench(
        "load", "peers", 2300, "is sharing worth it under load?",
        "benchmarks/bench_load.py --rates 4,8,16,24,32,40,56 --seconds 20 --repetitions 2 "
        "--lmcache {lmcache} --arms plain-rr,plain-affinity,kvshm-rr,kvshm-least,lmcache-least,"
        "offload+copies-affinity,offload-affinity",
    ),
    Bench(
        "load-memory", "peers", 900, "what does memory beside the engines bring past saturation?",
        "benchmarks/bench_load.py --rates 24,40,56 --seconds 20 --repetitions 2 "
        "--lmcache {lmcache} --arms plain-affinity,kvshm-least,kvshm+keeper-least,lmcache-least",
    ),
    Bench(
        "load-engines", "full", 1300, "is sharing worth it among four engines?",
        "benchmarks/bench_load.py --engines 4 --blocks 130 --rates 4,8,16,32 --seconds 20 "
        "--repetitions 2",
    ),
    Bench(
        "engines", "full", 1400, "does kvshm slow an engine down that gains nothing?",
        "benchmarks/compare.py --unshared plain --alone --starts 5 --rounds 8",
    ),
    Bench(
        "join", "full", 150, "how soon does an engine know what the others have?",
        "benchmarks/bench_faults.py engine-joins coordinator-killed --trials 30",
    ),
    Bench(
        "load-users", "full", 2000, "is sharing worth it for users who come back?",
        "benchmarks/bench_load.py --users 32 --prefixes 4 --prefix-tokens 512 --tail-tokens 256 "
        "--answer-tokens 64 --rates 3,6,9 --seconds 40 --repetitions 2 --lmcache {lmcache} "
        "--arms plain-rr,plain-affinity,kvshm-least,lmcache-least,offload+copies-affinity",
    ),
    Bench(
        "load-agents", "full", 1100, "is sharing worth it for agents that go on and fork?",
        "benchmarks/bench_load.py --agents 32 --prefixes 16 --tail-tokens 128 --rates 8,16,24 "
        "--seconds 20 --repetitions 2 --lmcache {lmcache} "
        "--arms plain-rr,plain-affinity,kvshm-least,lmcache-least",
    ),
    Bench(
        "first-tokens", "full", 2000, "when does the first token come, over several starts?",
        "benchmarks/bench_import.py --starts 3 --rounds 30",
    ),
    Bench(
        "traces-whole", "full", 1800, "what does sharing find in an hour of such requests?",
        "benchmarks/bench_traces.py --requests 12000 --engines 1 2 4 8 16",
    ),
    Bench(
        "events-overload", "full", 60, "what becomes of more events than a coordinator can relay?",
        "benchmarks/bench_events.py overload",
    ),
    Bench(
        "restart", "full", 1800, "what does a restart of all engines cost their users?",
        "benchmarks/bench_restart.py --prefixes 64 --extra-gb 0.08",
    ),
    Bench(
        "faults", "full", 1500, "how long until others do without an engine that died?",
        "benchmarks/bench_faults.py",
    ),
    Bench(
        "console", "full", 170, "what does a browser that watches the node cost it?",
        "benchmarks/bench_console.py",
    ),
    Bench(
        "idle", "full", 90, "how soon do others see an engine's last blocks?",
        "benchmarks/bench_idle.py --rounds 30",
    ),
    Bench(
        "admission", "full", 45, "what does it take to find out whether kvshm knows this vLLM?",
        "benchmarks/bench_admission.py --rounds 20",
    ),
    Bench(
        "start", "full", 30, "how big is kvshm, and what does it add to the start of a process?",
        "benchmarks/bench_start.py",
    ),
    Bench(
        "eviction", "full", 10, "which blocks should engines that share drop?",
        "benchmarks/simulate_eviction.py",
    ),
    Bench(
        "transformers", "full", 120, "what is added to transformers' continuous batching?",
        "benchmarks/bench_transformers.py",
    ),
)  # fmt: skip


def folder(peer: str) -> Path:
    """Where a peer is installed, if it is."""
    return Path(sys.prefix) / PEERS[peer].folder


def installed(peer: str) -> str | None:
    """The version of a peer, None if it is not there."""
    stem = PEERS[peer].package.replace("-", "_")
    found = sorted(folder(peer).glob(f"{stem}-*.dist-info"))
    return PathDistribution(found[0]).version if found else None


def needed(benches: Iterable[Bench]) -> dict[str, str | None]:
    """The peers that benchmarks need, with their versions."""
    return {name: installed(name) for name in PEERS if any(name in b.needs for b in benches)}


def told(peers: Mapping[str, str | None]) -> Iterator[str]:
    """Yield a line about each peer: what it needs, and whether it is there."""
    for name, version in peers.items():
        where = os.path.relpath(folder(name), ROOT)
        also = f"; needs {PEERS[name].also}" if PEERS[name].also else ""
        there = version or "is missing: `make bench-peers` installs it"
        yield f"{PEERS[name].package} in {where}: {there}{also}"


# -- one run


def run(bench: Bench, arguments: Sequence[str], limit: float) -> tuple[list[dict[str, Any]], str]:
    """Run a benchmark; return its lines, and what is wrong, "" if nothing is."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((f"{ROOT}/examples", str(ROOT)))}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            wrong = f"status {status}" if status else ""
        except subprocess.TimeoutExpired:
            wrong = f"no end within {limit:.0f} s"
        except KeyboardInterrupt:
            wrong = "interrupted"
        finally:
            end(process)
        lines, said = list(json_lines(text(out))), text(err)
    if not wrong and not lines:
        wrong = "it printed no result"
    if peers := {name: installed(name) for name in bench.needs}:
        lines = [{**line, "peers": peers} for line in lines]
    if wrong:
        last = [without_paths(line) for line in said.splitlines()[-LAST_LINES:]]
        failed = {"reason": wrong, "stderr": last}
        lines.append(described(bench.name, ["python", *arguments], failed_run=failed))
    return lines, wrong


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process, and then all that is left of its group, which it may have left behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def json_lines(printed: str) -> Iterator[dict[str, Any]]:
    """Yield the objects among the lines; whatever else is printed is no result."""
    for line in printed.splitlines():
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def without_paths(line: str) -> str:
    """Leave out where this tree and its environment lie: results are published."""
    for path in (str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())):
        line = line.replace(path, "...")
    return line


def keep(out: Path, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of results, as a whole."""
    out.mkdir(parents=True, exist_ok=True)
    part = out / f"{name}.jsonl.part"
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.replace(out / f"{name}.jsonl")


def run_all(benches: Sequence[Bench], out: Path) -> bool:
    """Run benchmarks in turn and say how far it is; whether all have ended well."""
    failed = []
    for number, bench in enumerate(benches, 1):
        where = f"[{number}/{len(benches)}] {bench.name}"
        print(f"{where}: {bench.answers} (about {bench.seconds} s)", flush=True)
        begun = time.monotonic()
        limit = max(LEAST_PATIENCE_SECONDS, PATIENCE * bench.seconds)
        lines, wrong = run(bench, bench.arguments(), limit)
        keep(out, bench.name, lines)
        took = f"{time.monotonic() - begun:.0f} s"
        print(f"{where}: {f'FAILED, {wrong},' if wrong else 'done'} after {took}", flush=True)
        if wrong:
            failed.append(bench.name)
        if wrong == "interrupted":
            break
    if failed:
        print(f"failed: {', '.join(failed)}; see there in {out}", file=sys.stderr)
    return not failed


def main() -> int:
    """Command line.  Exit status 1 if a run has failed, 2 if a peer is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("set", choices=SETS, help="; ".join(f"{k}: {v}" for k, v in SETS.items()))
    parser.add_argument("--only", action="append", metavar="NAME", help="one of the set")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    options = parser.parse_args()
    benches = [bench for bench in BENCHES if bench.set == options.set]
    if unknown := {*(options.only or ())} - {bench.name for bench in benches}:
        names = ", ".join(bench.name for bench in benches)
        parser.error(f"--only {', '.join(sorted(unknown))}: {options.set} has {names}")
    benches = [bench for bench in benches if not options.only or bench.name in options.only]
    peers = needed(benches)
    print("\n".join(told(peers)), flush=True)
    if None in peers.values():
        return 2
    end_what_is_started()
    return 0 if run_all(benches, options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
