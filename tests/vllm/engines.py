"""Nodes under test: strict, verified, counted, and with evidence when a test fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar

from local_node import Engine, EngineSpec, clean_environment, machine, wait_until
from sharing_node import SharingNode

from kvshm._shm.layout import SlotState

TOOL = (sys.executable, "-m", "kvshm.tools.cli")

MAX_STARTS = 40
"""vLLM engines that the whole suite may start: each costs 20 seconds.  A script that makes several
within its own process counts once, because seven of them cost 40 seconds."""

PATIENCE_S = 150.0
"""How long a test waits for what must happen, on a machine of a fifth of the usual speed."""

reported: list[str] = []
"""What tests measured without asserting it; printed at the end of the session."""


def lines_naming_kvshm(log: str) -> list[str]:
    """Return the lines that speak of kvshm.  Paths do not count: where this clone, its
    environment or a model lies says nothing of what an engine does."""
    return [line for line in log.splitlines() if "kvshm" in re.sub(r"\S*/\S*", "", line)]


def has_loaded(pid: int, file: str) -> bool:
    """Whether the process has a native module in its memory."""
    return os.path.realpath(file) in Path(f"/proc/{pid}/maps").read_text()


def remove_what_vllm_leaves(engine: Engine) -> None:
    """vLLM's ranks on a CPU talk through shared memory that they do not remove."""
    for name in set(re.findall(r"vllm_dist_[0-9a-f]{32}", engine.log())):
        for left in Path("/dev/shm").glob(f"{name}-*"):
            left.unlink(missing_ok=True)


class SharedNode(SharingNode):
    """A node whose engines verify every imported block and raise at the border to vLLM, so that
    an error which production would turn into a cache miss fails the test."""

    open: ClassVar[list[SharedNode]] = []
    starts: ClassVar[list[str]] = []

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__({"KVSHM_VERIFY": "1", "KVSHM_STRICT": "1", **(environment or {})})
        self.open.append(self)

    def start_engines(self, *specs: EngineSpec) -> list[Engine]:
        self._count(*(spec.name for spec in specs if type(spec) is EngineSpec))
        return super().start_engines(*specs)

    def _count(self, *names: str) -> None:
        self.starts.extend(names)
        assert len(self.starts) <= MAX_STARTS, f"too many engine starts: {self.starts}"

    def run_script(self, script: str, *arguments: str) -> str:
        """Run a script of this folder, in which vLLM's engines live in its own process, to its
        end; returns what it has written."""
        self._count(script)
        here = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(script)), *arguments],
            env={**clean_environment(), **machine(core=0), **self.environment, **here},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def kvshm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a tool of the node to its end."""
        environ = {**clean_environment(), **self.environment}
        return subprocess.run([*TOOL, *arguments], env=environ, capture_output=True, text=True)

    @contextmanager
    def serving(self, path: Path) -> Iterator[None]:
        """Let ``kvshm kv serve`` offer a file's blocks; it ends as asked."""
        with open(path.with_suffix(".log"), "wb") as log:
            server = subprocess.Popen(
                [*TOOL, "kv", "serve", str(path)],
                env={**clean_environment(), **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield
        finally:
            server.terminate()
            assert server.wait(PATIENCE_S) == 0, path.with_suffix(".log").read_text()

    def shown_hashes(self, *engines: Engine) -> set[bytes]:
        """Return the hashes of all blocks that the engines show to others."""
        hashes: set[bytes] = set()
        for engine in engines:
            with closing(self.table(engine)) as table:
                hashes |= {s.block_hash for s in table.slots() if s.state is SlotState.READY}
        return hashes

    def stop_engines(self, *engines: Engine) -> None:
        """End engines that only one test needed; nothing happens to those that it has ended."""
        for engine in engines:
            engine.stop()
            if engine in self.engines:
                self.engines.remove(engine)

    def kill(self, engine: Engine) -> None:
        """Kill an engine and wait until the coordinator has removed what it left."""
        left = self.owned(engine)
        assert left
        engine.kill()
        for _ in wait_until("the dead engine is swept", PATIENCE_S):
            if not left & set(self.sockets()):
                break

    def close(self) -> None:
        super().close()
        self.open.remove(self)

    def evidence(self) -> Iterator[tuple[str, str]]:
        """Yield (title, text) of everything that explains a failure on this node."""
        for engine in self.engines:
            yield f"{engine!r}: end of its log", engine.log_tail()
        if self.coordinator_log.exists():
            yield "coordinator's log", self.coordinator_log.read_text(errors="replace")[-4000:]
        yield "index dump", self.dump()
