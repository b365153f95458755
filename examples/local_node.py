"""Start a coordinator and real vLLM engines on this machine, ask them, end them.

The demo, the benchmarks and the engine tests run on these two classes: a ``Node`` owns a
run directory, a namespace, the coordinator's process and its engines; an ``Engine`` is one
OpenAI-compatible server in a process group of its own.  Only the standard library is used
on this side, so that measuring costs nothing where the engines run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import reaper
from completions import Result, stream

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 150


@dataclass(frozen=True)
class EngineSpec:
    """What distinguishes one engine: its model, its core, its cache, its settings."""

    name: str
    model: Path
    core: int
    """Of the CPU on which an engine without a GPU computes."""
    num_blocks: int = 512
    """Of the KV cache of an engine without a GPU."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cache_bytes: int = 0
    """Of the KV cache on a GPU; 0 for an engine without one."""
    eager: bool = True
    """Without compiling and without CUDA graphs."""

    def command(self, port: int) -> list[str]:
        """Return the server's command line."""
        server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        where = ["--model", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        run = ["--max-model-len", "8192", "--dtype", "bfloat16"]
        eager = ["--enforce-eager"] if self.eager else []
        return [*server, *where, *run, *self._cache(), *eager, *self.arguments]

    def _cache(self) -> list[str]:
        """How large the KV cache is.  On a GPU vLLM is told the bytes: else it would measure what
        is free, which fails while another engine on that GPU starts or ends.  The share of the
        GPU is then only what must be free when it starts."""
        if self.cache_bytes:
            told = ["--kv-cache-memory-bytes", str(self.cache_bytes)]
            return [*told, "--gpu-memory-utilization", "0.1"]
        return ["--num-gpu-blocks-override", str(self.num_blocks)]

    @staticmethod
    def longest_prompt(tokens: int) -> tuple[str, ...]:
        """Return arguments that limit a prompt with its answer: vLLM does not start if the longest
        does not fit into the cache."""
        return ("--max-model-len", str(tokens))


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment() -> dict[str, str]:
    """Return this process's environment without any setting of kvshm or vLLM."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("KVSHM_", "VLLM_"))}


def offline() -> dict[str, str]:
    """Return what keeps an engine from the network."""
    return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def sampler() -> dict[str, str]:
    """Return what a vLLM for GPUs needs where FlashInfer is missing: it imports FlashInfer to find
    out whether it can sample by it."""
    missing = importlib.util.find_spec("flashinfer") is None
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if missing else {}


def machine(core: int) -> dict[str, str]:
    """Return what vLLM has to know of this machine for an engine bound to one core."""
    bound = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)}
    return {**bound, **offline()}


def processes_of(group: int) -> dict[int, str]:
    """Return the live processes of a process group: pid -> state letter of /proc."""
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                states[int(stat.parent.name)] = state
    return states


class Engine:
    """One OpenAI-compatible vLLM server in a process group of its own."""

    def __init__(self, spec: EngineSpec, environment: Mapping[str, str], log_path: Path) -> None:
        """Start the server; returns at once, ``wait_ready`` waits until it serves.

        All engines without a GPU compute with one thread, bound to ``spec.core``: results are
        compared bit for bit, and rounding depends on the number of threads.
        """
        # A process group, not a session: the kernel schedules sessions as units (autogroup), and
        # where engines share a core one that spins can then halt another one for seconds.
        self.spec = spec
        self.headers: Mapping[str, str] = {}
        """Sent with every request."""
        self.port = free_port()
        self.log_path = log_path
        here = {**offline(), **sampler()} if spec.cache_bytes else machine(spec.core)
        # vLLM renames its processes, over the environment by which the reaper knows them.
        named = {"SPT_NOENV": "1"}
        server = {**here, **named, "VLLM_SERVER_DEV_MODE": "1"}
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                spec.command(self.port),
                env={**clean_environment(), **server, **environment, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def __repr__(self) -> str:
        state = "running" if self.process.poll() is None else "ended"
        return f"<Engine {self.spec.name} [pid {self.process.pid}, port {self.port}, {state}]>"

    def wait_ready(self, timeout: float = START_TIMEOUT_S) -> None:
        """Block until the server answers; RuntimeError with the log's tail if it never does."""
        deadline = time.monotonic() + timeout
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self!r} does not serve\n{self.log_tail()}")
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Return whether the server answers its health check."""
        try:
            self.request("/health", timeout=5)
        except OSError:
            return False
        return True

    def request(self, path: str, *, post: bool = False, timeout: float = 120) -> str:
        """Return the body of an answer; OSError if there is none or the status is an error."""
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, method="POST" if post else "GET")
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> Result:
        """Complete a prompt of token ids, greedily; blocks until the last token."""
        body = {"prompt": list(prompt), "logprobs": 5, "max_tokens": max_tokens, **options}
        model = {"model": str(self.spec.model)}
        return stream(self.port, "/v1/completions", {**model, **body}, self.headers)

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Result:
        """Answer a chat with 16 tokens, greedily; blocks until the last one."""
        body = {"messages": list(messages), "logprobs": True, "top_logprobs": 5, "max_tokens": 16}
        model = {"model": str(self.spec.model)}
        return stream(self.port, "/v1/chat/completions", {**model, **body, **options}, self.headers)

    def metrics(self) -> dict[str, float]:
        """Return vLLM's own metrics: name with labels -> value."""
        values = {}
        for line in self.request("/metrics").splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values

    def prompt_tokens(self) -> PromptTokens:
        """Return how many prompt tokens were computed, hit locally and imported so far."""
        sums = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        for name, value in self.metrics().items():
            for source in sums:
                if ":prompt_tokens_by_source_total{" in name and f'"{source}"' in name:
                    sums[source] += int(value)
        return PromptTokens(*sums.values())

    def log(self) -> str:
        """Return everything the server's processes have written so far."""
        return self.log_path.read_text(errors="replace")

    def said(self, text: str) -> list[str]:
        """Return the lines of the log that hold ``text``."""
        return [line for line in self.log().splitlines() if text in line]

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Return the end of the log, without the list of routes and the polls for metrics."""
        said = [s for s in self.log().splitlines() if "Route: " not in s and '"GET /' not in s]
        return "\n".join(said[-lines:])

    def signal(self, number: int) -> None:
        """Send a signal to every process of this server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End every process of this server at once, as a crash would."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def processes(self) -> dict[int, str]:
        """Return the server's live processes: pid -> state letter of /proc (T: stopped)."""
        return processes_of(self.process.pid)

    def stop(self) -> None:
        """Shut the server down in order, then make sure that nothing of it is left."""
        self.signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
            self.process.wait(STOP_TIMEOUT_S)
            for _ in wait_until(f"{self!r} has no process left", STOP_TIMEOUT_S):
                if not self.processes():
                    break
        self.kill()


