"""What the checks look at, gathered once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvshm._base.rundir import open_run_directory
from kvshm.errors import KvshmError, RunDirectoryError

from ..node.health import NodeHealth, judge_node
from ..node.reader import NodeReader
from ..node.reading import NodeReading
from .processes import Processes, find_processes, own_line

GPU_SECONDS = 5
LOGIND_FILES = (
    "/etc/systemd/logind.conf",
    *(f"{top}/systemd/logind.conf.d" for top in ("/usr/lib", "/run", "/etc")),
)
"""In the order in which a later one counts more."""


@dataclass(frozen=True)
class Evidence:
    run_dir: Path
    namespace: str | None
    """None: all."""
    refused: str
    """Why the run directory cannot be used; empty if it can, or is not there."""
    reading: NodeReading
    processes: Processes
    gpus: str | None
    environ: Mapping[str, str]
    proc: Path = Path("/proc")
    shm: Path = Path("/dev/shm")
    tmp: Path = Path("/tmp")
    logind: tuple[Path, ...] = tuple(map(Path, LOGIND_FILES))

    @cached_property
    def health(self) -> NodeHealth:
        return judge_node(self.reading)


def gather(run_dir: Path, namespace: str | None) -> Evidence:
    """Look once.  Blocks for some seconds at most if engines are stopped."""
    refused, reading = _why_refused(run_dir), NodeReading(0, ())
    if not refused:
        try:
            with NodeReader(run_dir, namespace) as reader:
                reading = reader.read()
        except (KvshmError, OSError) as exc:
            refused = f"the engines of {run_dir} cannot be read: {exc}"
    proc = Path("/proc")
    found = find_processes(proc, own_line(proc))
    return Evidence(run_dir, namespace, refused, reading, found, list_gpus(), os.environ)


def _why_refused(run_dir: Path) -> str:
    if not os.path.lexists(run_dir):
        return ""
    try:
        open_run_directory(str(run_dir), {})
        os.listdir(run_dir)
    except RunDirectoryError as exc:
        return str(exc)
    except OSError as exc:
        return f"run directory {run_dir} cannot be read: {exc.strerror}"
    return ""


def list_gpus() -> str | None:
    """Return a line for each GPU: index, name, MIG mode and compute mode.  None: no nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=index,name,mig.mode.current,compute_mode"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=GPU_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None
