"""vLLM as it might be elsewhere: older, or newer."""

from __future__ import annotations

import os
from pathlib import Path

from kvshm.hooks.vllm.refusals import TESTED_VLLM

_MAJOR, _MINOR = TESTED_VLLM[0]
TOO_OLD = (_MAJOR, _MINOR - 1, 2)
_MAJOR, _MINOR = TESTED_VLLM[-1]
UNTESTED = (_MAJOR, _MINOR + 1, 0)

VERSION = """
import sys, types
made = types.ModuleType("vllm._version")
made.__version__, made.__version_tuple__ = {version!r}, {numbers!r}
sys.modules[made.__name__] = made
"""
"""As sitecustomize.py: vLLM takes its version from the module that its build wrote."""


def dotted(version: tuple[int | str, ...]) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version))


def with_version(directory: Path, version: str) -> dict[str, str]:
    """Return the environment in which vLLM is of this version in all of its processes."""
    numbers = tuple(map(int, version.split(".")))
    text = VERSION.format(version=version, numbers=numbers)
    (directory / "sitecustomize.py").write_text(text)
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
