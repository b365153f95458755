"""What the checks look at: gathered once, by reading only, each part within a bounded time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kvshm.config import Config
from kvshm.errors import ConfigError

from ..node.reader import NodeReader
from ..node.reading import NodeReading

_OF_VLLM = re.compile(rb"(?:.*/)?vllm|vllm\.[\w.]+|VLLM::.*", re.DOTALL)
"""An argument of each process of an engine: of its program, or the name that it gives itself."""


@dataclass(frozen=True)
class EngineProcess:
    """One process of vLLM on this machine, kvshm's or not."""

    pid: int
    uid: int
    environ: Mapping[str, str] = field(repr=False)
    """Empty if it belongs to another user; a process that renames itself may have lost a part."""


@dataclass(frozen=True)
class Facts:
    """One machine and one run directory, as far as this user can see them."""

    run_dir: Path
    namespace: str | None
    environ: Mapping[str, str]
    """Of this process."""
    root: Path = Path("/")
    """Where the machine's files are."""

    @cached_property
    def reading(self) -> NodeReading:
        """One look at the engines that share, or declined to."""
        with NodeReader(self.run_dir, self.namespace) as reader:
            return reader.read()

    @cached_property
    def processes(self) -> tuple[EngineProcess, ...]:
        """Processes of vLLM, except those started by this one."""
        return tuple(_processes(self.root / "proc"))

    @cached_property
    def enabled(self) -> tuple[tuple[EngineProcess, Config | ConfigError], ...]:
        """Own processes of vLLM in whose environment kvshm is switched on, and their settings: one
        for each different environment."""
        found: dict[tuple[tuple[str, str], ...], tuple[EngineProcess, Config | ConfigError]] = {}
        for process in self.processes:
            relevant = {k: v for k, v in process.environ.items() if k in _ALSO or k[:6] == "KVSHM_"}
            with suppress(ConfigError):
                if not Config.from_env({"KVSHM_ENABLE": relevant.get("KVSHM_ENABLE", "")}).enable:
                    continue
            found.setdefault(tuple(sorted(relevant.items())), (process, _settings(relevant)))
        return tuple(found.values())


_ALSO = ("XDG_RUNTIME_DIR", "HOME", "VLLM_PLUGINS")


def _settings(environ: Mapping[str, str]) -> Config | ConfigError:
    try:
        return Config.from_env(environ)
    except ConfigError as exc:
        return exc


def _processes(proc: Path) -> Iterator[EngineProcess]:
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        pid = int(folder.name)
        if pid == os.getpid():
            continue
        with suppress(OSError):  # it has ended, or hides
            uid = folder.stat().st_uid
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if any(map(_OF_VLLM.fullmatch, arguments)):
                environ = _environ(folder / "environ") if uid == os.geteuid() else {}
                yield EngineProcess(pid, uid, environ)


def _environ(path: Path) -> dict[str, str]:
    pairs = (entry.partition(b"=") for entry in path.read_bytes().split(b"\0"))
    return {
        name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for name, equals, value in pairs
        if equals and name
    }
