"""Builds libcuda.so.1 played in host memory (played.h), so that the real cuda-bindings run."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.c"))


def missing() -> str | None:
    """Why the played driver cannot be used here, or None."""
    for name in ("torch", "triton", "cuda.bindings"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"the played driver needs {name}"
    if shutil.which("cc") is None:
        return "the played driver needs a C compiler"
    return None


def build(directory: Path) -> Path:
    library = directory / "libcuda.so.1"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    command = ["cc", *flags, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library]
    subprocess.run([*map(str, command), *map(str, SOURCES), "-pthread"], check=True)
    return library
