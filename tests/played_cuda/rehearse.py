"""Runs the Python of all GPU scripts to its end, on a machine without a GPU: `make rehearse-gpu`.

    python -m tests.played_cuda.rehearse [a b c d e]

The suite runs as on a GPU, with small sizes, over the played driver (library) and with torch's CUDA
functions on the CPU (stand_in).  A rate or a time from it means nothing.  Not rehearsed, since
nothing plays it: compute-sanitizer and MPS themselves, memory that is used or free, torch's own
allocators, what a dead process's memory reads as, and errors that end a context.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import library

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE = "5"
"""Limits are those of 16 cores."""
PARTS = ("a", "b", "c", "d", "e")


def main() -> int:
    if (reason := library.missing()) is not None:
        print(reason)
        return 1
    print(__doc__)
    parts = sys.argv[1:] or PARTS
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        library.build(Path(directory))
        failed = run(directory, *parts)
        if "d" in parts:
            failed |= run(directory, "peers", PLAYED_GPUS="2")
    return failed


def run(directory: str, *parts: str, **variables: str) -> int:
    """Run parts over the library in a directory; 1 if a step failed."""
    environment = {
        **os.environ, "GPU_SMALL": "1", **variables,
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", directory),
        "PATH": before("PATH", str(HERE / "programs")),
        "PYTHONPATH": before("PYTHONPATH", str(HERE / "stand_in")),
    }  # fmt: skip
    command = [sys.executable, "benchmarks/gpu_suite.py", "--patience", PATIENCE, *parts]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def before(variable: str, path: str) -> str:
    return os.pathsep.join(filter(None, (path, os.environ.get(variable))))


if __name__ == "__main__":
    sys.exit(main())
