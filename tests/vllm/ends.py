"""How engines end: signals, to whom they go, and what the engine is doing then, beside plain vLLM.

    PYTHONPATH=examples .venv/bin/python -m tests.vllm.ends                  hours: all rows
    PYTHONPATH=examples .venv/bin/python -m tests.vllm.ends --signals SIGINT --states busy --ranks 1

Each row is an engine of its own, with kvshm and a coordinator, or plain; its line of JSON tells
how many seconds after the signal its server (``server``), the last of its processes (``all``) and
the last of its requests (``requests``) had ended, how many seconds after its last process its
sockets were gone (``sockets``), and how many of its files in /dev/shm were left (``shm``).  null:
not within ``--patience`` seconds; what is left is killed then.

``idle``: nothing to do.  ``busy``: three clients, each with one request after the other, that stop
at the first error.  ``importing``: its worker stands still between the leases and the copy of an
import, and goes on as soon as the signal has been sent; plain vLLM has no such state.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_node import Engine, EngineSpec, wait_until
from sharing_node import BLOCK_SIZE, SharingNode
from tiny_model import write_model

STATES = ("idle", "busy", "importing")
TARGETS = ("server", "core", "workers", "group")
SIGNALS = ("SIGINT", "SIGINT,SIGINT", "SIGTERM", "SIGTERM,SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL")
"""Several: one shortly after the other."""
BETWEEN_SECONDS = 0.2
CLIENTS = 3
VOCABULARY = 1400
STOPS = {"KVSHM_TEST_SYNC_POINT": "COPY_BEGINS:stop"}
TITLES = {"core": "VLLM::EngineCore", "workers": "VLLM::Worker"}


@dataclass
class Clients:
    """Ask an engine until it answers no more."""

    engine: Engine
    errors: list[str] = field(default_factory=list)
    answers: int = 0
    ended_at: float = 0.0
    _threads: list[threading.Thread] = field(default_factory=list)

    def ask(self, prompts: Callable[[], Iterator[list[int]]], count: int) -> None:
        """Have ``count`` clients send prompts of their own, from threads."""
        for _ in range(count):
            thread = threading.Thread(target=self._ask, args=(prompts(),), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _ask(self, prompts: Iterator[list[int]]) -> None:
        try:
            for prompt in prompts:
                self.engine.complete(prompt, max_tokens=60)
                self.answers += 1
        except (RuntimeError, OSError) as exc:
            self.errors.append(str(exc))
        self.ended_at = max(self.ended_at, time.monotonic())

    @property
    def waiting(self) -> int:
        """How many of them still wait for an answer."""
        return sum(thread.is_alive() for thread in self._threads)


def random_prompts() -> Iterator[list[int]]:
    """Prompts that no engine has computed, for ever."""
    while True:
        yield random.choices(range(10, VOCABULARY), k=900)


def targets(engine: Engine, name: str) -> list[int]:
    """The pids of those of an engine's processes that a signal goes to; empty: to all of them."""
    if name == "group":
        return []
    if name == "server":
        return [engine.process.pid]
    title = TITLES[name]
    lines = ((pid, Path(f"/proc/{pid}/cmdline")) for pid in engine.processes())
    found = [pid for pid, line in lines if line.read_bytes().startswith(title.encode())]
    assert found, f"{engine!r} has no {title}"
    return found


def send(engine: Engine, target: str, signals: str) -> None:
    """Send the signals; a worker that stands still goes on."""
    pids = targets(engine, target)
    for number, name in enumerate(signals.split(",")):
        time.sleep(BETWEEN_SECONDS if number else 0)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[name])
        if not pids:
            engine.signal(signal.Signals[name])
        engine.signal(signal.SIGCONT)


def shared_memory(engine: Engine) -> set[str]:
    """The files in /dev/shm that the engine's processes have mapped."""
    mapped = set()
    for pid in engine.processes():
        with contextlib.suppress(OSError):
            mapped |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
    return mapped


def seconds_until(condition: Callable[[], object], patience: float) -> float | None:
    """How long it takes until the condition holds; None if longer than ``patience``."""
    begun = time.monotonic()
    with contextlib.suppress(TimeoutError):
        for _ in wait_until("", patience, 0.01):
            if condition():
                return round(time.monotonic() - begun, 2)
    return None