@dataclass(frozen=True)
class PromptTokens:
    """Where the prompt tokens of an engine came from."""

    computed: int
    local_hit: int
    imported: int

    def __sub__(self, other: PromptTokens) -> PromptTokens:
        return PromptTokens(
            self.computed - other.computed,
            self.local_hit - other.local_hit,
            self.imported - other.imported,
        )


class Node:
    """A run directory and a namespace with a coordinator and engines; a context manager."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """``environment`` (KVSHM_VERIFY and the like) applies to every engine of the node;
        what an engine's own spec says comes first."""
        reaper.start()  # whatever ends this process ends what it has started
        # Unix socket paths hold 107 bytes: pytest's own temporary directories are too long.
        self.run_dir = Path(tempfile.mkdtemp(prefix="kv-"))
        self.namespace = uuid.uuid4().hex[:8]
        self.engines: list[Engine] = []
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.coordinator_log = self.run_dir / "coordinator.log"
        self.on_start: Callable[[int], object] = lambda group: None
        """Called with the process group of each process as soon as it is started."""
        self.environment = {
            "KVSHM_ENABLE": "1",
            "KVSHM_RUN_DIR": str(self.run_dir),
            "KVSHM_NAMESPACE": self.namespace,
            # What is shown or measured is the import, also where computing were faster.
            "KVSHM_MIN_PREFIX_TOKENS": "0",
            **(environment or {}),
        }

    def start_coordinator(self) -> None:
        """Start the coordinator and wait until it serves; engines find it by themselves."""
        command = [sys.executable, "-m", "kvshm.coordinator", "--run-dir", str(self.run_dir)]
        with self.coordinator_log.open("ab") as log:
            before = log.tell()
            self.coordinator = subprocess.Popen(
                [*command, "--namespace", self.namespace],
                env=clean_environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.on_start(self.coordinator.pid)
        # Before it serves, a signal would end it without the clearing up that it owes.
        for _ in wait_until("the coordinator serves", STOP_TIMEOUT_S):
            said = self.coordinator_log.read_bytes()[before:]
            if b"event=serving" in said:
                break
            if self.coordinator.poll() is not None:
                raise RuntimeError(f"the coordinator has ended: {said.decode(errors='replace')}")

    def end_coordinator(self, number: int = signal.SIGTERM) -> int:
        """End the coordinator with a signal and return its exit status."""
        assert self.coordinator is not None, "no coordinator was started"
        self.coordinator.send_signal(number)
        return self.coordinator.wait(STOP_TIMEOUT_S)

    def start_engines(self, *specs: EngineSpec) -> list[Engine]:
        """Start the engines side by side and wait until all of them serve.  Those on a GPU are told
        their cache's bytes, so none measures free memory that another one is taking."""
        started = []
        for spec in specs:
            log_path = self.run_dir / f"{spec.name}.log"
            started.append(Engine(spec, self.environment, log_path))
            self.engines.append(started[-1])
            self.on_start(started[-1].process.pid)
        for engine in started:
            engine.wait_ready()
        return started

    def dump(self, *arguments: str) -> str:
        """Return what the index tool says about this node."""
        place = ["--run-dir", str(self.run_dir), "--namespace", self.namespace]
        command = [sys.executable, "-m", "kvshm.tools.dump_index", *place]
        run = subprocess.run(
            [*command, *arguments], env=clean_environment(), capture_output=True, text=True
        )
        return run.stdout + run.stderr

    def sockets(self) -> list[str]:
        """Return the names of the sockets at which engines hand out tables, served or not."""
        return sorted(p.name for p in self.run_dir.glob(f"{self.namespace}.engine.*.sock"))

    def close(self) -> None:
        """End everything that was started and remove the run directory."""
        for engine in self.engines:
            engine.stop()
        if self.coordinator is not None and self.coordinator.poll() is None:
            try:
                self.end_coordinator()
            except subprocess.TimeoutExpired:
                self.end_coordinator(signal.SIGKILL)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until(what: str, timeout: float, interval: float = 0.05) -> Iterator[None]:
    """Yield until the caller breaks out of the loop; TimeoutError names ``what`` if it never
    does.  ``for _ in wait_until("both engines joined", 30): if joined(): break``"""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        yield
        time.sleep(interval)
    raise TimeoutError(f"not within {timeout} s: {what}")
