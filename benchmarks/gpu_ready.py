"""Sees to it that this Python can run the GPU suite, or says what is missing.

What it lacks, except torch, is installed from dist/gpu (`make gpu-wheels`) into dist/gpu-site,
without an index and without a change to its own packages.  Needs only the standard library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS, SITE = ROOT / "dist" / "gpu", ROOT / "dist" / "gpu-site"
PACKAGES = ("pyzmq", "msgspec", "xxhash", "pytest", "pytest-timeout")
IMPORTS = "import kvshm._native, zmq, msgspec, xxhash, pytest, pytest_timeout"
GPU = "import sys, gpu_memory; sys.exit(gpu_memory.no_gpu())"


def main() -> int:
    if not runs(IMPORTS, quiet=True):
        if (reason := install()) is not None:
            print(reason)
            return 1
        if not runs(IMPORTS):
            return 1
    return 0 if runs(GPU) else 1


def runs(program: str, quiet: bool = False) -> bool:
    """Whether a new process of this Python can run these lines."""
    paths = [str(ROOT), str(ROOT / "examples"), str(SITE)]
    if before := os.environ.get("PYTHONPATH"):
        paths.append(before)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    output = subprocess.DEVNULL if quiet else None
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, stderr=output, check=False).returncode == 0


def install() -> str | None:
    """Install from dist/gpu; why that is not possible, or None."""
    if not list(WHEELS.glob("kvshm-*.whl")):
        return (
            f"{sys.executable} lacks something of: {IMPORTS}. Install it, or run `make gpu-wheels` "
            "where a package index is, and bring dist/gpu: docs/gpu.md"
        )
    options = ["--quiet", "--upgrade", "--no-index", "--find-links", str(WHEELS)]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(SITE)]
    if subprocess.run([*command, "kvshm", *PACKAGES], check=False).returncode != 0:
        return f"not everything could be installed from {WHEELS}"
    for library in (SITE / "kvshm").glob("_native*.so"):
        shutil.copy(library, ROOT / "kvshm")
    return None


if __name__ == "__main__":
    sys.exit(main())
