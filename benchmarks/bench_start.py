"""What installing kvshm takes, and what a process takes to start with it.

    .venv/bin/python benchmarks/bench_start.py [--rounds 40]

Bytes are those of the wheel in dist/release (`make release`), packed and unpacked.  Milliseconds
are those of whole processes, started in turns: Python alone, with kvshm imported, as a process of
vLLM that finds kvshm's plugin and is not told to use it, and two commands.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from measurement import ROOT, percentiles, report

PYTHON = (sys.executable, "-P")
ARMS: Mapping[str, Sequence[str]] = {
    "python": (*PYTHON, "-c", ""),
    "imported": (*PYTHON, "-c", "import kvshm"),
    "unused": (*PYTHON, "-c", "from kvshm.hooks.vllm import plugin; plugin.activate()"),
    "version": (*PYTHON, "-m", "kvshm.tools.cli", "--version"),
    "coordinator": (*PYTHON, "-m", "kvshm.coordinator", "--version"),
}
ENVIRONMENT = {"PATH": ""}
"""So KVSHM_ENABLE is not set."""


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    wheels = sorted(Path(ROOT, "dist/release").glob("*_x86_64.whl"))
    if not wheels:
        sys.exit("there is no wheel in dist/release: make release")
    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        for arm, command in ARMS.items():
            milliseconds = measured(command)
            if number:  # the first round fills caches
                taken[arm].append(milliseconds)
    report(
        "start",
        milliseconds={arm: percentiles(times) for arm, times in taken.items()},
        wheel=sizes(wheels[-1]),
    )


def measured(command: Sequence[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return 1e3 * (time.perf_counter() - begun)


def sizes(wheel: Path) -> dict[str, float]:
    """In kB, as pip downloads it and as it lies in site-packages."""
    with zipfile.ZipFile(wheel) as files:
        unpacked = sum(each.file_size for each in files.infolist())
    return {"packed_kb": round(wheel.stat().st_size / 1e3), "unpacked_kb": round(unpacked / 1e3)}


if __name__ == "__main__":
    main()
