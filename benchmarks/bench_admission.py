"""What it costs a process of vLLM to tell whether kvshm knows its vLLM.

    .venv/bin/python benchmarks/bench_admission.py [--rounds 40]

Each measurement is a process of its own, which has imported what vLLM has imported by then, and
times ``kvshm.hooks.vllm.admission``: import, data file, vLLM's sources.  In turns: ``tested``, the
files of a tested version; ``equal``, files of which none is known as a whole, as in a version that
nobody has tested, with every function known.  Files come out of the page cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from measurement import percentiles, report

MEASURED = """
import ast, functools, hashlib, json, logging, pathlib, re, sys, time, typing
import kvshm
begun = time.perf_counter()
from kvshm.hooks.vllm.admission import examine, known_sources
known = known_sources()["files"]
if sys.argv[2] == "equal":
    known = {file: {**one, "whole": {}} for file, one in known.items()}
assert examine(pathlib.Path(sys.argv[1]), known) == ((), ())
print(time.perf_counter() - begun)
"""


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("there is no vLLM in this environment: make setup")
    root = Path(spec.origin).parent
    taken: dict[str, list[float]] = {"tested": [], "equal": []}
    for _ in range(rounds):
        for arm, times in taken.items():
            times.append(measured(root, arm))
    report("admission", milliseconds={arm: percentiles(times) for arm, times in taken.items()})


def measured(root: Path, arm: str) -> float:
    """Return the milliseconds that a new process takes."""
    command = [sys.executable, "-c", MEASURED, str(root), arm]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return 1e3 * float(printed)


if __name__ == "__main__":
    main()