@dataclass(frozen=True)
class Row:
    """One way to end."""

    kvshm: bool
    ranks: int
    state: str
    target: str
    signals: str

    def spec(self, name: str, model: Path) -> EngineSpec:
        """The engine that ends so."""
        wide = ("--tensor-parallel-size", str(self.ranks), "--max-model-len", "2048")
        cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.ranks)))}
        stops = STOPS if self.state == "importing" else {}
        parallel = (wide, cores) if self.ranks > 1 else ((), {})
        environment = {**parallel[1], **stops, "KVSHM_ENABLE": str(int(self.kvshm))}
        return EngineSpec(name, model, 1, 300, parallel[0], environment)

    @property
    def exists(self) -> bool:
        """Whether there is such a thing."""
        return self.kvshm or self.state != "importing"


def bring_about(state: str, node: SharingNode, engine: Engine, exporter: Engine | None) -> Clients:
    """Bring an engine into a state."""
    clients = Clients(engine)
    if state == "busy":
        clients.ask(random_prompts, CLIENTS)
        for _ in wait_until("it has answered", 60):
            if clients.answers:
                return clients
    if state == "importing":
        assert exporter is not None
        prompt = next(random_prompts())
        with node.sharing(exporter, len(prompt) // BLOCK_SIZE):
            exporter.complete(prompt)
        clients.ask(lambda: iter([prompt]), 1)
        for _ in wait_until("it stops with its leases", 60):
            if "T" in engine.processes().values():
                return clients
    return clients


def end(
    row: Row, node: SharingNode, engine: Engine, exporter: Engine | None, patience: float
) -> dict[str, Any]:
    """End an engine so; returns what there is to say of it."""
    clients = bring_about(row.state, node, engine, exporter)
    owned, mapped = node.owned(engine) if row.kvshm else set(), shared_memory(engine)
    sent = time.monotonic()
    send(engine, row.target, row.signals)
    found: dict[str, Any] = {
        "server": seconds_until(lambda: engine.process.poll() is not None, patience),
        "all": seconds_until(lambda: not engine.processes(), patience),
    }
    if found["server"] is not None and found["all"] is not None:
        found["all"] = round(found["server"] + found["all"], 2)
    left = engine.processes()
    engine.kill()
    found["sockets"] = seconds_until(lambda: not owned & set(node.sockets()), patience)
    seconds_until(lambda: not clients.waiting, 10)  # their connections are closed by now
    reported = round(clients.ended_at - sent, 2) if clients.ended_at else None
    found |= {"requests": reported, "waiting": clients.waiting, "left": len(left)}
    found["shm"] = sorted(name for name in mapped if os.path.exists(name))
    return found


def run(rows: list[Row], patience: float) -> None:
    """Print a line for each row."""
    model = write_model(Path(tempfile.mkdtemp(prefix="ends-")) / "model")
    numbers = itertools.count()
    with SharingNode() as node:
        node.start_coordinator()
        exporters: dict[int, Engine] = {}
        for row in rows:
            exporter = exporters.get(row.ranks)
            if row.state == "importing" and exporter is None:
                spec = Row(True, row.ranks, "idle", "", "").spec(f"exporter{row.ranks}", model)
                (exporter,) = node.start_engines(spec)
                exporters[row.ranks] = exporter
            (engine,) = node.start_engines(row.spec(f"e{next(numbers)}", model))
            if row.state == "importing" and exporter is not None:
                node.wait_joined(engine, exporter)
            found = end(row, node, engine, exporter, patience)
            node.engines.remove(engine)
            for name in found["shm"]:
                Path(name).unlink(missing_ok=True)
            found["shm"] = len(found["shm"])
            print(json.dumps({**vars(row), **found}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--kvshm", nargs="+", type=int, default=(1, 0), help="0: plain vLLM")
    parser.add_argument("--patience", type=float, default=30.0)
    given = parser.parse_args()
    axes = (given.ranks, given.states, given.targets, given.signals, map(bool, given.kvshm))
    rows = (Row(kvshm, *way) for *way, kvshm in itertools.product(*axes))
    run([row for row in rows if row.exists], given.patience)


if __name__ == "__main__":
    main()
